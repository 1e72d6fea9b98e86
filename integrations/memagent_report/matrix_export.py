"""Writes the evidence matrix as CSV or Parquet, with one row for each document and question."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from memagent_graph.run_log.exchange.parquet import pyarrow
from memagent_report.export_safety import spreadsheet_cell
from memagent_report.report_data import ReportData

_COLUMNS: Final = (
    "document", "question", "state", "answer", "error", "quotes", "pages", "start_chars", "end_chars", "run_id",
    "stop_reason", "chunks_read", "prompt_tokens", "completion_tokens", "seconds",
)  # fmt: skip
_QUOTE_GAP: Final = "\n---\n"


def matrix_csv(report: ReportData) -> bytes:
    """Return CSV in UTF-8 with a byte order mark; every value is in quotation marks, and formulas are escaped."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow(_COLUMNS)
    for row in _rows(report):
        writer.writerow([_csv_value(row[name]) for name in _COLUMNS])
    return file.getvalue().encode("utf-8-sig", "replace")


def _csv_value(value: Any) -> str:
    if isinstance(value, list):
        value = _QUOTE_GAP.join("" if each is None else str(each) for each in value)
    if value is None:
        return ""
    return str(value) if isinstance(value, int | float) else spreadsheet_cell(str(value))


def matrix_parquet(report: ReportData) -> bytes:
    """Return Parquet, with quotes and their positions as lists; text is not escaped.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    pa, pq = pyarrow("the matrix as Parquet"), import_module("pyarrow.parquet")
    text, number = pa.string(), pa.int64()
    kinds = dict.fromkeys(_COLUMNS, text) | {
        "quotes": pa.list_(text), "pages": pa.list_(text), "start_chars": pa.list_(number),
        "end_chars": pa.list_(number), "chunks_read": number, "prompt_tokens": number, "completion_tokens": number,
        "seconds": pa.float64(),
    }  # fmt: skip
    rows = [{name: _storable(value) for name, value in row.items()} for row in _rows(report)]
    table = pa.Table.from_pylist(rows, schema=pa.schema([(name, kinds[name]) for name in _COLUMNS]))
    file = pa.BufferOutputStream()
    pq.write_table(table, file)
    return bytes(file.getvalue().to_pybytes())


def _storable(value: Any) -> Any:
    if isinstance(value, list):
        return [_storable(each) for each in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _rows(report: ReportData) -> Iterator[dict[str, Any]]:
    matrix = report.matrix
    for cell in matrix.cells:
        yield {
            "document": matrix.documents[cell.document].name,
            "question": matrix.questions[cell.question],
            "state": cell.state.value,
            "answer": cell.answer,
            "error": cell.error,
            "quotes": [quote.text for quote in cell.quotes],
            "pages": [quote.page for quote in cell.quotes],
            "start_chars": [quote.start_char for quote in cell.quotes],
            "end_chars": [quote.end_char for quote in cell.quotes],
            "run_id": cell.run_id,
            "stop_reason": cell.stop_reason.value if cell.stop_reason else None,
            "chunks_read": cell.chunks_read,
            "prompt_tokens": cell.prompt_tokens,
            "completion_tokens": cell.completion_tokens,
            "seconds": cell.seconds,
        }
