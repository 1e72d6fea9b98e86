"""A task from the examples of a data file: which of them belong to a length, and their samples.

Documents in files have their own lengths. An example belongs to `length` if its own length is at most that and more
than half of it; so lengths that double, as in RULER, include every example once. Each format defines its own length.
Examples keep the file's order: index 0 is the first one of the length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol

from memagent_evaluation.data_files.table_rows import TableRow, TableRows
from memagent_evaluation.samples import LengthUnit, Metric, Needle, Sample
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import Tokenizer

_PIECE_CHARACTERS: Final = 1 << 16
_MEASURED_PIECES: Final = 5
_MEASURED_CHARACTERS: Final = 1200
_MAX_EXACT_LENGTHS: Final = 16


class DamagedRowError(ValueError):
    """A row with a missing or wrong field; the caller, who knows the row's place, makes a message from it."""


@dataclass(frozen=True, slots=True)
class FileExample:
    """A question on a document, from a file."""

    question: str
    gold: tuple[str, ...]
    document: str
    needles: tuple[Needle, ...] = ()
    metric: Metric = Metric.ANY
    length: int | None = None
    """Its own length, if the file states it."""
    prefix: str = ""
    """What its answer begins with, if that is not part of what is asked for."""


class FileExamples(Protocol):
    """Examples in a fixed order; each is made on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> FileExample: ...


@dataclass(frozen=True, slots=True)
class RowExamples:
    """Examples that are rows of a file."""

    rows: TableRows
    read: Callable[[TableRow], FileExample]
    """Makes the example of a row, or raises DamagedRowError."""
    hint: str
    """A description of the format's rows."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> FileExample:
        """Return an example.

        Raises:
            EvaluationError: the row is damaged; the file and line are named.
        """
        row = self.rows[index]
        try:
            example = self.read(row)
            for what, text in (("question", example.question), ("document", example.document)):
                if not text.strip():
                    raise DamagedRowError(f"the {what} is empty")
        except DamagedRowError as error:
            raise EvaluationError(f"{self.rows.place(index)}: {error}", hint=self.hint) from error
        return example


@dataclass(frozen=True, eq=False)
class FileTask:
    """A task whose samples are the examples of a data file."""

    name: str
    metric: Metric
    unit: LengthUnit
    answer_tokens: int
    examples: FileExamples = field(repr=False)
    own_lengths: array[int] = field(repr=False)
    """The length of every example, in the unit."""
    source: str
    """Its source, for messages."""
    _places_of: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that together include every example once: the file's own if there are few, otherwise powers of
        two.
        """
        own = sorted(set(self.own_lengths))
        if len(own) <= _MAX_EXACT_LENGTHS and all(longer >= 2 * shorter for shorter, longer in pairwise(own)):
            return tuple(own)
        return tuple(sorted({1 << (length - 1).bit_length() for length in own}))

    def count(self, length: int) -> int:
        """Return how many samples there are of a length."""
        return len(self._places(length))

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th example of a length, in the file's order.

        Raises:
            EvaluationError: there are fewer, or the file has changed and is damaged now.
        """
        places = self._places(length)
        if not 0 <= index < len(places):
            available = ", ".join(f"{length} ({self.count(length)})" for length in self.lengths)
            raise EvaluationError(
                f"{self.source} has {len(places)} {self.name} questions of more than {length // 2} and at most "
                f"{length} {self.unit.value}; there is none with index {index}",
                hint=f"Ask for fewer (--n), or for lengths that it has, with how many of each: {available}.",
            )
        row = places[index]
        example = self.examples[row]
        pieces = partial(_pieces, self.examples, row)
        return Sample(
            self, length, index, example.question, example.gold, pieces, example.needles, self.own_lengths[row]
        )

    def question(self, length: int, index: int) -> str:
        """Return the question of a sample. Raises EvaluationError like `sample`."""
        return self.sample(length, index).question

    def _places(self, length: int) -> list[int]:
        if length not in self._places_of:
            places = [place for place, own in enumerate(self.own_lengths) if length < 2 * own <= 2 * length]
            self._places_of[length] = places
        return self._places_of[length]


def estimate_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a text within a few percent: of long ones, five pieces are counted."""
    if len(text) <= _MEASURED_PIECES * _MEASURED_CHARACTERS:
        return max(1, tokenizer.count(text))
    step = (len(text) - _MEASURED_CHARACTERS) / (_MEASURED_PIECES - 1)
    pieces = [text[round(at * step) :][:_MEASURED_CHARACTERS] for at in range(_MEASURED_PIECES)]
    return max(1, round(sum(map(tokenizer.count, pieces)) * len(text) / sum(map(len, pieces))))


def example_lengths(examples: RowExamples, tokenizer: Tokenizer, note: Callable[[FileExample], None]) -> array[int]:
    """Return the own length of each example: the stated one, or the approximate tokens of document and question.

    Args:
        examples: of a file; one at a time is in memory.
        tokenizer: what measures them.
        note: is called with each example.

    Raises:
        EvaluationError: a row is damaged; the file and line are named.
    """
    lengths = array("Q")
    for index in range(len(examples)):
        example = examples[index]
        note(example)
        estimate = estimate_tokens(example.document, tokenizer) if example.length is None else 0
        lengths.append(example.length or estimate + tokenizer.count(example.question))
    return lengths


def text_of(row: TableRow, name: str, *, empty: bool = False) -> str:
    """Return a field that must be text."""
    value = row.get(name)
    if not isinstance(value, str):
        raise DamagedRowError(f'"{name}" is {_describe(row, name)}, not text')
    if not (value.strip() or empty):
        raise DamagedRowError(f'"{name}" is empty')
    return value


def texts_of(row: TableRow, name: str) -> tuple[str, ...]:
    """Return a field that must be a list of texts, or one text; repeated ones count once."""
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DamagedRowError(f'"{name}" is {_describe(row, name)}, not a list of texts')
    if isinstance(value, str) and value.startswith("['") and value.endswith("']"):
        raise DamagedRowError(f'"{name}" is a list as Python writes it: write ["one", "another"]')
    filled = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not filled:
        raise DamagedRowError(f'"{name}" has no text')
    return filled


def number_of(row: TableRow, name: str) -> int:
    """Return a field that must be a positive whole number."""
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DamagedRowError(f'"{name}" is {_describe(row, name)}, not a positive whole number')
    return value


def _describe(row: TableRow, name: str) -> str:
    if name not in row:
        return f"missing (there are: {', '.join(map(str, row)) or 'none'})"
    value: Any = row[name]
    if isinstance(value, list):
        return f"a list with {', '.join(sorted({type(each).__name__ for each in value} - {'str'}))}"
    if value is None:
        return "nothing"
    return repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__


def _pieces(examples: FileExamples, index: int) -> Iterator[str]:
    document = examples[index].document
    for at in range(0, len(document), _PIECE_CHARACTERS):
        yield document[at : at + _PIECE_CHARACTERS]
