"""RULER's variable tracking: a value assigned from variable to variable, in noise; the answer is all their names.

One chain of four hops: five variables of five capitals, the first with a value of five digits. Before the text is a
worked example of the same kind, as in RULER: with some 500 tokens, or half as many below 4096 tokens. The small variant
has two hops, three variables of three capitals, and no example, because its lengths are too small.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Container
from dataclasses import dataclass

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.fitting import Insertion
from memagent_evaluation.tasks.generated import DEPTHS, GeneratedTask

_ANSWER_TOKENS = 30
_SHORT_LENGTH = 4096
_EXAMPLE_NOISE = (8, 36)
"""How many noise sentences the worked example has: in short texts, and in others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesTask(GeneratedTask):
    """Variable tracking.

    Attributes:
        hops: how often the value is passed on.
        capitals: how long a variable's name is.
    """

    hops: int = 4
    capitals: int = 5

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        chance = self.chance(length, index)
        names, value, statements = self._chain(chance)
        depths = sorted(chance.sample(DEPTHS, len(names)))
        chain = [
            Insertion(statement, depth, name) for name, statement, depth in zip(names, statements, depths, strict=True)
        ]
        if not self.settings.small:
            # Before everything else at the beginning: insertions of one depth keep their order.
            example = self._example(length, self.chance(length, index, "example"), {*names, value})
            chain.insert(0, Insertion(example, 0.0))
        question = (
            f"Which variables have the value {value} in the provided text, be it assigned or taken over from "
            "another variable? Name all of them."
        )
        return self.planned(length, index, question, tuple(names), haystacks.noise(), chain)

    def _chain(self, chance: random.Random, taken: Container[str] = ()) -> tuple[list[str], str, list[str]]:
        """Variables, their value, and the sentences that state it; without anything in `taken`."""
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(chance.choices(string.ascii_uppercase, k=self.capitals))
            if name not in names and name not in taken:
                names.append(name)
        value = str(chance.randrange(10_000, 100_000))
        while value in taken:
            value = str(chance.randrange(10_000, 100_000))
        sources = [value, *(f"VAR {name}" for name in names)]
        return names, value, [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]

    def _example(self, length: int, chance: random.Random, taken: Container[str]) -> str:
        names, value, statements = self._chain(chance, taken)
        number = _EXAMPLE_NOISE[length >= _SHORT_LENGTH]
        lines = list(itertools.islice(haystacks.noise().units(), number))
        for place, statement in zip(
            sorted(chance.sample(range(number), len(names)))[::-1], statements[::-1], strict=True
        ):
            lines.insert(place, statement)
        listed = "\n".join(lines)
        return (
            f"An example of a text:\n{listed}\nThe variables that have the value {value} in the example are: "
            f"{', '.join(names)}.\n\nThe text in question:"
        )


def variables_task(name: str, settings: TaskSettings) -> VariablesTask:
    """`vt`."""
    if settings.small:
        return VariablesTask(name=name, settings=settings, answer_tokens=_ANSWER_TOKENS, hops=2, capitals=3)
    return VariablesTask(name=name, settings=settings, answer_tokens=_ANSWER_TOKENS)
