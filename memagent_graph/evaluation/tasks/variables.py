"""RULER's variable tracking: a value handed from variable to variable, in noise; the answer is all their names.

One chain of four hops: five variables of five capitals, the first with a value of five digits. The small variant has
two hops, three variables of three capitals.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from memagent_graph.evaluation.samples import Sample, TaskSettings
from memagent_graph.evaluation.tasks import haystacks
from memagent_graph.evaluation.tasks.fitting import Insertion
from memagent_graph.evaluation.tasks.generated import DEPTHS, GeneratedTask

_ANSWER_TOKENS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesTask(GeneratedTask):
    """Variable tracking.

    Attributes:
        hops: How often the value is handed on.
        capitals: How long a variable's name is.
    """

    hops: int = 4
    capitals: int = 5

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        chance = self.chance(length, index)
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(chance.choices(string.ascii_uppercase, k=self.capitals))
            if name not in names:
                names.append(name)
        value = str(chance.randrange(10_000, 100_000))
        sources = [value, *(f"VAR {name}" for name in names)]
        depths = sorted(chance.sample(DEPTHS, len(names)))
        chain = [
            Insertion(f"VAR {name} = {source}", depth, name)
            for name, source, depth in zip(names, sources, depths, strict=False)
        ]
        question = (
            f"Which variables have the value {value} in the provided text, be it assigned or taken over from "
            "another variable? Name all of them."
        )
        return self.planned(length, index, question, tuple(names), haystacks.noise(), chain)


def variables_task(name: str, settings: TaskSettings) -> VariablesTask:
    """`vt`."""
    if settings.small:
        return VariablesTask(name=name, settings=settings, answer_tokens=_ANSWER_TOKENS, hops=2, capitals=3)
    return VariablesTask(name=name, settings=settings, answer_tokens=_ANSWER_TOKENS)
