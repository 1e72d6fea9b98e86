"""Workbooks (.xlsx): each sheet is a section with a table of its rows, without empty rows and columns."""

from __future__ import annotations

import datetime
import html
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from memagent_converters.html_to_markdown import MAX_REPEATED_LENGTH, format_rows, iter_markdown, list_omissions
from memagent_converters.slide_files import iter_shapes
from memagent_converters.xml_archives import XmlArchive, get_attribute, iter_descendants
from memagent_graph.converters import GAP, Block, Omission, Parts, SourceFile

_BOOK: Final = "xl/workbook.xml"
_MAX_EMPTY_ROWS: Final = 2_000_000
"""Consecutive empty rows after which a sheet is considered finished."""
_MERGED: Final = re.compile(rb'<(?:\w+:)?mergeCell\s[^>]*ref="([A-Z]+\d+:[A-Z]+\d+)"')
_PAGE_HEADING: Final = re.compile(rb"<(?:\w+:)?(?:odd|even|first)(?:Head|Foot)er>([^<]+)<")
_FORMAT_CODE: Final = re.compile(r'&(?:"[^"]*"|K[0-9A-F]{6}|\d+|.)')
"""Codes in a page's header or footer: positions, fonts, and fields such as page numbers."""
_LITERAL: Final = re.compile(r'"([^"]*)"|\[\$([^\]-]*)[^\]]*\]|\\(.)|\[[^\]]*\]|[_*].|[()]')
_DIGITS: Final = re.compile(r"[#0?][#0?.,]*(?:E[+-]0+)?")


def convert(source: SourceFile) -> Parts:
    """Convert a workbook. A formula becomes its saved value, or stays as it is if no value was saved."""
    import openpyxl  # noqa: PLC0415  the extra `files`

    archive = XmlArchive(source.name, source.file)
    values = openpyxl.load_workbook(source.file, read_only=True, data_only=True, keep_links=False)
    formulas = openpyxl.load_workbook(source.file, read_only=True, keep_links=False)
    relations = archive.read_relations(_BOOK)
    for entry in iter_descendants(archive.read_required_xml(_BOOK), "sheet"):
        name, (_, member) = get_attribute(entry, "name"), relations.get(get_attribute(entry, "id"), ("", ""))
        sheet, data = values[name], archive.read(member)
        if not hasattr(sheet, "reset_dimensions"):
            yield Omission("sheets that are charts", name, "Read the sheets with their numbers.")
            continue
        rows = dict(_iter_rows(sheet))
        unknown = 0
        for number, cells in _iter_rows(formulas[name]) if b"<f" in data else ():
            row = rows.setdefault(number, {})
            for column in cells.keys() - row.keys():
                row[column] = cells[column]
                unknown += 1
        width = max((max(row) for row in rows.values()), default=0)
        for span in _MERGED.findall(data):
            first, top, last, bottom = openpyxl.utils.range_boundaries(span.decode())
            _fill(rows, range(first, min(last, width) + 1), range(top, bottom + 1))
        used = sorted({column for row in rows.values() for column in row})
        texts = [[row.get(column, "") for column in used] for _, row in sorted(rows.items())]
        yield Block(f"## {name}\n\n" + format_rows(texts) + GAP, f"sheet {name}", (name,))
        for heading in dict.fromkeys(_PAGE_HEADING.findall(data)):
            pieces = _FORMAT_CODE.sub(
                lambda code: "&" if code[0] == "&&" else " ", html.unescape(heading.decode("utf-8", "replace"))
            ).split()
            yield Block(f"On each page: {' '.join(pieces)}{GAP}" if pieces else "")
        if unknown:
            yield Omission("formulas without a value", f"sheet {name}", "Open and save the workbook once.", unknown)
    yield from _iter_drawings_and_comments(source, archive)


def _iter_drawings_and_comments(source: SourceFile, archive: XmlArchive) -> Parts:
    """Yield the comments, text boxes, pictures and embedded files of the sheets."""
    omission_counts: Counter[str] = Counter()
    for member in sorted(archive.names):
        if member.startswith(("xl/comments", "xl/threadedComments")) and (root := archive.read_xml(member)) is not None:
            for comment in iter_descendants(root, "comment", "threadedComment"):
                if text := "".join(comment.itertext()).strip():
                    yield Block(f"Comment at {get_attribute(comment, 'ref')}: {text}\n")
            yield Block(GAP)
        elif member.startswith("xl/drawings/drawing") and (root := archive.read_xml(member)) is not None:
            yield from iter_markdown("".join(iter_shapes(root, omission_counts)), end=GAP)
            omission_counts["charts"] += sum(1 for _ in iter_descendants(root, "chart"))
        elif member.startswith("xl/embeddings/"):
            yield from source.embedded(member.rpartition("/")[2], archive.read(member))
    yield from list_omissions(omission_counts)


def _iter_rows(sheet: Any) -> Iterator[tuple[int, dict[int, str]]]:
    """Yield the number of each row that has a value, and the texts of its cells by column number."""
    sheet.reset_dimensions()
    empty = 0
    for row in sheet.iter_rows():
        cells = [cell for cell in row if cell.value is not None]
        if cells:
            empty = 0
            yield cells[0].row, {cell.column: _format_cell(cell.value, cell.number_format) for cell in cells}
        elif (empty := empty + 1) > _MAX_EMPTY_ROWS:
            return


def _fill(rows: dict[int, dict[int, str]], columns: range, numbers: range) -> None:
    """Copy the text of merged cells into each cell, in rows that have a value."""
    text = rows.get(numbers.start, {}).get(columns.start, "")
    if 0 < len(text) <= MAX_REPEATED_LENGTH:
        for number in rows if len(rows) < len(numbers) else numbers:
            if number in numbers and number in rows:
                rows[number].update(dict.fromkeys(columns, text))


def _format_cell(value: Any, form: str) -> str:
    """Return a value as text, with the unit in its number format."""
    if isinstance(value, datetime.datetime):
        return value.date().isoformat() if value.time() == datetime.time() else value.isoformat(" ")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    unit = _LITERAL.sub(lambda match: match[1] or match[2] or match[3] or "", form.partition(";")[0])
    match = _DIGITS.search(unit)
    if match is None or "/" in unit or match[0].endswith(","):  # general, a fraction, or shown in thousands
        return _format_number(value)
    text = _format_number(value * 100 if "%" in unit else value)
    digits = text.zfill(len(match[0])) if set(match[0]) == {"0"} else text
    return unit[: match.start()] + digits + unit[match.end() :]


def _format_number(value: float) -> str:
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.15g}"
