"""Writes a report as a DOCX file with python-docx (the extra `report`), as plain text: no fields, links or images."""

from __future__ import annotations

import io
from typing import Any

from memagent_graph.errors import MissingExtraError
from memagent_report.bibliography import quote_location, reference_text
from memagent_report.export_safety import writable
from memagent_report.report_data import ReportData
from memagent_report.report_words import (
    NOT_QUOTED,
    WHAT_QUOTED_MEANS,
    cell_text,
    contradiction_text,
    sentence_text,
    summary,
)
from memagent_report.sentence_problems import shown


def docx_bytes(report: ReportData) -> bytes:
    """Return the content of the DOCX file.

    Raises:
        MissingExtraError: python-docx is not installed.
    """
    try:
        from docx import Document  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("report", "a report as DOCX") from error
    written: Any = Document()
    properties = written.core_properties
    properties.author, properties.title, properties.comments = "", _line(report.question)[:250], ""
    written.add_heading(_line(report.question), 0)
    written.add_paragraph(summary(report))
    _add_sections(written, report)
    _add_contradictions(written, report)
    _add_matrix(written, report)
    if report.references:
        written.add_heading("Quotes", 1)
    for each in report.references:
        name = report.matrix.documents[each.document].name
        paragraph = written.add_paragraph(f"[{each.number}] {_line(name)}, {_line(quote_location(each))}: ")
        paragraph.add_run(f"“{_line(each.quote.text)}”").italic = True
    written.add_heading("Documents", 1)
    for number, document in enumerate(report.matrix.documents, 1):
        written.add_paragraph(f"{number}. {_line(reference_text(document))}")
    written.add_heading("How this report was made", 1)
    written.add_paragraph(f"Policy: {_line(report.model)}; id: {_line(report.report_id)}")
    written.add_paragraph(WHAT_QUOTED_MEANS)
    for event in report.events:
        written.add_paragraph(f"{event.kind.value}: {_line(event.detail)}")
    file = io.BytesIO()
    written.save(file)
    return file.getvalue()


def _line(text: str) -> str:
    return " ".join(writable(text).split())


def _add_sections(written: Any, report: ReportData) -> None:
    for section in report.sections:
        written.add_heading(_line(section.heading), 1)
        for sentence in section.sentences:
            numbers = "".join(f"[{number}]" for number in report.numbers(sentence))
            paragraph = written.add_paragraph(f"{_line(sentence_text(report, sentence))} {numbers}".rstrip())
            if not sentence.is_quoted:
                paragraph.add_run(f" [{NOT_QUOTED}: {_line(shown(sentence.problems))}]").bold = True
        if not section.sentences:
            written.add_paragraph("(empty: no document gives an answer)")


def _add_contradictions(written: Any, report: ReportData) -> None:
    if report.contradictions:
        written.add_heading("Answers that contradict each other", 1)
    for each in report.contradictions:
        title, lines = contradiction_text(report, each)
        written.add_paragraph(_line(title))
        for line in lines:
            written.add_paragraph(_line(line), style="List Bullet")


def _add_matrix(written: Any, report: ReportData) -> None:
    matrix = report.matrix
    written.add_heading("Evidence matrix", 1)
    table = written.add_table(rows=1, cols=len(matrix.questions) + 1)
    table.style = "Table Grid"
    for cell, text in zip(table.rows[0].cells, ("Document", *matrix.questions), strict=True):
        cell.text = _line(text)
    for number, document in enumerate(matrix.documents):
        cells = table.add_row().cells
        cells[0].text = _line(document.name)
        for question in range(len(matrix.questions)):
            cells[question + 1].text = _line(cell_text(matrix.cell(number, question)))
