"""Writes a report as Markdown; text of documents and policies is escaped."""

from __future__ import annotations

from collections.abc import Iterator

from memagent_report.bibliography import quote_location, reference_text
from memagent_report.export_safety import markdown_text
from memagent_report.report_data import ReportData, ReportSection
from memagent_report.report_words import (
    NOT_QUOTED,
    WHAT_QUOTED_MEANS,
    cell_text,
    contradiction_text,
    sentence_text,
    summary,
)
from memagent_report.sentence_problems import shown


def markdown(report: ReportData) -> str:
    """Return the whole report: sections, contradictions, matrix, quotes, documents, and events."""
    parts = [
        [f"# {markdown_text(report.question)}", "", summary(report)],
        *(list(_section(report, section)) for section in report.sections),
        list(_contradictions(report)),
        list(_matrix(report)),
        list(_references(report)),
        list(_documents(report)),
        list(_notes(report)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _section(report: ReportData, section: ReportSection) -> Iterator[str]:
    yield f"## {markdown_text(section.heading)}"
    yield ""
    for sentence in section.sentences:
        numbers = "".join(f"[{number}]" for number in report.numbers(sentence))
        mark = "" if sentence.is_quoted else f" **[{NOT_QUOTED}: {markdown_text(shown(sentence.problems))}]**"
        yield f"- {markdown_text(sentence_text(report, sentence))} {numbers}{mark}".rstrip()
    if not section.sentences:
        yield "(empty: no document gives an answer)"


def _contradictions(report: ReportData) -> Iterator[str]:
    if report.contradictions:
        yield "## Answers that contradict each other"
        yield ""
    for each in report.contradictions:
        title, lines = contradiction_text(report, each)
        yield f"- {markdown_text(title)}"
        yield from (f"  - {markdown_text(line)}" for line in lines)


def _matrix(report: ReportData) -> Iterator[str]:
    matrix = report.matrix
    yield "## Evidence matrix"
    yield ""
    yield "| Document | " + " | ".join(map(markdown_text, matrix.questions)) + " |"
    yield "|" + "---|" * (len(matrix.questions) + 1)
    for number, document in enumerate(matrix.documents):
        cells = (matrix.cell(number, question) for question in range(len(matrix.questions)))
        yield (
            f"| {markdown_text(document.name)} | " + " | ".join(markdown_text(cell_text(each)) for each in cells) + " |"
        )


def _references(report: ReportData) -> Iterator[str]:
    if not report.references:
        return
    yield "## Quotes"
    yield ""
    for each in report.references:
        name = markdown_text(report.matrix.documents[each.document].name)
        yield f"- [{each.number}] {name}, {markdown_text(quote_location(each))}: “{markdown_text(each.quote.text)}”"


def _documents(report: ReportData) -> Iterator[str]:
    yield "## Documents"
    yield ""
    yield from (
        f"{number}. {markdown_text(reference_text(each))}" for number, each in enumerate(report.matrix.documents, 1)
    )


def _notes(report: ReportData) -> Iterator[str]:
    yield "## How this report was made"
    yield ""
    yield f"- Policy: {markdown_text(report.model)}; id: {markdown_text(report.report_id)}"
    yield f"- {WHAT_QUOTED_MEANS}"
    yield from (f"- {each.kind.value}: {markdown_text(each.detail)}" for each in report.events)
