"""Writes a report as files in a folder: its documents, its data, and the evidence matrix as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import RunError
from memagent_graph.plain_text import remove_folders
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.private_files import create_private_folder, write_atomically
from memagent_report.rendering import escape_for_spreadsheet
from memagent_report.report_data import Report

# The matrix

_QUOTE_GAP: Final = "\n---\n"


def format_matrix_csv(report: Report) -> bytes:
    """Return CSV in UTF-8 with a byte order mark; every value is in quotation marks, and formulas are escaped."""
    buffer = io.StringIO(newline="")
    rows = list(_iter_rows(report))
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow([escape_for_spreadsheet("" if value is None else str(value)) for value in row.values()])
    return buffer.getvalue().encode("utf-8-sig", "replace")


def _iter_rows(report: Report) -> Iterator[dict[str, Any]]:
    matrix = report.matrix
    for cell in matrix.cells:
        yield {
            "document": matrix.documents[cell.document].name,
            "question": matrix.questions[cell.question],
            "state": cell.state.value,
            "answer": cell.answer,
            "error": cell.error,
            "quotes": _QUOTE_GAP.join(quote.text for quote in cell.quotes),
            "pages": _QUOTE_GAP.join(quote.page or "" for quote in cell.quotes),
            "start_chars": _QUOTE_GAP.join(str(quote.start_char) for quote in cell.quotes),
            "end_chars": _QUOTE_GAP.join(str(quote.end_char) for quote in cell.quotes),
            "run_id": cell.run_id,
            "stop_reason": cell.stop_reason,
            "chunks_read": cell.chunks_read,
            "prompt_tokens": cell.prompt_tokens,
            "completion_tokens": cell.completion_tokens,
            "seconds": cell.seconds,
        }


# The files

_REPORT_RECORD: Final = "report.json"
FORMATS: Final[Mapping[str, tuple[str, Callable[[Report], bytes]]]] = {
    "json": (_REPORT_RECORD, lambda report: (json.dumps(report.to_dict(), ensure_ascii=True) + "\n").encode()),
    "md": ("report.md", lambda report: report.to_markdown().encode("utf-8", "replace")),
    "html": ("report.html", lambda report: report.to_html().encode("utf-8", "replace")),
    "csv": ("matrix.csv", format_matrix_csv),
}
"""The file name and the function that returns the file's content, by format."""


def write_report(report: Report, folder: Path, formats: Iterable[str], *, force: bool = False) -> list[Path]:
    """Write the files of a report, readable only by their owner.

    `report.json` is always written.

    Args:
        report: the report.
        folder: the folder; it is created if it does not exist.
        formats: keys of `FORMATS`.
        force: also replace files that do not belong to this report.

    Returns:
        The files that were written.

    Raises:
        RunError: a file with one of these names does not belong to this report, or the folder cannot be written.
    """
    selected_formats = [FORMATS[name] for name in dict.fromkeys(("json", *formats))]
    contents = {file_name: format_report(report) for file_name, format_report in selected_formats}
    try:
        create_private_folder(folder)
        if not force:
            _require_own_files(report, folder, contents)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {remove_folders(str(folder))}: {error.strerror}",
            hint="Set --out to another folder.",
        ) from error
    return [folder / name for name in contents]


def _require_own_files(report: Report, folder: Path, names: Iterable[str]) -> None:
    existing_names = [name for name in names if os.path.lexists(folder / name)]
    if not existing_names:
        return
    try:
        is_own = read_json_file(folder / _REPORT_RECORD)["report_id"] == report.report_id
    except (OSError, ValueError, KeyError, TypeError):
        is_own = False
    if not is_own or any((folder / name).is_symlink() for name in existing_names):
        raise RunError(
            f"{existing_names[0]} already exists in {folder.name} and does not belong to this report",
            hint="Set --out to another folder, or replace the file with --force.",
        )
