"""Planted facts as tasks, to train the embedded policy on questions like those with which it is measured, from the
training split.

    memagent rl --task recipes.embedded.tasks:Alone --task recipes.embedded.tasks:AmongForeign ...

Entities and values are from the training split of `PlantedFacts`; RULER's small variants ask for the other split. They
are planted in unchanged text, with its line breaks, headings and tables: a file from the settings, as written by
`recipes.embedded.corpus`, or the docstrings of the standard library; never the language reference, which is used for
measuring. In half of the documents they are between sentences, in the others between any two words. The target fact is
more often near the start, so that it must survive more updates. Some samples with foreign facts do not state the target
fact; the right answer is then "none".
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_evaluation.samples import Sample
from memagent_evaluation.tasks import TaskSettings
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.haystacks import iter_docstrings, make_sentence_haystack
from memagent_evaluation.tasks.placements import Haystack, Insertion
from memagent_graph.errors import EvaluationError
from recipes.embedded.corpus import SEPARATOR
from recipes.embedded.training_examples import EMPTY

_TOKENS_PER_FACT = 256
"""The average number of tokens per foreign fact: one fact per chunk, in addition to the target fact."""
_NEAR_MISS_FRACTION = 0.5
"""The fraction of foreign facts that are near misses of the target fact."""
_ABSENT_FRACTION = 0.2
"""The fraction of questions among foreign facts without an answer in the document."""
_SENTENCE_FRACTION = 0.5
"""The fraction of documents in which facts are planted between sentences."""
_HARD_VALUES = ((0.25, re.compile(r"\d{3}0\d\d")), (0.1, re.compile(r"(\d{3})\1")))
"""Patterns of numbers that the policy often copies wrongly, with their sampling rates. Each group of three digits is a
token: a group that begins with 0 is rare, as it is never the first one, and after a group that occurs twice, a copy may
continue from either place."""
_PARAGRAPH = re.compile(r".*?\S.*?(?:\n\s*\n|\Z)", re.DOTALL)
_WORD = re.compile(r"\S+\s*")


class _PlantedFact(GeneratedTask):
    """A question about one number that is stated in prose."""

    __slots__ = ()
    title: ClassVar[str]
    absent_fraction: ClassVar[float] = 0.0
    """The fraction of samples that do not state the number."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(name=self.title, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS)

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the facts, question and answer.
        """
        rng = self.make_sample_rng(length, index)
        facts = PlantedFacts(rng, number_fraction=1.0)
        fact = self._draw_target(facts, rng)
        foreign_facts = self.draw_foreign_facts(facts, fact, length)
        insertions = [Insertion(foreign_fact.statement, rng.random()) for foreign_fact in foreign_facts]
        is_stated = rng.random() >= self.absent_fraction
        if is_stated:
            insertions.append(Insertion(fact.statement, rng.random() ** 2, fact.value))
        gold = fact.value if is_stated else EMPTY
        return self.lay_out_sample(length, index, fact.question, (gold,), self._make_haystack(rng), insertions)

    def draw_foreign_facts(self, facts: PlantedFacts, target: Fact, length: int) -> Iterator[Fact]:
        """Yield other facts to state, which do not answer the question; by default none."""
        return iter(())

    @staticmethod
    def _draw_target(facts: PlantedFacts, rng: random.Random) -> Fact:
        chance = rng.random()
        fact = facts.draw_fact()
        for sampling_rate, pattern in _HARD_VALUES:
            while 0 <= chance < sampling_rate and not pattern.match(fact.value):
                fact = facts.draw_fact()
            chance -= sampling_rate
        return fact

    def _make_haystack(self, rng: random.Random) -> Haystack:
        text = _load_text(self.settings.haystack)
        start = max(text.find(" ", rng.randrange(len(text))), 0)
        if rng.random() < _SENTENCE_FRACTION:
            return make_sentence_haystack(
                lambda: (match[0].rstrip() for match in _iter_cyclic_matches(_PARAGRAPH, text, start))
            )
        words = partial(_iter_cyclic_matches, _WORD, text, start)
        return Haystack(
            lambda: (match[0] for match in words()), lambda _, word: word if word[-1].isspace() else word + " "
        )


class Alone(_PlantedFact):
    """The target fact is the only fact."""

    __slots__ = ()
    title = "alone"


class AmongForeign(_PlantedFact):
    """On average one foreign fact per chunk, half of them near misses of the target fact, which may be absent."""

    __slots__ = ()
    title = "among_foreign"
    absent_fraction = _ABSENT_FRACTION

    def draw_foreign_facts(self, facts: PlantedFacts, target: Fact, length: int) -> Iterator[Fact]:
        """Yield as many foreign facts as there are chunks."""
        used_keys = {(target.attribute, target.entity.lower())}
        while len(used_keys) <= max(1, length // _TOKENS_PER_FACT):
            fact = facts.draw_near_miss(target) if facts.random.random() < _NEAR_MISS_FRACTION else facts.draw_fact()
            key = (fact.attribute, fact.entity.lower())
            if key not in used_keys and fact.value != target.value:
                used_keys.add(key)
                yield fact


def _iter_cyclic_matches(pattern: re.Pattern[str], text: str, start: int) -> Iterator[re.Match[str]]:
    """Yield matches from `start` on, then from the beginning, and so on without end."""
    yield from pattern.finditer(text, start)
    while True:
        yield from pattern.finditer(text)


@functools.lru_cache(maxsize=1)
def _load_text(path: Path | None) -> str:
    """Return the text in which facts are planted: the documents of a file, or docstrings.

    Raises:
        EvaluationError: the file cannot be read, or has no text.
    """
    hint = "Name a UTF-8 file of prose, for example one that recipes.embedded.corpus wrote."
    if path is None:
        return "\n\n".join(filter(None, iter_docstrings()))
    try:
        text = path.read_text(encoding="utf-8-sig").replace(SEPARATOR, "\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"the haystack {path} cannot be read: {error}", hint=hint) from error
    if not text.strip():
        raise EvaluationError(f"the haystack {path} holds no text", hint=hint)
    return text
