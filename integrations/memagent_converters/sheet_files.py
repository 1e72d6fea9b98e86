"""Converts workbooks (.xlsx): each sheet is a section with a table, without empty rows and columns."""

from __future__ import annotations

import datetime
import html
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import openpyxl

from memagent_converters.html_to_markdown import MAX_REPEATED_LENGTH, format_rows, iter_markdown, list_omissions
from memagent_converters.slide_files import iter_shapes
from memagent_converters.xml_archives import XMLArchive, get_attribute, iter_descendants
from memagent_graph.converters import BLOCK_SEPARATOR, Block, Omission, Parts, SourceFile

_MAX_EMPTY_ROWS: Final = 2_000_000
"""The number of consecutive empty rows after which no more rows are read."""
_MERGED_RANGE: Final = re.compile(rb'<(?:\w+:)?mergeCell\s[^>]*ref="([A-Z]+\d+:[A-Z]+\d+)"')
_PAGE_HEADING: Final = re.compile(rb"<(?:\w+:)?(?:odd|even|first)(?:Head|Foot)er>([^<]+)<")
_HEADER_CODE: Final = re.compile(r'&(?:"[^"]*"|K[0-9A-F]{6}|\d+|.)')
"""Codes in the header or footer of a page: positions, fonts, and fields such as page numbers."""
_FORMAT_LITERAL: Final = re.compile(r'"([^"]*)"|\[\$([^\]-]*)[^\]]*\]|\\(.)|\[[^\]]*\]|[_*].|[()]')
_LITERAL_MARK: Final = "\ue000"
_FORMAT_DIGITS: Final = re.compile(r"[#0?](?:.*[#0?])?[.,]*")


def convert(source: SourceFile) -> Parts:
    """Convert a workbook. A formula becomes its saved value, or stays as it is if no value was saved."""
    archive = XMLArchive(source)
    value_book = openpyxl.load_workbook(source.file, read_only=True, data_only=True, keep_links=False)
    formula_book = openpyxl.load_workbook(source.file, read_only=True, keep_links=False)
    workbook = archive.find_member("xl/workbook.xml")
    relationships = archive.read_relationships(workbook)
    for sheet_entry in iter_descendants(archive.read_required_xml(workbook), "sheet"):
        name = get_attribute(sheet_entry, "name")
        label = f"sheet {name}"
        _, member = relationships.get(get_attribute(sheet_entry, "id"), ("", ""))
        sheet, sheet_xml = value_book[name], archive.read(member)
        if not hasattr(sheet, "reset_dimensions"):
            yield Block("", label, (name,))
            yield Omission("sheets that are charts", name, "Read the sheets with their numbers.")
            yield from _iter_related_parts(source, archive, member, label)
            continue
        rows = dict(_iter_rows(sheet))
        missing_values = 0
        for row_number, cells in _iter_rows(formula_book[name]) if b"<f" in sheet_xml else ():
            row = rows.setdefault(row_number, {})
            for column in cells.keys() - row.keys():
                row[column] = cells[column]
                missing_values += 1
        column_count = max((max(row) for row in rows.values()), default=0)
        for merged_range in _MERGED_RANGE.findall(sheet_xml):
            left, top, right, bottom = openpyxl.utils.range_boundaries(merged_range.decode())
            _fill_merged_cells(rows, range(left, min(right, column_count) + 1), range(top, bottom + 1))
        used_columns = sorted({column for row in rows.values() for column in row})
        table = [[row.get(column, "") for column in used_columns] for _, row in sorted(rows.items())]
        yield Block(f"## {name}\n\n" + format_rows(table) + BLOCK_SEPARATOR, label, (name,))
        for heading in dict.fromkeys(_PAGE_HEADING.findall(sheet_xml)):
            pieces = _HEADER_CODE.sub(
                lambda code: "&" if code[0] == "&&" else " ", html.unescape(heading.decode("utf-8", "replace"))
            ).split()
            yield Block(f"On each page: {' '.join(pieces)}{BLOCK_SEPARATOR}" if pieces else "")
        if missing_values:
            yield Omission("formulas without a value", label, "Open and save the workbook once.", missing_values)
        yield from _iter_related_parts(source, archive, member, label)


def _iter_related_parts(source: SourceFile, archive: XMLArchive, sheet_member: str, label: str) -> Parts:
    """Yield the comments, text boxes, pictures and embedded files of a sheet."""
    omission_counts: Counter[str] = Counter()
    related_parts = archive.read_relationships(sheet_member).values()
    threads = [archive.read_xml(member) for kind, member in related_parts if kind == "threadedComment"]
    thread_ids = {get_attribute(comment, "id") for thread in threads for comment in thread}
    for kind, member in related_parts:
        if kind in {"comments", "threadedComment"}:
            for comment in iter_descendants(archive.read_xml(member), "comment", "threadedComment"):
                text = "".join(comment.itertext()).strip()
                if text and get_attribute(comment, "uid") not in thread_ids:  # the same comment for older programs
                    yield Block(f"Comment at {get_attribute(comment, 'ref')}: {text}\n")
            yield Block(BLOCK_SEPARATOR)
        elif kind == "drawing":
            drawings_on_charts = [
                drawing
                for chart_kind, chart in archive.read_relationships(member).values()
                if chart_kind == "chart"
                for drawing_kind, drawing in archive.read_relationships(chart).values()
                if drawing_kind == "chartUserShapes"
            ]
            for drawing in (member, *drawings_on_charts):
                root = archive.read_xml(drawing)
                yield from iter_markdown("".join(iter_shapes(root, omission_counts)), end=BLOCK_SEPARATOR)
                omission_counts["charts"] += sum(1 for _ in iter_descendants(root, "chart"))
    yield from list_omissions(omission_counts, label)
    for kind, member in related_parts:
        if kind in {"oleObject", "package"} and member in archive.names:  # else a link to a file elsewhere
            yield from source.convert_embedded(member.rpartition("/")[2], archive.read(member))


def _iter_rows(sheet: Any) -> Iterator[tuple[int, dict[int, str]]]:
    """Yield the number of each row that has a value, and the texts of its cells by column number."""
    sheet.reset_dimensions()
    empty_rows = 0
    for row in sheet.iter_rows():
        cells = [cell for cell in row if cell.value is not None]
        if cells:
            empty_rows = 0
            yield cells[0].row, {cell.column: _format_cell(cell.value, cell.number_format) for cell in cells}
        elif (empty_rows := empty_rows + 1) > _MAX_EMPTY_ROWS:
            return


def _fill_merged_cells(rows: dict[int, dict[int, str]], columns: range, row_numbers: range) -> None:
    """Copy the text of a merged range into each of its cells, in rows that have a value."""
    text = rows.get(row_numbers.start, {}).get(columns.start, "")
    if 0 < len(text) <= MAX_REPEATED_LENGTH:
        for row_number in rows if len(rows) < len(row_numbers) else row_numbers:
            if row_number in row_numbers and row_number in rows:
                rows[row_number].update(dict.fromkeys(columns, text))


def _format_cell(value: Any, number_format: str) -> str:
    """Return a value as text, with the unit in its number format."""
    if isinstance(value, datetime.datetime):
        return value.date().isoformat() if value.time() == datetime.time() else value.isoformat(" ")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    literals = (match[1] or match[2] or match[3] or "" for match in _FORMAT_LITERAL.finditer(number_format))
    pattern = _FORMAT_LITERAL.sub(_LITERAL_MARK, number_format).partition(";")[0]
    match = _FORMAT_DIGITS.search(pattern)
    if match is None or "/" in pattern or match[0].endswith(","):  # general, a fraction, or shown in thousands
        return _format_number(value)
    text = _format_number(value * 100 if "%" in pattern else value)
    digits, filled_places = [*text], ""
    for place in reversed(match[0]):
        filled_places = (place if place not in "#0?" else digits.pop() if digits else place.strip("#?")) + filled_places
    before, digits_in_places, after = (
        re.sub(_LITERAL_MARK, lambda _: next(literals), part)
        for part in (pattern[: match.start()], "".join(digits) + filled_places, pattern[match.end() :])
    )
    is_code = text.isdigit() and not re.search("[,.E]", match[0])  # such as a telephone number: 000-0000
    if text.startswith("-") and before.endswith("+"):
        before = before[:-1]
    return before + (digits_in_places if is_code else text) + after


def _format_number(value: float) -> str:
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.15g}"
