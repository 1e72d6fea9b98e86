"""Planted facts as tasks, to train the embedded policy on what it is measured on, but from the split it may see.

    memagent rl --task memagent_training.embedded.tasks:Alone --task memagent_training.embedded.tasks:AmongForeign ...

Entities and values are those of `PlantedFacts` outside its held-out split, which RULER's small variants and
`memagent_training.embedded.evaluate` ask for. The prose is the settings' haystack, or the docstrings of the standard
library; never the language reference, which is measured on.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

from memagent_graph.evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph.evaluation.prose import library_docstrings
from memagent_graph.evaluation.samples import Sample
from memagent_graph.evaluation.tasks import TaskSettings
from memagent_graph.evaluation.tasks.fitting import Haystack, Insertion
from memagent_graph.evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_graph.evaluation.tasks.haystacks import Prose, prose

_TOKENS_PER_FACT = 256
"""One foreign fact a chunk, on average, beside the asked one."""
_NEAR_MISSES = 0.5
_FIRST_SENTENCES = 3000


class _PlantedFact(GeneratedTask):
    """One number asked for in prose."""

    __slots__ = ()

    def __init__(self, settings: TaskSettings, name: str) -> None:
        super().__init__(name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS)

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the facts, question and answer.
        """
        chance = self.chance(length, index)
        facts = PlantedFacts(chance, number_share=1.0)
        asked = facts.fact()
        insertions = [Insertion(asked.statement, chance.random(), asked.value)]
        insertions += [Insertion(each.statement, chance.random()) for each in self.foreign(facts, asked, length)]
        haystack = self._haystack(chance)
        return self.planned(length, index, asked.question, (asked.value,), haystack, insertions)

    def foreign(self, facts: PlantedFacts, asked: Fact, length: int) -> Iterator[Fact]:
        """What else is stated: other facts, none of them an answer."""
        raise NotImplementedError

    def _haystack(self, chance: random.Random) -> Haystack:
        if self.settings.haystack is not None:
            return prose(self.settings.haystack, chance)
        return Prose(lambda: itertools.cycle(_docstrings()), chance.randrange(_FIRST_SENTENCES))


class Alone(_PlantedFact):
    """The asked fact is the only one."""

    __slots__ = ()

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, "alone")

    def foreign(self, facts: PlantedFacts, asked: Fact, length: int) -> Iterator[Fact]:
        """None."""
        return iter(())


class AmongForeign(_PlantedFact):
    """On average one foreign fact in each chunk; half of them near misses of the asked one."""

    __slots__ = ()

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings, "among_foreign")

    def foreign(self, facts: PlantedFacts, asked: Fact, length: int) -> Iterator[Fact]:
        """As many as there are chunks."""
        taken = {(asked.attribute, asked.entity.lower())}
        while len(taken) <= max(1, length // _TOKENS_PER_FACT):
            fact = facts.near_miss(asked) if facts.random.random() < _NEAR_MISSES else facts.fact()
            key = (fact.attribute, fact.entity.lower())
            if key not in taken and fact.value != asked.value:
                taken.add(key)
                yield fact


@functools.lru_cache(maxsize=1)
def _docstrings() -> tuple[str, ...]:
    return tuple(library_docstrings())
