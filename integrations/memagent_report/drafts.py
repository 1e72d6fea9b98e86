"""A report before its sentences are checked: sections of sentences, and the quotes that each sentence cites."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memagent_graph.provenance.evidence import memory_lines
from memagent_report.evidence_matrix import CellState, EvidenceMatrix, QuotePlace


class ReportMode(StrEnum):
    """Who wrote the sentences."""

    WRITTEN = "written"
    """The policy writes an outline, then each section from its quotes."""
    EXTRACTIVE = "extractive"
    """Nobody writes them: there is a section for each question, and its sentences are the answers of the cells."""


@dataclass(frozen=True, slots=True)
class DraftSentence:
    """A sentence, and the quotes that it cites."""

    text: str
    quotes: tuple[QuotePlace, ...]
    document: int | None = None
    """The document whose answer it is, in an extractive report."""


@dataclass(frozen=True, slots=True)
class DraftSection:
    """A heading, the questions that belong to it, and its sentences."""

    heading: str
    questions: tuple[int, ...]
    sentences: tuple[DraftSentence, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A report before its sentences are checked."""

    mode: ReportMode
    sections: tuple[DraftSection, ...]
    judgements: dict[int, bool]
    """By question number: whether the policy judges that the answers contradict each other."""


def extractive_section(matrix: EvidenceMatrix, heading: str, questions: tuple[int, ...]) -> DraftSection:
    """Return a section whose sentences are those of the cells' answers; each cites the quotes of its cell."""
    sentences = [
        DraftSentence(
            sentence,
            tuple(QuotePlace(cell.document, question, index) for index in range(len(cell.quotes))),
            cell.document,
        )
        for question in questions
        for cell in matrix.column(question)
        if cell.state is CellState.ANSWERED and cell.answer
        for sentence in memory_lines(cell.answer) or [cell.answer]
    ]
    return DraftSection(heading, questions, tuple(sentences))


def extractive_draft(matrix: EvidenceMatrix) -> Draft:
    """Return a draft with a section for each question."""
    sections = [extractive_section(matrix, asked, (number,)) for number, asked in enumerate(matrix.questions)]
    return Draft(ReportMode.EXTRACTIVE, tuple(sections), {})
