"""The base of generated tasks: seeded random numbers, and samples from laid-out documents.

Random numbers are the same in every process.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.tasks.placements import Haystack, Insertion, lay_out
from memagent_graph.errors import EvaluationError

_Item = TypeVar("_Item")

DEPTHS = tuple(step / 39 for step in range(40))
"""RULER's forty needle depths, evenly spaced from the beginning of a document to its end."""

SMALL_ANSWER_TOKENS = 48
"""The tokens for answers in small variants: the budget of the embedded policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask(ABC):
    """The base class of generated tasks: their description, and the arithmetic of lengths.

    Attributes:
        name: the name on the command line, with its options.
        settings: the settings of all tasks.
        answer_tokens: the number of tokens of a length that are reserved for the answer.
        metric: how string match counts several gold strings.
        unit: what lengths count.
        shares_documents: whether several samples can ask about one document
            (`TaskSettings.questions_per_document`).
        options: the fields that can be set after the name, as in "state_2:facts=50".
        length_margin: the largest ratio between the minimum lengths of two samples.
    """

    shares_documents: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()
    length_margin: ClassVar[float] = 1.15

    name: str
    settings: TaskSettings
    answer_tokens: int
    metric: Metric = Metric.ALL
    unit: LengthUnit = LengthUnit.TOKENS

    @abstractmethod
    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length. Raises EvaluationError where there is none."""

    def make_sample_rng(self, length: int, index: int, *purpose: str | int) -> random.Random:
        """Return a generator that is the same for equal seed, task, length, index and purpose, in any process."""
        return make_rng(self.settings, self.name, length, index, *purpose)

    def compute_document_budget(self, length: int, question: str) -> int:
        """Return the number of tokens for the document; negative if not even the question fits."""
        return length - self.settings.tokenizer.count(question) - self.answer_tokens - self.settings.prompt_tokens

    def make_length_error(self, length: int, missing: int) -> EvaluationError:
        """Return the error for a length that is `missing` units too small for a sample.

        Other samples may have longer keys and words, so the error recommends a slightly larger length.
        """
        min_length, unit = length + missing, "of the document"
        if self.unit is LengthUnit.TOKENS:
            min_length = 10 * math.ceil(self.length_margin * min_length / 10)
            unit = "of document, question, prompt and answer together"
        return EvaluationError(
            f"a length of {length:,} {self.unit} is too small for {self.name}",
            hint=f"Ask for at least {min_length:,}, {unit}.",
        )

    def lay_out_sample(
        self,
        length: int,
        index: int,
        question: str,
        gold: tuple[str, ...],
        haystack: Haystack,
        insertions: Sequence[Insertion],
        all_questions: Sequence[str] = (),
    ) -> Sample:
        """Return the sample whose document is a haystack with insertions, as long as `length` allows.

        Args:
            length: the requested length.
            index: the sample's index.
            question: the sample's question.
            gold: its gold strings.
            haystack: the text around the insertions.
            insertions: the insertions of all questions on the document; only this sample's evidence has gold strings.
            all_questions: if the document has several: the longest one limits its length, so that it is the same for
                all of them.

        Raises:
            EvaluationError: the insertions alone are too long.
        """
        budget = min(self.compute_document_budget(length, text) for text in (question, *all_questions))
        layout, tokens = lay_out(haystack, insertions, budget, self.settings.tokenizer)
        if tokens > budget:
            raise self.make_length_error(length, tokens - budget)
        reached_length = length - self.compute_document_budget(length, question) + tokens
        return Sample(self, length, index, question, gold, layout.iter_pieces, layout.find_needles(), reached_length)


def make_rng(settings: TaskSettings, *names: str | int) -> random.Random:
    """Return a generator that depends only on the seed and these names."""
    return random.Random("/".join(str(name) for name in (settings.seed, *names)))


def iter_shuffled(items: Sequence[_Item], rng: random.Random) -> Iterator[_Item]:
    """Yield all items in random order. Only items that are requested take memory and time."""
    moved_indices: dict[int, int] = {}
    for last_index in reversed(range(len(items))):
        index = rng.randint(0, last_index)
        yield items[moved_indices.get(index, index)]
        moved_indices[index] = moved_indices.pop(last_index, last_index)
