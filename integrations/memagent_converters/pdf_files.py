"""Converts PDF files page by page with pdfium: text, form values, notes and attached files.

Pages without text are reported as omissions.

pdfium was chosen for its size (12 MB installed), speed and licence (BSD).
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

import pypdfium2
import pypdfium2.raw as pdfium_api

from memagent_converters.equations import format_script
from memagent_graph.converters import BLOCK_SEPARATOR, Block, ConversionError, Omission, Parts, SourceFile

_OCR_REMEDY: Final = (
    "Run optical character recognition on the file first, for example with ocrmypdf, or give a converter."
)
_LINE_END_HYPHEN: Final = re.compile(r"(\w+)[\ufffe\xad](?:\r?\n)?(\w+)")
_NUMBER_AFTER_TEXT: Final = re.compile(r"(?<=[\w)\]}.,;:!?”’\uDC00-\uDFFF]) ?(?P<digits>[-+−–]?\d+)(?P<end>\r\n(?=.)|)")
_MAX_SCRIPT_HEIGHT: Final = 0.85
"""Maximum height of a script, as a fraction of the height of the character before it."""
_MIN_SHIFT: Final = 0.1
"""Minimum vertical shift of a script, as a fraction of the height of the character before it."""
_UNMAPPED_CHARACTER: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\ufffd\ue000-\uf8ff\ufff0-\ufff8\U000f0000-\U0010ffff]")
_MAX_UNMAPPED_FRACTION: Final = 0.15
"""Above this fraction of unmapped characters a page needs OCR; custom bullets stay below it."""
_MAX_SCAN_CHARACTERS: Final = 100
"""Pages with fewer characters are checked for being scans; a stamp or page number is still text."""
_MAX_PAGES_OPEN: Final = 100
"""A document is reopened after this many pages, because pdfium keeps the fonts of all pages in memory."""
_MAX_FIELDS: Final = 100_000
_LINE: Final = re.compile(r"[^\r\n\ufffe]*[^\s\ufffe]\ufffe?")  # it may end with pdfium's own hyphen
_MIN_COLUMN_LINES: Final = 4
_GetBox = Callable[[int], tuple[float, float, float]]
"""Returns the left and the right edge of a character on the page, and its height, in points."""


class _LinePart(NamedTuple):
    """Text of a line between two wide gaps: its characters in the page's text, and its edges on the page, in points."""

    start: int
    end: int
    left: float
    right: float


def convert(source: SourceFile) -> Parts:
    """Convert a PDF file; each page is a section.

    Raises:
        ConversionError: the file cannot be opened, or a page cannot be read.
    """
    document = _open_document(source)
    pages = _select_pages(source, len(document))
    for converted_count, page_index in enumerate(pages, 1):
        if converted_count % _MAX_PAGES_OPEN == 0:  # frees the fonts
            document.close()
            document = _open_document(source)
        label = f"page {page_index + 1}"
        try:
            page = document[page_index]
            text, omissions = _convert_page(document, page, label)
        except pypdfium2.PdfiumError as error:
            raise ConversionError(
                f"{label} of the PDF file {source.name} cannot be read: {error}",
                "The file is damaged: repair it (qpdf rewrites what it can), or remove the page.",
            ) from error
        yield Block(text if page_index == pages[-1] else text + BLOCK_SEPARATOR, label)
        yield from omissions
        for annotation in _iter_annotations(page):
            if file := pdfium_api.FPDFAnnot_GetFileAttachment(annotation):
                yield from _convert_attachment(source, pypdfium2.PdfAttachment(file, document))
        page.close()
    yield from _read_xfa_values(document)
    for index in range(document.count_attachments()):
        yield from _convert_attachment(source, document.get_attachment(index))


def _convert_attachment(source: SourceFile, attachment: Any) -> Parts:
    try:
        data = bytes(attachment.get_data())
    except pypdfium2.PdfiumError:
        yield Omission("attached files without content", attachment.get_name(), "Read them as documents of their own.")
    else:
        yield Block(BLOCK_SEPARATOR)
        yield from source.convert_embedded(attachment.get_name(), data)


def _open_document(source: SourceFile) -> Any:
    try:
        document = pypdfium2.PdfDocument(source.file)
        document.init_forms()
    except pypdfium2.PdfiumError as error:
        raise ConversionError(
            f"the PDF file {source.name} cannot be opened: {error}",
            "It may be damaged or protected by a password; save an unprotected copy first.",
        ) from error
    return document


def _select_pages(source: SourceFile, page_count: int) -> list[int]:
    """Return the requested pages in order, counted from 0; all pages if none were requested."""
    if not source.pages:
        return list(range(page_count))
    pages: set[int] = set()
    for page_range in source.pages.split(","):
        first_page, dash, last_page = page_range.partition("-")
        first_number = int(first_page)
        last_number = int(last_page) if last_page else page_count if dash else first_number
        if max(first_number, last_number) > page_count:
            raise ConversionError(
                f"the PDF file {source.name} has {page_count} pages, and {page_range} was asked for",
                f"Choose pages from 1 to {page_count}; {min(first_number, page_count)}- goes to the end.",
            )
        pages.update(range(first_number - 1, last_number))
    return sorted(pages)


def _convert_page(document: Any, page: Any, label: str) -> tuple[str, list[Omission]]:
    """Return a page's text with its form values and notes, and its omissions."""
    textpage = page.get_textpage()
    text = _join_words(_sort_columns(textpage, str(textpage.get_text_range())).replace("\r\n", "\n"))
    textpage.close()
    omissions = []
    character_count = len("".join(text.split()))
    unmapped_count = len(_UNMAPPED_CHARACTER.findall(text))
    if unmapped_count > _MAX_UNMAPPED_FRACTION * character_count:
        omissions.append(Omission("pages whose glyphs have no characters", label, _OCR_REMEDY))
        text = _UNMAPPED_CHARACTER.sub("", text)
    elif unmapped_count:
        text = text.replace("\x00", "")
    if character_count < _MAX_SCAN_CHARACTERS and (content := _describe_content(page, has_text=character_count > 0)):
        omissions.append(Omission(content, label, _OCR_REMEDY))
    values = list(_format_annotations(document, page))
    return "\n".join([*filter(None, [text]), *values]), omissions


def _sort_columns(textpage: Any, text: str) -> str:
    """Return a page's text column by column, with marks for superscripts and subscripts."""
    text = "".join(map(chr, memoryview(text.encode("utf-16", "surrogatepass")).cast("H")[1:]))  # pdfium's own units
    rectangle = pdfium_api.FS_RECTF()

    def get_box(index: int) -> tuple[float, float, float]:
        pdfium_api.FPDFText_GetLooseCharBox(
            textpage, pdfium_api.FPDFText_GetCharIndexFromTextIndex(textpage, index), rectangle
        )
        return rectangle.left, rectangle.right, rectangle.top - rectangle.bottom

    has_no_gaps = pdfium_api.FPDFText_CountRects(textpage, 0, -1) < text.count("\n") + _MIN_COLUMN_LINES
    ranges = [(0, len(text))] if has_no_gaps else _split_columns(text, get_box)
    sorted_text = "\r\n".join(_mark_scripts(textpage, text[start:end], start) for start, end in ranges)
    return sorted_text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _split_columns(text: str, get_box: _GetBox) -> list[tuple[int, int]]:
    """Return the character ranges of a page's text in reading order, even if its columns were written row by row.

    Lines of two columns have a wide gap at the same place. If the text on each side of the gap is prose (its lines are
    full, and some of them continue a sentence), the sides are columns. Otherwise the lines are rows of a table, and
    stay in their order.
    """
    lines = [[*_split_line(text, *match.span(), get_box)] for match in _LINE.finditer(text)]
    column_lefts: list[int] = []
    for left, line_count in sorted(Counter(round(part.left) for line in lines for part in line[1:]).items()):
        # Smaller distances are indents.
        if line_count >= _MIN_COLUMN_LINES and (not column_lefts or left > column_lefts[-1] + 40):
            column_lefts.append(left)

    def find_column(part: _LinePart) -> int:
        return bisect(column_lefts, part.left + 1)

    ordered_parts: list[_LinePart] = []
    for is_in_columns, column_lines in groupby(
        lines, lambda line: all(part.right < [*column_lefts, inf][find_column(part)] for part in line)
    ):
        parts = [*chain(*column_lines)]
        columns = [
            [part for part in parts if find_column(part) == column_index]
            for column_index in range(len(column_lefts) + 1)
        ]
        are_columns = is_in_columns and all(_is_prose(text, column) for column in columns)
        ordered_parts += chain(*columns) if are_columns else parts
    if ordered_parts == sorted(ordered_parts):
        return [(0, len(text))]
    return [(part.start, part.end) for part in ordered_parts]


def _split_line(text: str, start: int, end: int, get_box: _GetBox) -> Iterator[_LinePart]:
    left = get_box(start)[0]
    for space in (index for index in range(start + 1, end - 1) if text[index] == " "):
        (_, right, height), next_left = get_box(space - 1), get_box(space + 1)[0]
        if next_left - right > 1.2 * height:
            yield _LinePart(start, space, left, right)
            start, left = space + 1, next_left
    yield _LinePart(start, end, left, get_box(end - 1)[1])


def _is_prose(text: str, lines: Sequence[_LinePart]) -> bool:
    if len(lines) < _MIN_COLUMN_LINES or median(line.end - line.start for line in lines) < 15:
        return False
    widths = [line.right - line.left for line in lines]
    sentence_starts = sum(text[line.start].isupper() or not text[line.start].isalpha() for line in lines)
    return median(widths) >= 0.6 * max(widths) and sentence_starts <= 0.7 * len(lines)


def _mark_scripts(textpage: Any, text: str, offset: int) -> str:
    """Mark superscripts (`10^6`) and subscripts (`CO_2`): digits that are smaller, and raised or lowered.

    `text` begins at character `offset` of the page's text.
    """
    box, x, y = pdfium_api.FS_RECTF(), ctypes.c_double(), ctypes.c_double()

    def measure_character(index: int) -> tuple[float, float]:
        """Return the baseline of a character on the page, and the character's height."""
        index = pdfium_api.FPDFText_GetCharIndexFromTextIndex(textpage, offset + index)
        pdfium_api.FPDFText_GetLooseCharBox(textpage, index, box)
        pdfium_api.FPDFText_GetCharOrigin(textpage, index, x, y)
        return y.value, box.top - box.bottom

    def mark_number(match: re.Match[str]) -> str:
        start, end = match.span("digits")
        baseline, height = measure_character(match.start() - 1)
        for index in range(start, end):
            digit_baseline, digit_height = measure_character(index)
            if digit_height < _MAX_SCRIPT_HEIGHT * height and abs(digit_baseline - baseline) > _MIN_SHIFT * height:
                # The space before a script is left out.
                digits_before = text[match.start() : index] if index > start else ""
                continues_line = (
                    match["end"] and abs(measure_character(match.end())[0] - baseline) < _MIN_SHIFT * height
                )
                sign = "^" if digit_baseline > baseline else "_"
                return digits_before + format_script(sign, text[index:end]) + ("" if continues_line else match["end"])
            baseline, height = digit_baseline, digit_height
        return match[0]

    return _NUMBER_AFTER_TEXT.sub(mark_number, text)


def _join_words(text: str) -> str:
    """Join words divided at line ends; the hyphen stays if the page has the hyphenated word elsewhere."""
    if "\ufffe" not in text and "\xad" not in text:
        return text

    def join_match(match: re.Match[str]) -> str:
        hyphenated_word = f"{match[1]}-{match[2]}"
        return hyphenated_word if hyphenated_word in text else match[1] + match[2]

    return _LINE_END_HYPHEN.sub(join_match, text).replace("\ufffe", "-").replace("\xad", "")


def _describe_content(page: Any, *, has_text: bool) -> str | None:
    """Return what a page with hardly any text shows instead: an image or drawn letters; None if it is empty."""
    image_area = segment_count = 0.0
    for page_object in page.get_objects(max_depth=3):
        if page_object.type == pdfium_api.FPDF_PAGEOBJ_IMAGE:
            left, bottom, right, top = page_object.get_bounds()
            image_area += (right - left) * (top - bottom)
        elif page_object.type == pdfium_api.FPDF_PAGEOBJ_PATH:
            segment_count += pdfium_api.FPDFPath_CountSegments(page_object)
    if image_area > page.get_width() * page.get_height() / 2 or (image_area and not has_text):
        return "pages that are images"
    is_drawn = segment_count > 15 and not has_text  # fewer segments are a frame
    return "pages that are drawn, without characters" if is_drawn else None


def _iter_annotations(page: Any) -> Iterator[Any]:
    for index in range(min(pdfium_api.FPDFPage_GetAnnotCount(page), _MAX_FIELDS)):
        if annotation := pdfium_api.FPDFPage_GetAnnot(page, index):
            yield annotation
            pdfium_api.FPDFPage_CloseAnnot(annotation)


def _format_annotations(document: Any, page: Any) -> Iterator[str]:
    """Yield a page's annotations as lines: form fields with their values, notes, texts."""
    form_environment = document.formenv
    for annotation in _iter_annotations(page):
        subtype = pdfium_api.FPDFAnnot_GetSubtype(annotation)
        if subtype == pdfium_api.FPDF_ANNOT_WIDGET and form_environment is not None:
            line = _format_field(form_environment, annotation)
        elif subtype in {pdfium_api.FPDF_ANNOT_LINK, pdfium_api.FPDF_ANNOT_POPUP, pdfium_api.FPDF_ANNOT_WIDGET}:
            line = ""
        else:
            contents = _read_string(pdfium_api.FPDFAnnot_GetStringValue, annotation, b"Contents").strip()
            line = f"[Note: {contents}]" if contents else ""
        if line:
            yield line


def _format_field(form_environment: Any, annotation: Any) -> str:
    """Return a form field's name and value; empty if it has none."""
    field_type = pdfium_api.FPDFAnnot_GetFormFieldType(form_environment, annotation)
    name = _read_string(pdfium_api.FPDFAnnot_GetFormFieldAlternateName, form_environment, annotation) or _read_string(
        pdfium_api.FPDFAnnot_GetFormFieldName, form_environment, annotation
    )
    value = _read_string(pdfium_api.FPDFAnnot_GetFormFieldValue, form_environment, annotation).strip()
    if field_type in {pdfium_api.FPDF_FORMFIELD_CHECKBOX, pdfium_api.FPDF_FORMFIELD_RADIOBUTTON}:
        is_checked = pdfium_api.FPDFAnnot_IsChecked(form_environment, annotation)
        choice = _read_string(pdfium_api.FPDFAnnot_GetFormFieldExportValue, form_environment, annotation)
        suffix = f" ({choice})" if choice and choice.lower() not in {"yes", "on", "1", "true"} else ""
        return f"{'☒' if is_checked else '☐'} {name}{suffix}"
    if field_type in {pdfium_api.FPDF_FORMFIELD_LISTBOX, pdfium_api.FPDF_FORMFIELD_COMBOBOX}:
        options = [
            _read_string(pdfium_api.FPDFAnnot_GetOptionLabel, form_environment, annotation, index)
            for index in range(min(pdfium_api.FPDFAnnot_GetOptionCount(form_environment, annotation), _MAX_FIELDS))
            if pdfium_api.FPDFAnnot_IsOptionSelected(form_environment, annotation, index)
        ]
        value = ", ".join(options) or value
    if field_type == pdfium_api.FPDF_FORMFIELD_PUSHBUTTON or not value:
        return ""
    return f"{name}: {value}"


def _read_string(function: Any, *arguments: Any) -> str:
    """Return a string from a pdfium function that writes UTF-16 into a buffer."""
    byte_count = function(*arguments, None, 0)
    if byte_count <= 2:
        return ""
    buffer = ctypes.create_string_buffer(byte_count)
    pointer = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort))
    function(*arguments, pointer, byte_count)
    return buffer.raw[: byte_count - 2].decode("utf-16-le", "replace").replace("\r", "\n")


def _read_xfa_values(document: Any) -> Parts:
    """Yield the values of an XFA form, which are not on any page."""
    if document.get_formtype() != pdfium_api.FORMTYPE_XFA_FULL:
        return
    for index in range(pdfium_api.FPDF_GetXFAPacketCount(document)):
        byte_count = ctypes.c_ulong()
        pdfium_api.FPDF_GetXFAPacketContent(document, index, None, 0, byte_count)
        buffer = ctypes.create_string_buffer(max(byte_count.value, 1))
        pdfium_api.FPDF_GetXFAPacketContent(document, index, buffer, byte_count.value, byte_count)
        if b"datasets" not in buffer.raw[:300]:
            continue
        try:
            root = ElementTree.fromstring(buffer.raw[: byte_count.value].rstrip(b"\0"))  # noqa: S314  bounded process
        except ElementTree.ParseError:
            continue
        values = [
            f"{element.tag.rpartition('}')[2]}: {element.text.strip()}"
            for element in root.iter()
            if element.text and element.text.strip()
        ]
        yield Block(BLOCK_SEPARATOR + "\n".join(values))
    yield Omission("XFA forms, of which only the values are read", "", "Print the file to a new PDF, and read that.")
