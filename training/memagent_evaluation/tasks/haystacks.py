"""The text that needles are hidden in: noise, other needles, prose. All of them are endless streams."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memagent_evaluation.prose import library_docstrings, reference_topics
from memagent_evaluation.tasks.fitting import Haystack
from memagent_graph.errors import EvaluationError

NOISE = (
    "The kettle is on the stove.",
    "Rain falls on the roof.",
    "A bus goes by.",
    "The clock in the hall is slow again.",
    "Nobody minds.",
)
"""Sentences without information, repeated in this order."""

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*\s+(?=[^a-z\s])|[。！？]+[」』”’）]*")
_LONGEST_SENTENCE = 600
_LONGEST_PARAGRAPH = 4000
_FIRST_SENTENCES = 1000
_SUFFIXES = {".txt", ".md"}


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a stream."""

    lines: Callable[[], Iterator[str]]

    def units(self) -> Iterator[str]:
        """The lines."""
        return self.lines()

    def piece(self, position: int, text: str) -> str:
        """A line with its end."""
        return text + "\n"


@dataclass(frozen=True, slots=True)
class Prose:
    """Sentences of paragraphs; the white space between them is part of the sentences."""

    paragraphs: Callable[[], Iterator[str]]
    """Without end."""
    skipped: int = 0
    """The index of the first sentence."""

    def units(self) -> Iterator[str]:
        """The sentences."""
        sentences = itertools.chain.from_iterable(map(split_sentences, self.paragraphs()))
        return itertools.islice(sentences, self.skipped, None)

    def piece(self, position: int, text: str) -> str:
        """A sentence, separated from the next one."""
        return text if text.endswith((" ", "\n", "。", "！", "？", "」", "』")) else text + " "


def noise() -> Lines:
    """The noise sentences, one per line."""
    return Lines(lambda: itertools.cycle(NOISE))


def prose(path: Path | None, chance: random.Random) -> Haystack:
    """Prose from a user's file or folder, or from Python's own texts, beginning at one of its first sentences.

    Python's texts depend on its version, so samples are equal only if the versions are.

    Raises:
        EvaluationError: there is no text at `path`.
    """
    skipped = chance.randrange(_FIRST_SENTENCES)
    if path is None:
        return Prose(_python_prose, skipped)
    files = _text_files(path)
    if next(_paragraphs(files), None) is None:
        raise EvaluationError(
            f"the haystack {path} holds no text", hint="Name a file of prose, or a folder with .txt or .md files."
        )
    return Prose(lambda: itertools.chain.from_iterable(_paragraphs(files) for _ in itertools.repeat(None)), skipped)


def split_sentences(paragraph: str) -> Iterator[str]:
    """A paragraph's sentences, each with the white space after it; the last one ends the paragraph.

    Text without a sentence end for hundreds of characters is split at spaces.
    """
    start = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(paragraph)), len(paragraph)]:
        while end - start > _LONGEST_SENTENCE:
            space = paragraph.rfind(" ", start, start + _LONGEST_SENTENCE)
            cut = space + 1 if space > start else start + _LONGEST_SENTENCE
            yield paragraph[start:cut]
            start = cut
        if paragraph[start:end].strip():
            yield paragraph[start:end] + ("\n\n" if end == len(paragraph) else "")
        start = end


@functools.lru_cache(maxsize=1)
def _docstrings() -> tuple[str, ...]:
    """About a megabyte, kept in memory: parsing the library for each document would take seconds."""
    return tuple(library_docstrings())


def _python_prose() -> Iterator[str]:
    """Like `prose.prose`, which parses the library again in each round."""
    while True:
        yield from reference_topics()
        yield from _docstrings()


def _text_files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file()))
    if path.is_file():
        return (path,)
    raise EvaluationError(
        f"there is no haystack {path}", hint="Name a file of prose, or a folder with .txt or .md files."
    )


def _paragraphs(files: tuple[Path, ...]) -> Iterator[str]:
    """Paragraphs of files, read one line at a time: separated by empty lines, with single spaces."""
    for path in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                yield from _joined_lines(_bounded_lines(file.readline))
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(
                f"the haystack {path} cannot be read: {error}", hint="Haystacks are UTF-8 text; convert it first."
            ) from error


def _bounded_lines(readline: Callable[[int], str]) -> Iterator[str]:
    return iter(lambda: readline(_LONGEST_PARAGRAPH), "")


def _joined_lines(lines: Iterator[str]) -> Iterator[str]:
    held: list[str] = []
    characters = 0
    for line in itertools.chain(lines, [""]):
        words = " ".join(line.split())
        if held and (not words or characters + len(words) > _LONGEST_PARAGRAPH):
            yield " ".join(held)
            held, characters = [], 0
        if words:
            held.append(words)
            characters += len(words) + 1
