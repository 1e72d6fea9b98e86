"""English words for keys and lists, from the word lists that RULER takes them from."""

from __future__ import annotations

import functools
import random
import re

from memagent_evaluation.extra_modules import extra_module

_PLAIN = re.compile(r"[a-z]+")


def pair(chance: random.Random) -> str:
    """An adjective and a noun as one word, such as "quiet-falcon".

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    return f"{chance.choice(words('adjective'))}-{chance.choice(words('noun'))}"


def all_words() -> tuple[str, ...]:
    """Adjectives, nouns and verbs, each once, in alphabetical order."""
    return tuple(sorted({*words("adjective"), *words("noun"), *words("verb")}))


@functools.cache
def words(part_of_speech: str) -> tuple[str, ...]:
    """The plain words of a part of speech, in alphabetical order.

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    wonderwords = extra_module("wonderwords", "RULER's word keys and word lists")
    found = wonderwords.RandomWord().filter(include_categories=[part_of_speech])
    return tuple(sorted({word for word in found if _PLAIN.fullmatch(word)}))
