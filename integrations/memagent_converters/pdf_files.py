"""PDF files, page by page, with pdfium: text, values of forms, notes, attached files; and which pages have no text.

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
from typing import Any, Final
from xml.etree import ElementTree

from memagent_converters.equations import format_script
from memagent_graph.converters import GAP, Block, ConversionError, Omission, Parts, SourceFile

_OCR: Final = "Run optical character recognition on the file first, for example with ocrmypdf, or name a converter."
_LINE_END_HYPHEN: Final = re.compile(r"(\w+)[\ufffe\xad](?:\r?\n)?(\w+)")
_NUMBER: Final = re.compile(r"(?<=[\w)\]}.,;:!?”’]) ?(?P<digits>[-+−–]?\d+)(?P<end>(?:\r\n(?=.))?)")
_MAX_SCRIPT_SIZE: Final = 0.85
_MIN_SHIFT: Final = 0.1
"""Minimum vertical shift of a script, as a fraction of the height of the character before it."""
_UNMAPPED: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\ufffd\ue000-\uf8ff\ufff0-\ufff8\U000f0000-\U0010ffff]")
_MAX_UNMAPPED: Final = 0.15
"""Above this fraction of unmapped characters a page needs OCR; custom bullets stay below it."""
_MAX_SCAN_CHARACTERS: Final = 100
"""Pages with fewer characters are checked for being scans; a stamp or page number is still text."""
_MAX_PAGES_OPEN: Final = 100
"""A document is reopened after this many pages, because pdfium keeps the fonts of all pages in memory."""
_MAX_VALUES: Final = 100_000
_LINE: Final = re.compile(r"[^\r\n\ufffe]*[^\s\ufffe]\ufffe?")  # it may end with pdfium's own hyphen
_MIN_ROWS: Final = 4
_Part = tuple[int, int, float, float]  # begin, end, left and right


def convert(source: SourceFile) -> Parts:
    """Convert a PDF file; each page is a section.

    Raises:
        ConversionError: the file cannot be opened, or a page cannot be read.
    """
    import pypdfium2  # noqa: PLC0415  the extra `files`

    document = _open(pypdfium2, source)
    pages = _select_pages(source, len(document))
    for index, number in enumerate(pages, 1):
        if index % _MAX_PAGES_OPEN == 0:  # frees the fonts
            document.close()
            document = _open(pypdfium2, source)
        label = f"page {number + 1}"
        try:
            page = document[number]
            text, omissions = _convert_page(pypdfium2, document, page, label)
            page.close()
        except pypdfium2.PdfiumError as error:
            raise ConversionError(
                f"page {number + 1} of the PDF file {source.name} cannot be read: {error}",
                "The file is damaged: repair it (qpdf rewrites what it can), or remove the page.",
            ) from error
        yield Block(text if number == pages[-1] else text + GAP, label)
        yield from omissions
    yield from _read_xfa_values(pypdfium2.raw, document)
    for index in range(document.count_attachments()):
        attachment = document.get_attachment(index)
        yield Block(GAP)
        yield from source.embedded(attachment.get_name(), bytes(attachment.get_data()))


def _open(pdfium: Any, source: SourceFile) -> Any:
    try:
        document = pdfium.PdfDocument(source.file)
        document.init_forms()
    except pdfium.PdfiumError as error:
        raise ConversionError(
            f"the PDF file {source.name} cannot be opened: {error}",
            "It may be damaged or protected by a password; save an unprotected copy first.",
        ) from error
    return document


def _select_pages(source: SourceFile, count: int) -> list[int]:
    """Return the requested pages in order, counted from 0; all pages if none were requested."""
    if not source.pages:
        return list(range(count))
    pages: set[int] = set()
    for part in source.pages.split(","):
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last) if last else count if dash else int(first)
        if max(begin, end) > count:
            raise ConversionError(
                f"the PDF file {source.name} has {count} pages, and {part} was asked for",
                f"Choose pages from 1 to {count}; {min(begin, count)}- goes to the end.",
            )
        pages.update(range(begin - 1, end))
    return sorted(pages)


def _convert_page(pdfium: Any, document: Any, page: Any, label: str) -> tuple[str, list[Omission]]:
    """Return a page's text with its form values and notes, and its omissions."""
    textpage = page.get_textpage()
    text = _join_words(_sort_columns(pdfium.raw, textpage, str(textpage.get_text_range())).replace("\r\n", "\n"))
    textpage.close()
    omissions = []
    characters = len("".join(text.split()))
    unmapped = len(_UNMAPPED.findall(text))
    if unmapped > _MAX_UNMAPPED * characters:
        omissions.append(Omission("pages whose glyphs have no characters", label, _OCR))
        text = _UNMAPPED.sub("", text)
    elif unmapped:
        text = text.replace("\x00", "")
    if characters < _MAX_SCAN_CHARACTERS and (what := _describe_content(pdfium.raw, page, has_text=characters > 0)):
        omissions.append(Omission(what, label, _OCR))
    values = list(_format_annotations(pdfium.raw, document, page))
    return "\n".join([*filter(None, [text]), *values]), omissions


def _sort_columns(raw: Any, textpage: Any, text: str) -> str:
    """Return a page's text, column by column, with superscripts and subscripts marked."""
    if max(text, default="") > "\uffff":  # pdfium counts UTF-16 units
        return text
    rectangle = raw.FS_RECTF()

    def box(index: int) -> tuple[float, float, float]:
        raw.FPDFText_GetLooseCharBox(textpage, raw.FPDFText_GetCharIndexFromTextIndex(textpage, index), rectangle)
        return rectangle.left, rectangle.right, rectangle.top - rectangle.bottom

    is_whole = raw.FPDFText_CountRects(textpage, 0, -1) < text.count("\n") + _MIN_ROWS  # no line is in parts
    parts = [(0, len(text))] if is_whole else _split_columns(text, box)
    return "\r\n".join(_mark_scripts(raw, textpage, text[begin:end], begin) for begin, end in parts)


def _split_columns(text: str, box: Callable[[int], tuple[float, float, float]]) -> list[tuple[int, int]]:
    """Return the parts of a page's text in reading order, also if its columns were written row by row.

    Lines of two columns have a wide gap at the same place. If the text on one side of the gap is prose, it is a column:
    its lines are full, and some of them continue a sentence. Otherwise the lines are rows of a table, as one part.
    `box` returns where on the page a character begins and ends, and its height, in points.
    """
    lines = [[*_split_line(text, *match.span(), box)] for match in _LINE.finditer(text)]
    columns: list[int] = []
    for left, count in sorted(Counter(round(part[2]) for line in lines for part in line[1:]).items()):
        if count >= _MIN_ROWS and (not columns or left > columns[-1] + 40):  # closer ones are indented lines
            columns.append(left)

    def find_column(part: _Part) -> int:
        return bisect(columns, part[2] + 1)

    ordered: list[_Part] = []
    for fits, rows in groupby(lines, lambda line: all(part[3] < [*columns, inf][find_column(part)] for part in line)):
        parts = [*chain(*rows)]
        sides = [[part for part in parts if find_column(part) == number] for number in range(len(columns) + 1)]
        ordered += chain(*sides) if fits and all(_is_prose(text, side) for side in sides) else parts
    return [(0, len(text))] if ordered == sorted(ordered) else [part[:2] for part in ordered]


def _split_line(text: str, begin: int, end: int, box: Callable[[int], tuple[float, float, float]]) -> Iterator[_Part]:
    left = box(begin)[0]
    for space in (index for index in range(begin + 1, end - 1) if text[index] == " "):
        (_, right, height), next_left = box(space - 1), box(space + 1)[0]
        if next_left - right > 1.2 * height:
            yield begin, space, left, right
            begin, left = space + 1, next_left
    yield begin, end, left, box(end - 1)[1]


def _is_prose(text: str, lines: Sequence[_Part]) -> bool:
    if len(lines) < _MIN_ROWS or median(end - begin for begin, end, *_ in lines) < 15:
        return False
    widths = [right - left for *_, left, right in lines]
    beginnings = sum(text[begin].isupper() or not text[begin].isalpha() for begin, *_ in lines)
    return median(widths) >= 0.6 * max(widths) and beginnings <= 0.7 * len(lines)


def _mark_scripts(raw: Any, textpage: Any, text: str, offset: int) -> str:
    """Mark superscripts (`10^6`) and subscripts (`CO_2`): digits that are smaller, and raised or lowered.

    `text` begins at character `offset` of the page's text.
    """
    box, x, y = raw.FS_RECTF(), ctypes.c_double(), ctypes.c_double()

    def measure(index: int) -> tuple[float, float]:
        """Return the baseline of a character on the page, and the character's height."""
        index = raw.FPDFText_GetCharIndexFromTextIndex(textpage, offset + index)
        raw.FPDFText_GetLooseCharBox(textpage, index, box)
        raw.FPDFText_GetCharOrigin(textpage, index, x, y)
        return y.value, box.top - box.bottom

    def mark(match: re.Match[str]) -> str:
        begin, end = match.span("digits")
        line, height = measure(match.start() - 1)
        for index in range(begin, end):
            digit_line, digit_height = measure(index)
            if digit_height < _MAX_SCRIPT_SIZE * height and abs(digit_line - line) > _MIN_SHIFT * height:
                before = text[match.start() : index] if index > begin else ""  # without the space of another line
                continues_line = match["end"] and abs(measure(match.end())[0] - line) < _MIN_SHIFT * height
                sign = "^" if digit_line > line else "_"
                return before + format_script(sign, text[index:end]) + ("" if continues_line else match["end"])
            line, height = digit_line, digit_height
        return match[0]

    return _NUMBER.sub(mark, text)


def _join_words(text: str) -> str:
    """Join words divided at line ends; the hyphen stays if the page has the hyphenated word elsewhere."""
    if "\ufffe" not in text and "\xad" not in text:
        return text

    def join(match: re.Match[str]) -> str:
        hyphenated = f"{match[1]}-{match[2]}"
        return hyphenated if hyphenated in text else match[1] + match[2]

    return _LINE_END_HYPHEN.sub(join, text).replace("\ufffe", "-").replace("\xad", "")


def _describe_content(raw: Any, page: Any, *, has_text: bool) -> str | None:
    """Return what a page with hardly any text shows instead: an image or drawn letters; None if it is empty."""
    images = segments = 0.0
    for item in page.get_objects(max_depth=3):
        if item.type == raw.FPDF_PAGEOBJ_IMAGE:
            left, bottom, right, top = item.get_bounds()
            images += (right - left) * (top - bottom)
        elif item.type == raw.FPDF_PAGEOBJ_PATH:
            segments += raw.FPDFPath_CountSegments(item)
    if images > page.get_width() * page.get_height() / 2 or (images and not has_text):
        return "pages that are images"
    return "pages that are drawn, without characters" if segments > 15 and not has_text else None  # fewer are a frame


def _format_annotations(raw: Any, document: Any, page: Any) -> Iterator[str]:
    """Yield a page's annotations as lines: form fields with their values, notes, texts."""
    form = document.formenv
    for index in range(min(raw.FPDFPage_GetAnnotCount(page), _MAX_VALUES)):
        annotation = raw.FPDFPage_GetAnnot(page, index)
        if not annotation:
            continue
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        if kind == raw.FPDF_ANNOT_WIDGET and form is not None:
            line = _format_field(raw, form, annotation)
        elif kind in {raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET}:
            line = ""
        else:
            contents = _read_string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents").strip()
            line = f"[Note: {contents}]" if contents else ""
        raw.FPDFPage_CloseAnnot(annotation)
        if line:
            yield line


def _format_field(raw: Any, form: Any, annotation: Any) -> str:
    """Return a form field's name and value; empty if it has none."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    name = _read_string(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation) or _read_string(
        raw.FPDFAnnot_GetFormFieldName, form, annotation
    )
    value = _read_string(raw.FPDFAnnot_GetFormFieldValue, form, annotation).strip()
    if kind in {raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON}:
        is_on = raw.FPDFAnnot_IsChecked(form, annotation)
        choice = _read_string(raw.FPDFAnnot_GetFormFieldExportValue, form, annotation)
        suffix = f" ({choice})" if choice and choice.lower() not in {"yes", "on", "1", "true"} else ""
        return f"{'☒' if is_on else '☐'} {name}{suffix}"
    if kind in {raw.FPDF_FORMFIELD_LISTBOX, raw.FPDF_FORMFIELD_COMBOBOX}:
        options = [
            _read_string(raw.FPDFAnnot_GetOptionLabel, form, annotation, index)
            for index in range(min(raw.FPDFAnnot_GetOptionCount(form, annotation), _MAX_VALUES))
            if raw.FPDFAnnot_IsOptionSelected(form, annotation, index)
        ]
        value = ", ".join(options) or value
    if kind == raw.FPDF_FORMFIELD_PUSHBUTTON or not value:
        return ""
    return f"{name}: {value}"


def _read_string(function: Any, *arguments: Any) -> str:
    """Return a string from a pdfium function that writes UTF-16 into a buffer."""
    size = function(*arguments, None, 0)
    if size <= 2:
        return ""
    buffer = ctypes.create_string_buffer(size)
    first = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort))
    function(*arguments, first, size)
    return buffer.raw[: size - 2].decode("utf-16-le", "replace").replace("\r", "\n")


def _read_xfa_values(raw: Any, document: Any) -> Parts:
    """Yield the values of an XFA form, which are not on any page."""
    if document.get_formtype() != raw.FORMTYPE_XFA_FULL:
        return
    for index in range(raw.FPDF_GetXFAPacketCount(document)):
        size = ctypes.c_ulong()
        raw.FPDF_GetXFAPacketContent(document, index, None, 0, size)
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        raw.FPDF_GetXFAPacketContent(document, index, buffer, size.value, size)
        if b"datasets" not in buffer.raw[:300]:
            continue
        try:
            root = ElementTree.fromstring(buffer.raw[: size.value].rstrip(b"\0"))  # noqa: S314  bounded process
        except ElementTree.ParseError:
            continue
        values = [
            f"{element.tag.rpartition('}')[2]}: {element.text.strip()}"
            for element in root.iter()
            if element.text and element.text.strip()
        ]
        yield Block(GAP + "\n".join(values))
    yield Omission("XFA forms, of which only the values are read", "", "Print the file to a new PDF, and read that.")
