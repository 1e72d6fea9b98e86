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
from typing import Any, Final, Protocol, TypeVar

from memagent_evaluation.data_files.row_files import Row, Rows
from memagent_evaluation.samples import LengthUnit, Metric, Needle, Sample
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import Tokenizer

_PIECE_CHARACTERS: Final = 1 << 16
_MEASURED_PIECES: Final = 5
_MEASURED_CHARACTERS: Final = 1200
_MOST_EXACT_LENGTHS: Final = 16
_T = TypeVar("_T")


class DamagedRowError(ValueError):
    """A row with a missing or wrong field; the caller, who knows the row's place, makes a message from it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A question on a document, from a file."""

    question: str
    gold: tuple[str, ...]
    document: str
    needles: tuple[Needle, ...] = ()


class Examples(Protocol):
    """Examples in a fixed order; each is made on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, slots=True)
class RowExamples:
    """Examples that are rows of a file."""

    rows: Rows
    read: Callable[[Row], Example]
    """Makes the example of a row, or raises DamagedRowError."""
    hint: str
    """A description of the format's rows."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Example:
        return self._made(index, self.rows[index], lambda row, example: example)

    def measured(self, measure: Callable[[Row, Example], _T]) -> Iterator[_T]:
        """The result of `measure` for each row and its example; its DamagedRowError is reported like any other.

        Raises:
            EvaluationError: a row is damaged; the file and line are named.
        """
        for index in range(len(self)):
            yield self._made(index, self.rows[index], measure)

    def _made(self, index: int, row: Row, make: Callable[[Row, Example], _T]) -> _T:
        try:
            example = self.read(row)
            for what, text in (("question", example.question), ("document", example.document)):
                if not text.strip():
                    raise DamagedRowError(f"the {what} is empty")
            return make(row, example)
        except DamagedRowError as error:
            raise EvaluationError(f"{self.rows.place(index)}: {error}", hint=self.hint) from error


@dataclass(frozen=True, eq=False)
class FileTask:
    """A task whose samples are the examples of a data file."""

    name: str
    metric: Metric
    unit: LengthUnit
    answer_tokens: int
    examples: Examples = field(repr=False)
    own_lengths: array[int] = field(repr=False)
    """The length of every example, in the unit."""
    source: str
    """Its source, for messages."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that together include every example once: the file's own if there are few, otherwise powers of
        two.
        """
        own = sorted(set(self.own_lengths))
        if len(own) <= _MOST_EXACT_LENGTHS and all(longer >= 2 * shorter for shorter, longer in pairwise(own)):
            return tuple(own)
        return tuple(sorted({1 << (each - 1).bit_length() for each in own}))

    def count(self, length: int) -> int:
        """How many samples there are of a length."""
        return len(self._of(length))

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th example of a length, in the file's order.

        Raises:
            EvaluationError: there are fewer, or the file has changed and is damaged now.
        """
        found = self._of(length)
        if not 0 <= index < len(found):
            held = ", ".join(f"{each} ({self.count(each)})" for each in self.lengths)
            raise EvaluationError(
                f"{self.source} has {len(found)} {self.name} questions of more than {length // 2} and at most {length} "
                f"{self.unit.value}; there is none with index {index}",
                hint=f"Ask for fewer (--n), or for lengths that it has, with how many of each: {held}.",
            )
        row = found[index]
        example = self.examples[row]
        pieces = partial(_pieces, self.examples, row)
        return Sample(self, length, index, example.question, example.gold, pieces, example.needles)

    def question(self, length: int, index: int) -> str:
        """The question of a sample. Raises EvaluationError like `sample`."""
        return self.sample(length, index).question

    def _of(self, length: int) -> list[int]:
        return [at for at, own in enumerate(self.own_lengths) if length < 2 * own <= 2 * length]


def estimated_tokens(text: str, tokenizer: Tokenizer) -> int:
    """The approximate number of tokens of a text, within a few percent: for long ones, five pieces are counted."""
    if len(text) <= _MEASURED_PIECES * _MEASURED_CHARACTERS:
        return max(1, tokenizer.count(text))
    step = (len(text) - _MEASURED_CHARACTERS) / (_MEASURED_PIECES - 1)
    pieces = [text[round(at * step) :][:_MEASURED_CHARACTERS] for at in range(_MEASURED_PIECES)]
    return max(1, round(sum(map(tokenizer.count, pieces)) * len(text) / sum(map(len, pieces))))


def estimated_lengths(examples: RowExamples, tokenizer: Tokenizer) -> array[int]:
    """The approximate number of tokens of document and question of each example.

    Raises:
        EvaluationError: a row is damaged; the file and line are named.
    """

    def tokens(_: Row, example: Example) -> int:
        return estimated_tokens(example.document, tokenizer) + tokenizer.count(example.question)

    return array("Q", examples.measured(tokens))


def text_of(row: Row, name: str, *, empty: bool = False) -> str:
    """A field that must be text."""
    value = row.get(name)
    if not isinstance(value, str):
        raise DamagedRowError(f'"{name}" is {_described(row, name)}, not text')
    if not (value.strip() or empty):
        raise DamagedRowError(f'"{name}" is empty')
    return value


def texts_of(row: Row, name: str) -> tuple[str, ...]:
    """A field that must be a list of texts, or one text; repeated ones count once."""
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise DamagedRowError(f'"{name}" is {_described(row, name)}, not a list of texts')
    filled = tuple(dict.fromkeys(each for each in texts if each.strip()))
    if not filled:
        raise DamagedRowError(f'"{name}" has no text')
    return filled


def number_of(row: Row, name: str) -> int:
    """A field that must be a positive whole number."""
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DamagedRowError(f'"{name}" is {_described(row, name)}, not a positive whole number')
    return value


def _described(row: Row, name: str) -> str:
    if name not in row:
        return f"missing (there are: {', '.join(map(str, row)) or 'none'})"
    value: Any = row[name]
    return f"{str(value)[:40]!r}" if isinstance(value, str | int | float) else type(value).__name__


def _pieces(examples: Examples, index: int) -> Iterator[str]:
    document = examples[index].document
    for at in range(0, len(document), _PIECE_CHARACTERS):
        yield document[at : at + _PIECE_CHARACTERS]
