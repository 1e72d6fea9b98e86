"""The evidence matrix of a report, documents x questions, and the draft that is written from it; all values are JSON.

A cell of the matrix is an answer with quotes. A draft has sections of sentences, each with the quotes that it cites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from memagent_graph.documents import DocumentRef
from memagent_graph.events import StopReason
from memagent_graph.grouping import group_values
from memagent_graph.provenance.evidence import split_memory
from memagent_report.sentence_checks import SentenceProblem


class CellState(StrEnum):
    """The outcome of reading one document for one question."""

    ANSWERED = "answered"
    EMPTY = "empty"
    """The document was read to its end, and it has no answer."""
    STOPPED = "stopped"
    """A limit stopped the read before the document's end."""
    FAILED = "failed"
    """The document could not be read; see `MatrixCell.error`."""


@dataclass(frozen=True, slots=True)
class SourceQuote:
    """A passage of a document, word for word."""

    text: str
    start_char: int
    """The quote's first character in the document, counted from 0."""
    end_char: int
    """The character after the quote's last character."""
    page: str | None
    """The page or source in which the quote begins; None if the document has neither."""
    is_whole: bool = True
    """Whether the quote consists of complete sentences, list items or table rows. Very long ones are quoted in part."""


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """The answer of one document to one question."""

    document: int
    """The row, counted from 0."""
    question: int
    """The column, counted from 0."""
    state: CellState
    answer: str | None = None
    quotes: tuple[SourceQuote, ...] = ()
    """The passages that support the answer, best first; empty if none was found."""
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
    """The document's text in the store; None if it could not be read."""
    error: str | None = None
    """Why the document could not be read; None if it was read."""


@dataclass(frozen=True, slots=True)
class EvidenceMatrix:
    """One cell for each pair of document and question."""

    question: str
    """The report's question."""
    questions: tuple[str, ...]
    """The questions that every document is read for."""
    documents: tuple[ReportDocument, ...]
    cells: tuple[MatrixCell, ...]
    """The cells, ordered by document, then by question."""

    def cell(self, document_index: int, question_index: int) -> MatrixCell:
        """Return the cell of a document and a question."""
        return self.cells[document_index * len(self.questions) + question_index]

    def column(self, question_index: int) -> Iterator[MatrixCell]:
        """Yield the cells of one question, in the order of the documents."""
        return (cell for cell in self.cells if cell.question == question_index)

    def quotes(self) -> Iterator[tuple[QuotePosition, SourceQuote]]:
        """Yield every quote with its position."""
        for cell in self.cells:
            for index, quote in enumerate(cell.quotes):
                yield QuotePosition(cell.document, cell.question, index), quote

    def quote(self, position: QuotePosition) -> SourceQuote:
        """Return the quote at a position."""
        return self.cell(position.document, position.question).quotes[position.index]


@dataclass(frozen=True, slots=True, order=True)
class QuotePosition:
    """Identifies a quote: its document, its question, and its position in the cell, all counted from 0."""

    document: int
    question: int
    index: int


class ReportMode(StrEnum):
    """The origin of the sentences."""

    WRITTEN = "written"
    """The policy writes an outline, then each section from its quotes."""
    EXTRACTIVE = "extractive"
    """No text is written: each question has a section, and its sentences are the answers of the cells."""


@dataclass(frozen=True, slots=True)
class ReportSentence:
    """A sentence, and the quotes that it cites."""

    text: str
    quotes: tuple[QuotePosition, ...]
    document: int | None = None
    """The document whose answer the sentence is, in an extractive report."""
    problems: tuple[SentenceProblem, ...] = ()
    """The problems that the check found; empty if the sentence is quoted, or not checked yet."""
    chosen_by_code: bool = False
    """Whether the code chose the quotes, because those that the policy cited do not support the sentence."""

    @property
    def is_quoted(self) -> bool:
        """Whether no problem is known. After the check: the quotes are in their documents and support the sentence."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading, the questions that belong to it, and its sentences."""

    heading: str
    questions: tuple[int, ...]
    sentences: tuple[ReportSentence, ...] = ()


@dataclass(frozen=True, slots=True)
class DifferingAnswers:
    """Two different answers to one question; in a draft, only those that the policy judged contradictory."""

    question: int
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    """The documents that give the first answer, and those that give the second, by number."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A report before its sentences are checked."""

    mode: ReportMode
    sections: tuple[ReportSection, ...]
    contradictions: tuple[DifferingAnswers, ...] = ()


def make_extractive_section(matrix: EvidenceMatrix, heading: str, questions: tuple[int, ...]) -> ReportSection:
    """Return a section with the sentences of the cells' answers. Each sentence cites the quotes of its cell."""
    sentences = [
        ReportSentence(
            sentence,
            tuple(QuotePosition(cell.document, question, index) for index in range(len(cell.quotes))),
            cell.document,
        )
        for question in questions
        for cell in matrix.column(question)
        if cell.state is CellState.ANSWERED and cell.answer
        for sentence in split_memory(cell.answer) or [cell.answer]
    ]
    return ReportSection(heading, questions, tuple(sentences))


def make_extractive_draft(matrix: EvidenceMatrix) -> Draft:
    """Return a draft with a section for each question."""
    sections = [
        make_extractive_section(matrix, question, (question_index,))
        for question_index, question in enumerate(matrix.questions)
    ]
    return Draft(ReportMode.EXTRACTIVE, tuple(sections))


def find_differing_answers(matrix: EvidenceMatrix) -> Iterator[DifferingAnswers]:
    """Yield each pair of different answers to one question; letter case and white space make no difference."""
    for question_index in range(len(matrix.questions)):
        answered_cells = (
            cell for cell in matrix.column(question_index) if cell.state is CellState.ANSWERED and cell.answer
        )
        documents_by_answer = group_values(
            (" ".join((cell.answer or "").casefold().split()), cell.document) for cell in answered_cells
        )
        for first_documents, second_documents in combinations(documents_by_answer.values(), 2):
            yield DifferingAnswers(question_index, (tuple(first_documents), tuple(second_documents)))
