"""The evidence matrix of a report: documents x questions, each cell an answer with quotes. JSON values only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from memagent_graph.documents import DocumentRef
from memagent_graph.events import StopReason

T = TypeVar("T")

_NO_ANSWER: Final = re.compile(
    r"""(?:unknown|none|n/?a|nothing(?:\ (?:found|relevant|yet))?|no\ answer|unanswerable
    |no\ (?:relevant\ )?information(?:\ found|\ given|\ available)?
    |not\ (?:stated|mentioned|given|specified|available|found|known|applicable|provided|answered)
    |i\ (?:do\ not|don't)\ know|(?:it\ )?cannot\ be\ (?:determined|answered)
    |(?:the\ |this\ )?(?:document|text|memory|section)s?\ (?:does|do)\ not
     \ (?:say|state|mention|give|contain|hold|specify|answer|provide)[^.]*
    )[.!]?""",
    re.IGNORECASE | re.VERBOSE,
)


class CellState(StrEnum):
    """What came of reading one document with one question."""

    ANSWERED = "answered"
    EMPTY = "empty"
    """The document was read to its end and gives no answer."""
    STOPPED = "stopped"
    """A limit stopped the read before the document's end."""
    FAILED = "failed"
    """The document could not be read; `error` says why."""


@dataclass(frozen=True, slots=True)
class SourceQuote:
    """A passage of a document, unchanged."""

    text: str
    start_char: int
    """Its first character, in the document."""
    end_char: int
    page: str | None
    """The page or source in which it begins, if the document has them."""
    is_whole: bool = True
    """Whether it is whole sentences, list items or table rows; a very long one is quoted in part."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The answer of one document to one question."""

    document: int
    """The row, counted from 0."""
    question: int
    """The column, counted from 0."""
    state: CellState
    answer: str | None = None
    quotes: tuple[SourceQuote, ...] = ()
    """The passages that the answer was read from, best first; empty where none was found."""
    run_id: str | None = None
    """The run in the run log."""
    stop_reason: StopReason | None = None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    chunks_read: int = 0


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """One document of a report."""

    name: str
    reference: DocumentRef | None
    """Its text in the store; None if it could not be read."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What is known about it: title, author, year, journal, publisher, doi, url, ..."""
    error: str | None = None
    """Why it could not be read."""


@dataclass(frozen=True, slots=True)
class EvidenceMatrix:
    """Documents x questions. There is a cell for every pair."""

    question: str
    """The report's question."""
    questions: tuple[str, ...]
    """What each document was asked."""
    documents: tuple[ReportDocument, ...]
    cells: tuple[Cell, ...]
    """By document, then by question."""

    def cell(self, document: int, question: int) -> Cell:
        """One cell."""
        return self.cells[document * len(self.questions) + question]

    def column(self, question: int) -> Iterator[Cell]:
        """The cells of a question, by document."""
        return (cell for cell in self.cells if cell.question == question)

    def quotes(self) -> Iterator[tuple[QuotePlace, SourceQuote]]:
        """Every quote, with its place."""
        for cell in self.cells:
            for index, quote in enumerate(cell.quotes):
                yield QuotePlace(cell.document, cell.question, index), quote

    def quote(self, place: QuotePlace) -> SourceQuote:
        """The quote at a place."""
        return self.cell(place.document, place.question).quotes[place.index]


@dataclass(frozen=True, slots=True, order=True)
class QuotePlace:
    """Which quote is meant: the number of its document, its question, and its place in the cell, from 0."""

    document: int
    question: int
    index: int


def gives_no_answer(answer: str | None) -> bool:
    """Whether an answer is empty, or is one of the phrases that say that the document has none."""
    return not (answer or "").strip() or _NO_ANSWER.fullmatch(" ".join((answer or "").split())) is not None


def to_json(value: Any) -> Any:
    """JSON-ready values of what is in a matrix or report."""
    return msgspec.to_builtins(value, str_keys=True)


def from_json(values: Any, kind: type[T]) -> T:
    """The inverse of `to_json`.

    Raises:
        msgspec.ValidationError: the values are not of that kind.
    """
    return msgspec.convert(values, kind, str_keys=True)
