"""The common part of all generated tasks: random numbers by name, and samples from planned documents."""

from __future__ import annotations

import functools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.tasks.fitting import Haystack, Insertion, fit, least_tokens
from memagent_evaluation.tasks.seeding import source
from memagent_graph.errors import EvaluationError

DEPTHS = tuple(step / 39 for step in range(40))
"""RULER's places for needles: forty of them, evenly spaced, from a document's beginning to its end."""

SMALL_ANSWER_TOKENS = 48
"""An answer's tokens in small variants, if the published number is larger: the embedded policy's budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask(ABC):
    """The common part of a task: its description, and the arithmetic of lengths.

    Attributes:
        name: its name.
        settings: its settings.
        answer_tokens: how many tokens of a length are reserved for the answer.
        metric: how several gold strings count.
        unit: what lengths count.
        shares_documents: whether several samples can ask about one document
            (`TaskSettings.questions_per_document`).
        dials: the fields that can be set after its name, as in "multi_hop_2:gap=0.1".
        margin: the largest ratio between the smallest lengths of two samples.
        whole_document: whether the answer is based on the whole document, so that needles are not all its evidence.
    """

    whole_document: ClassVar[bool] = False
    shares_documents: ClassVar[bool] = False
    dials: ClassVar[tuple[str, ...]] = ()
    margin: ClassVar[float] = 1.15

    name: str
    settings: TaskSettings
    answer_tokens: int
    metric: Metric = Metric.ALL
    unit: LengthUnit = LengthUnit.TOKENS

    @abstractmethod
    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where there is none."""

    def shared(self, index: int) -> tuple[int, int]:
        """The number of a sample's document, and the index of its question among those about the document."""
        return divmod(index, self.settings.questions_per_document)

    @property
    def draws_of(self) -> str:
        """The name that random numbers depend on: the task's, with its options."""
        return self.name

    def chance(self, length: int, index: int, *purpose: str | int) -> random.Random:
        """The sample's random numbers: the same for the same seed, task, length and index, in any process.

        Raises:
            EvaluationError: there can be no such sample.
        """
        if index < 0:
            raise EvaluationError(f"{self.name} has no sample {index}", hint="Samples are counted from 0.")
        if length < 1:
            raise EvaluationError(f"{self.name} has no length {length}", hint=f"Lengths are {self.unit}, at least 1.")
        return source(self.settings, self.draws_of, length, index, *purpose)

    def room(self, length: int, question: str) -> int:
        """How many tokens are left for the document; negative if not even the question fits."""
        return length - self.settings.tokenizer.count(question) - self.answer_tokens - self.settings.prompt_tokens

    def too_short(self, length: int, missing: int) -> EvaluationError:
        """The error for a length that is too small for the task's parts.

        Keys and words differ at other lengths and indices: the recommended length is a few tokens more than needed
        here.
        """
        least, counted = length + missing, "of the document"
        if self.unit is LengthUnit.TOKENS:
            least, counted = (
                10 * math.ceil(self.margin * least / 10),
                "of document, question, prompt and answer together",
            )
        return EvaluationError(
            f"a length of {length:,} {self.unit} is too small for {self.name}",
            hint=f"Ask for at least {least:,}, {counted}.",
        )

    def planned(
        self,
        length: int,
        index: int,
        question: str,
        gold: tuple[str, ...],
        haystack: Haystack,
        insertions: Sequence[Insertion],
        beside: Sequence[str] = (),
    ) -> Sample:
        """The sample whose document is a haystack with insertions, with exactly the requested length.

        Args:
            length: as asked.
            index: as asked.
            question: the sample's.
            gold: the sample's.
            haystack: the text around the insertions.
            insertions: those of all questions about the document; only this sample's evidence has gold strings.
            beside: all questions about the document, if there are several: the longest one determines its length, so
                that it is the same for all.

        Raises:
            EvaluationError: the insertions alone are longer.
        """
        tokenizer = self.settings.tokenizer
        room = min(self.room(length, each) for each in (question, *beside))
        least = least_tokens(haystack, insertions, tokenizer)
        if least > room:
            raise self.too_short(length, least - room)
        layout = fit(haystack, insertions, room, tokenizer)
        text = functools.partial(layout.pieces, haystack)
        return Sample(self, length, index, question, gold, text, layout.needles(haystack))
