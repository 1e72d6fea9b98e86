"""Workbooks (.xlsx): each sheet is a section with its rows as a table; empty rows and columns are left out."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from memagent_converters.html_to_markdown import rows_text
from memagent_converters.xml_archives import XmlArchive, descendants
from memagent_graph.converters import GAP, Block, Omission, Parts, SourceFile

_MOST_EMPTY: Final = 2_000_000
"""Empty rows in a row, after which a sheet counts as ended."""


def convert(source: SourceFile) -> Parts:
    """Convert a workbook. A formula is its value as it was saved, or itself if none was."""
    import openpyxl  # noqa: PLC0415  the extra `files`

    archive = XmlArchive(source.name, source.file)
    values = openpyxl.load_workbook(source.file, read_only=True, data_only=True, keep_links=False)
    formulas = openpyxl.load_workbook(source.file, read_only=True, keep_links=False)
    for number, name in enumerate(values.sheetnames):
        sheet = values[name]
        if not hasattr(sheet, "reset_dimensions"):
            yield Omission("sheets that are charts", name, "Read the sheets with their numbers.")
            continue
        unknown = 0
        rows = []
        has_formulas = b"<f" in archive.read(f"xl/worksheets/sheet{number + 1}.xml")
        for row, sources in zip_longest(_rows(sheet), _rows(formulas[name]) if has_formulas else ()):
            cells = []
            for value, written in zip_longest(row or (), sources or ()):
                unknown += value is None and isinstance(written, str)
                cells.append(_shown(written if value is None else value))
            rows.append(cells)
        used = sorted({column for row in rows for column, text in enumerate(row) if text})
        texts = [[row[column] if column < len(row) else "" for column in used] for row in rows]
        yield Block(f"## {name}\n\n" + _table(iter(texts)) + GAP, f"sheet {name}", (name,))
        if unknown:
            yield Omission("formulas without a value", f"sheet {name}", "Open and save the workbook once.", unknown)
    for member in sorted(archive.names):
        if member.startswith(("xl/comments", "xl/threadedComments")) and (root := archive.xml(member)) is not None:
            texts = [
                [text] for each in descendants(root, "comment", "threadedComment") if (text := "".join(each.itertext()))
            ]
            yield Block("".join(f"Comment: {text[0]}\n" for text in texts) + GAP)
        elif member.startswith("xl/embeddings/"):
            yield from source.embedded(member.rpartition("/")[2], archive.read(member))


def _table(rows: Iterator[list[str]]) -> str:
    several = list(rows)
    return rows_text(iter(several)) if len(several) > 1 else "\n".join(" | ".join(row) for row in several)


def _rows(sheet: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the rows that have a value."""
    sheet.reset_dimensions()
    empty = 0
    for row in sheet.iter_rows(values_only=True):
        if any(value is not None for value in row):
            empty = 0
            yield row
        elif (empty := empty + 1) > _MOST_EMPTY:
            return


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime.datetime):
        return value.date().isoformat() if value.time() == datetime.time() else value.isoformat(" ")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
