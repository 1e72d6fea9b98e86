"""The interface of a task: documents as streams, questions, gold answers. A task of your own takes twenty lines.

    import random
    from itertools import chain, repeat

    from memagent_evaluation.samples import LengthUnit, Metric, Sample


    class Birthdays:
        name, metric, unit, answer_tokens = "birthdays", Metric.ALL, LengthUnit.TOKENS, 16

        def sample(self, length, index):
            day = str(random.Random(f"{length}/{index}").randrange(10, 29))
            fact = f"Ada was born on day {day} of the month."

            def text():
                return chain([fact], repeat(" It was a day like all the others.", length // 11))

            return Sample(self, length, index, "On which day of the month was Ada born?", (day,), text)

`memagent eval my_tasks.py:Birthdays` then measures it like any other. A task whose data determines its lengths may list
them (`planning.OwnLengths`); a task may also have its own metric (`scorers.OwnMetric`). If samples name their needles,
the report says where facts were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from memagent_graph.tokenizers import Tokenizer


class Metric(StrEnum):
    """How RULER's string match counts several gold strings."""

    ALL = "all"
    """The fraction of gold strings that the prediction contains."""
    ANY = "any"
    """1 if the prediction contains any of them: they are wordings of one answer. RULER calls it "part"."""


class LengthUnit(StrEnum):
    """The unit of a task's lengths."""

    TOKENS = "tokens"
    """The policy's tokens of document, question and answer together, and of the prompt around them
    (`TaskSettings.prompt_tokens`), as RULER counts."""
    PASSAGES = "passages"


@dataclass(frozen=True, slots=True)
class Needle:
    """A text in the document that the answer is based on."""

    text: str
    """Its exact text in the document."""
    gold: str
    """Its gold string; if it only leads to the answer, its contribution, such as the name for the next hop."""
    depth: float
    """The position of its first character, as a fraction of the document's characters, 0 to 1."""


class Task(Protocol):
    """A kind of question at any length. Equal arguments give equal samples, in any process."""

    @property
    def name(self) -> str:
        """The task's name on the command line and in results."""
        ...

    @property
    def metric(self) -> Metric:
        """How string match counts several gold strings."""
        ...

    @property
    def unit(self) -> LengthUnit:
        """The unit of `length`."""
        ...

    @property
    def answer_tokens(self) -> int:
        """The tokens of `length` that are reserved for the answer, as in RULER.

        A completion may have more, if the reader's budget is larger: limits such as RULER's 30 for variable tracking
        are for models that continue an answer in the prompt, and would cut off a chat model, which writes text before
        the box.
        """
        ...

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the task, or there are fewer samples.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One question on one document."""

    task: Task
    length: int
    """The requested length, in the task's unit."""
    index: int
    question: str
    gold: tuple[str, ...]
    text: Callable[[], Iterator[str]] = field(repr=False)
    """The document in pieces, the same at each call."""
    needles: tuple[Needle, ...] = field(default=(), repr=False)
    """The texts that the answer is based on, if known; in word lists, the first occurrences of the gold strings."""
    reached_length: int | None = None
    """The length that was reached, at most `length`, in the same unit; None if unknown."""

    @property
    def id(self) -> str:
        """The sample's id in results: task, length and index."""
        return f"{self.task.name}/{self.length}/{self.index}"


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Everything but length and index that a sample depends on."""

    tokenizer: Tokenizer
    """The policy's tokenizer, which counts lengths."""
    seed: int = 0
    small: bool = False
    """Whether to make the small variant, for policies with budgets of a few hundred tokens; tasks describe theirs."""
    haystack: Path | None = None
    """A text file, or a folder of .txt and .md files, to take prose from; if None, Python's documentation."""
    data: Path | None = None
    """A data file, or a folder of data files under their published names; `evaluation` in the data folder if None."""
    questions_per_document: int = 1
    """The number K of consecutive samples that ask about one document: 0 to K - 1, K to 2 K - 1, and so on."""
    prompt_tokens: int = 0
    """The tokens of the prompt around document and question in one call with the whole document. As in RULER, lengths
    include them, so that a document as long as the window fits in such a call."""
