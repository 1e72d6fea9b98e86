"""A task whose samples are the examples of a data file.

Documents in files have fixed lengths. An example belongs to `length` if its own length is at most `length` and more
than half of it; so lengths that double, as in RULER, include every example once. Each format defines what its lengths
count. Examples keep the file's order: index 0 is the first one of a length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Final

from memagent_evaluation.data_files.table_rows import TableRow, TableRows
from memagent_evaluation.samples import LengthUnit, Metric, Needle, Sample
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import Tokenizer

_PIECE_CHARACTERS: Final = 1 << 16
_SAMPLED_PIECES: Final = 5
_SAMPLED_PIECE_CHARACTERS: Final = 1200
_MAX_EXACT_LENGTHS: Final = 16


class DamagedRowError(ValueError):
    """A row with a missing or wrong field. The caller adds file and line to the message."""


@dataclass(frozen=True, slots=True)
class FileExample:
    """A question about a document, from a file."""

    question: str
    gold: tuple[str, ...]
    document: str
    needles: tuple[Needle, ...] = ()
    length: int | None = None
    """Its length in the task's unit, if the file states it."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows."""

    read_row: Callable[[TableRow], FileExample]
    """Makes the example of a row, or raises DamagedRowError."""
    hint: str
    """How to write its rows, for messages."""
    unit: LengthUnit = LengthUnit.TOKENS


def read_row_example(rows: TableRows, row_format: RowFormat, index: int) -> FileExample:
    """Return the example of a row.

    Raises:
        EvaluationError: the row is damaged; the message names the file and line.
    """
    row = rows[index]
    try:
        return row_format.read_row(row)
    except DamagedRowError as error:
        raise EvaluationError(f"{rows.get_location(index)}: {error}", hint=row_format.hint) from error


@dataclass(frozen=True, eq=False)
class FileTask:
    """A task whose samples are the examples of a data file."""

    metric: ClassVar[Metric] = Metric.ANY
    answer_tokens: ClassVar[int] = 128
    """The longest answer that RULER-HQA allows."""

    name: str
    unit: LengthUnit
    read_example: Callable[[int], FileExample] = field(repr=False)
    """Makes an example by its index; the file's order is fixed."""
    example_lengths: array[int] = field(repr=False)
    """The length of each example, in `unit`."""
    source: str
    """The files, for messages."""
    _indices: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that together include every example once: those in the file if they are few, else powers of two."""
        distinct_lengths = sorted(set(self.example_lengths))
        if len(distinct_lengths) <= _MAX_EXACT_LENGTHS and all(
            longer >= 2 * shorter for shorter, longer in pairwise(distinct_lengths)
        ):
            return tuple(distinct_lengths)
        return tuple(sorted({1 << (length - 1).bit_length() for length in distinct_lengths}))

    def count(self, length: int) -> int:
        """Return how many samples there are of a length."""
        return len(self._find_example_indices(length))

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th example of a length, in the file's order.

        Raises:
            EvaluationError: there are fewer, or the file has changed and is damaged now.
        """
        example_indices = self._find_example_indices(length)
        if not 0 <= index < len(example_indices):
            available = ", ".join(f"{length} ({self.count(length)})" for length in self.lengths)
            raise EvaluationError(
                f"{self.source} has {len(example_indices)} {self.name} questions of more than {length // 2} and at "
                f"most {length} {self.unit.value}; there is none with index {index}",
                hint=f"Ask for fewer (--n), or for other lengths; it has (with the number of questions): {available}.",
            )
        example_index = example_indices[index]
        example = self.read_example(example_index)
        pieces = partial(_iter_pieces, self.read_example, example_index)
        return Sample(
            self,
            length,
            index,
            example.question,
            example.gold,
            pieces,
            example.needles,
            self.example_lengths[example_index],
        )

    def get_question(self, length: int, index: int) -> str:
        """Return the question of a sample. Raises EvaluationError like `sample`."""
        return self.sample(length, index).question

    def _find_example_indices(self, length: int) -> list[int]:
        if length not in self._indices:
            self._indices[length] = [
                index
                for index, example_length in enumerate(self.example_lengths)
                if length < 2 * example_length <= 2 * length
            ]
        return self._indices[length]


def estimate_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a text, within a few percent, from five pieces if the text is long."""
    if len(text) <= _SAMPLED_PIECES * _SAMPLED_PIECE_CHARACTERS:
        return max(1, tokenizer.count(text))
    step = (len(text) - _SAMPLED_PIECE_CHARACTERS) / (_SAMPLED_PIECES - 1)
    pieces = [text[round(index * step) :][:_SAMPLED_PIECE_CHARACTERS] for index in range(_SAMPLED_PIECES)]
    return max(1, round(sum(map(tokenizer.count, pieces)) * len(text) / sum(map(len, pieces))))


def measure_example(example: FileExample, tokenizer: Tokenizer) -> int:
    """Return the length of an example: the one in the file, or the approximate tokens of document and question."""
    if example.length is not None:
        return example.length
    return estimate_tokens(example.document, tokenizer) + tokenizer.count(example.question)


def require_text(row: TableRow, name: str) -> str:
    """Return a field that must be text."""
    value = row.get(name)
    if not isinstance(value, str):
        raise DamagedRowError(f'"{name}" is {_describe(row, name)}, not text')
    if not value.strip():
        raise DamagedRowError(f'"{name}" is empty')
    return value


def require_texts(row: TableRow, name: str) -> tuple[str, ...]:
    """Return the distinct texts of a field that must be a list of texts, or one text."""
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DamagedRowError(f'"{name}" is {_describe(row, name)}, not a list of texts')
    if isinstance(value, str) and value.startswith("['") and value.endswith("']"):
        raise DamagedRowError(f'"{name}" is a list as Python writes it: write ["one", "another"]')
    nonempty_texts = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not nonempty_texts:
        raise DamagedRowError(f'"{name}" has no text')
    return nonempty_texts


def require_positive(row: TableRow, name: str) -> int:
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
        return f"a list with {', '.join(sorted({type(item).__name__ for item in value} - {'str'}))}"
    if value is None:
        return "nothing"
    return repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__


def _iter_pieces(read_example: Callable[[int], FileExample], index: int) -> Iterator[str]:
    document = read_example(index).document
    for start in range(0, len(document), _PIECE_CHARACTERS):
        yield document[start : start + _PIECE_CHARACTERS]
