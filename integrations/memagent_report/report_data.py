"""`Report`: sections of checked sentences, the matrix behind them, and the numbering of the quotes that they cite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec

from memagent_graph.events import EventKind
from memagent_graph.plain_text import format_count
from memagent_report.evidence_matrix import (
    CellState,
    DifferingAnswers,
    EvidenceMatrix,
    MatrixCell,
    QuotePosition,
    ReportMode,
    ReportSection,
    ReportSentence,
    SourceQuote,
)
from memagent_report.rendering import ContentSection, Passage, render_html, render_markdown

NOT_QUOTED: Final = "not quoted"
"""The warning at a sentence that its quotes do not support."""
QUOTED_EXPLANATION: Final = (
    "A sentence is quoted if its numbers, dates, names and quotations appear in its quotes, as do at least half "
    "of its words, and if the quotes appear in their documents, character by character. This does not make it true. "
    f'Sentences marked "{NOT_QUOTED}" failed this check.'
)


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """An event that readers of the report should know about."""

    kind: EventKind
    detail: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A quote that the report uses, with the number that its sentences cite."""

    number: int
    document: int
    quote: SourceQuote


@dataclass(frozen=True)
class Report:
    """A report over documents: matrix, sections, contradictions and events."""

    report_id: str
    mode: ReportMode
    model: str
    """The policy's name."""
    matrix: EvidenceMatrix
    sections: tuple[ReportSection, ...]
    contradictions: tuple[DifferingAnswers, ...] = ()
    """The contradictions that the policy found; empty unless it was asked to judge."""
    events: tuple[ReportEvent, ...] = ()
    quotes_checked: int = 0
    """The number of quotes in all cells; each was looked up in its document."""
    quotes_found: int = 0
    """The number of these quotes that are in their document."""

    @property
    def sentences(self) -> Iterator[ReportSentence]:
        """The sentences of all sections."""
        return (sentence for section in self.sections for sentence in section.sentences)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The quotes that the sentences cite, numbered from 1 in the order of their first use."""
        return tuple(self._references.values())

    @cached_property
    def _references(self) -> dict[tuple[int, int, int], Reference]:
        references: dict[tuple[int, int, int], Reference] = {}
        for position in (position for sentence in self.sentences for position in sentence.quotes):
            reference = Reference(len(references) + 1, position.document, self.matrix.quote(position))
            references.setdefault(self._make_passage_key(position), reference)
        return references

    def _make_passage_key(self, position: QuotePosition) -> tuple[int, int, int]:
        """Return a key that is the same for one passage in several cells."""
        quote = self.matrix.quote(position)
        return position.document, quote.start_char, quote.end_char

    def numbers(self, sentence: ReportSentence) -> list[int]:
        """Return the numbers of a sentence's references, in ascending order."""
        return sorted({self._references[self._make_passage_key(position)].number for position in sentence.quotes})

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Counts of documents, questions, cells by state, sentences, quotes and tokens."""
        cells = self.matrix.cells
        sentences = list(self.sentences)
        return {
            "documents": len(self.matrix.documents),
            "questions": len(self.matrix.questions),
            **{state.value: sum(cell.state is state for cell in cells) for state in CellState},
            "sentences": len(sentences),
            "quoted": sum(sentence.is_quoted for sentence in sentences),
            "contradictions": len(self.contradictions),
            "quotes_checked": self.quotes_checked,
            "quotes_found": self.quotes_found,
            "prompt_tokens": sum(cell.prompt_tokens for cell in cells),
            "completion_tokens": sum(cell.completion_tokens for cell in cells),
        }

    @property
    def summary(self) -> str:
        """A summary of the report, in a few sentences."""
        totals = self.totals
        counts = (
            f"{format_count(totals['documents'], 'document')} read with "
            f"{format_count(totals['questions'], 'question')}: "
            f"{totals['answered']} of {len(self.matrix.cells)} cells have an answer. "
            f"{totals['quoted']} of {format_count(totals['sentences'], 'sentence')} quoted; "
            f"{totals['quotes_found']} of {format_count(totals['quotes_checked'], 'quote')} found in the documents."
        )
        if self.mode is ReportMode.WRITTEN:
            return counts
        return f"{counts} The sentences are the answers of the cells."

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values; `Report.from_dict` is the inverse."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {**values, "references": msgspec.to_builtins(self.references), "totals": dict(self.totals)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Return the report whose values `to_dict` returned.

        Raises:
            msgspec.ValidationError: the values do not describe a report.
        """
        return msgspec.convert(values, cls)

    def to_markdown(self) -> str:
        """Return the report in Markdown; text of documents and policies cannot become a link, an image, HTML or TeX."""
        return render_markdown(self.matrix.question, self.summary, self._iter_sections())

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing from elsewhere."""
        return render_html(self.matrix.question, self.report_id, self.summary, self._iter_sections())

    def _iter_sections(self) -> Iterator[ContentSection]:
        """Yield the content of the report in reading order, for every format."""
        yield from map(self._make_section, self.sections)
        if self.contradictions:
            pairs = tuple(map(self._make_contradiction_passage, self.contradictions))
            yield ContentSection("Answers that contradict each other, as judged by the policy", pairs)
        yield ContentSection("Evidence matrix", table=tuple(self._iter_table()))
        if self.references:
            yield ContentSection("Quotes", tuple(map(self._make_quote_passage, self.references)))
        yield ContentSection("How this report was made", tuple(self._iter_notes()))

    def _make_section(self, section: ReportSection) -> ContentSection:
        passages = tuple(
            Passage(
                sentence.text,
                source="" if sentence.document is None else self.matrix.documents[sentence.document].name,
                citations=tuple(self.numbers(sentence)),
                warning=f"{NOT_QUOTED}: {'; '.join(problem.detail for problem in sentence.problems)}"
                if sentence.problems
                else "",
            )
            for sentence in section.sentences
        )
        return ContentSection(
            section.heading, passages, note="" if passages else "(empty: no document gives an answer)"
        )

    def _make_contradiction_passage(self, contradiction: DifferingAnswers) -> Passage:
        statements = []
        for group in contradiction.groups:
            names = ", ".join(self.matrix.documents[document].name for document in group)
            statements.append(f"{names}: {self.matrix.cell(group[0], contradiction.question).answer}")
        return Passage(self.matrix.questions[contradiction.question], details=tuple(statements))

    def _iter_table(self) -> Iterator[tuple[str, ...]]:
        yield "Document", *self.matrix.questions
        for document_number, document in enumerate(self.matrix.documents):
            cells = (self.matrix.cell(document_number, question) for question in range(len(self.matrix.questions)))
            yield document.name, *map(_format_cell, cells)

    def _make_quote_passage(self, reference: Reference) -> Passage:
        name = self.matrix.documents[reference.document].name
        quote = reference.quote
        page = f"{quote.page}, " if quote.page else ""
        text = f"{name}, {page}characters {quote.start_char:,}-{quote.end_char:,}"
        return Passage(text, number=reference.number, quote=quote.text)

    def _iter_notes(self) -> Iterator[Passage]:
        totals = self.totals
        yield Passage(f"Policy: {self.model}; id: {self.report_id}")
        yield Passage(f"Tokens: {totals['prompt_tokens']:,} in, {totals['completion_tokens']:,} out")
        yield Passage(QUOTED_EXPLANATION)
        for event in self.events:
            yield Passage(f"{event.kind.value}: {event.detail}")


def _format_cell(cell: MatrixCell) -> str:
    """Return a cell's answer, or why there is none."""
    if cell.state is CellState.ANSWERED:
        return cell.answer or ""
    if cell.state is CellState.FAILED:
        return f"(failed: {cell.error})"
    return "(empty)" if cell.state is CellState.EMPTY else f"(stopped: {cell.stop_reason})"
