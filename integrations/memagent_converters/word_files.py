"""Converts Word files (.docx): numbered headings and lists, notes, forms, formulas, tracked changes.

Insertions are kept, deletions are dropped. Each header and footer appears once. Notes and comments are at the end, with
a mark like [^1] at their place in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any, Final
from xml.etree.ElementTree import Element

from memagent_converters.html_to_markdown import UNDESCRIBED_PICTURES, format_number, iter_markdown, list_omissions
from memagent_converters.xml_archives import (
    XMLArchive,
    find_child,
    format_formula,
    get_attribute,
    get_int_attribute,
    get_local_name,
    iter_children,
    iter_descendants,
    iter_table_parts,
    make_html_table,
)
from memagent_graph.converters import Parts, SourceFile

_SKIPPED_TAGS: Final = frozenset(
    ("del", "moveFrom", "instrText", "delText", "rPr", "pPr", "Fallback", "sdtPr", "sectPr")
)
_MARK_TAGS: Final = {"b": "b", "i": "i", "strike": "s", "dstrike": "s"}
_FALSE_VALUES: Final = frozenset(("0", "false", "none", "off"))
_DINGBATS: Final = {
    "6F": "☐", "70": "☐", "71": "☐", "72": "☐", "78": "☒", "A3": "☐", "A8": "☐", "FB": "✗", "FC": "✓", "FD": "☒",
    "FE": "☑", "6C": "●", "A7": "▪", "E0": "→", "D8": "➢",
}  # fmt: skip
_SYMBOLS: Final = dict(
    zip(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ£¥®°±³´·¹»Öåò",
        "αβχδεφγηιϕκλμνοπθρστυϖωξψζΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ≤∞→°±≥×•≠≈√∑∫",
        strict=True,
    )
)
"""The characters that the font Symbol shows instead of letters."""
_SYMBOL_CODE: Final = re.compile(r"(?!D[89A-F]..$)[0-9A-F]{1,5}", re.IGNORECASE)
"""The code of a character that is not a surrogate."""
_SYMBOL_LETTERS: Final = re.compile("[\uf020-\uf0ff]")
_BODY_TEXT_LEVEL: Final = 9
"""The outline level of paragraphs that are no headings."""
_LEVEL_PLACEHOLDER: Final = re.compile(r"%([1-9])")


def convert(source: SourceFile) -> Parts:
    """Convert a Word file."""
    document = _WordDocument(XMLArchive(source))
    yield from iter_markdown(document.to_html())
    yield from list_omissions(document.omission_counts)
    archive = document.archive
    for name in sorted(archive.names):
        if name.startswith("word/embeddings/"):
            yield from source.convert_embedded(name.rpartition("/")[2], archive.read(name))


class _WordDocument:
    """Converts a Word file to HTML, and counts the parts that it leaves out."""

    def __init__(self, archive: XMLArchive) -> None:
        self.archive = archive
        self.omission_counts: Counter[str] = Counter()
        self._relationships: dict[str, tuple[str, str]] = {}
        """The relationships of the current part: the text, a header, a footer or the notes of a kind."""
        self._document = archive.find_member("word/document.xml")
        self._document_relationships = archive.read_relationships(self._document)
        self._styles = _Styles(archive.read_xml(archive.find_member("word/styles.xml", "styles", self._document)))
        numbering = archive.read_xml(archive.find_member("word/numbering.xml", "numbering", self._document))
        self._list_numbers = _ListNumbers(numbering, self._styles)
        self._text_boxes: list[str] = []
        """The text boxes of the current paragraph, as HTML."""

    def to_html(self) -> str:
        """Return the document with its headers, notes and footers as HTML."""
        root = self.archive.read_required_xml(self._document)
        header, footer = self._format_headers("header"), self._format_headers("footer")
        self._relationships = self._document_relationships
        text = "".join(self._iter_blocks(find_child(root, "body")))
        notes = "".join(
            self._format_notes(self.archive.find_member(f"word/{name}.xml", name, self._document), prefix)
            for name, prefix in (("footnotes", ""), ("endnotes", "e"), ("comments", "c"))
        )
        return f"{header}{text}{notes}{footer}"

    def _format_headers(self, kind: str) -> str:
        """Return the headers or footers, each text once."""
        texts: dict[str, None] = {}
        for relationship_type, target in self._document_relationships.values():
            if relationship_type == kind:
                self._relationships = self.archive.read_relationships(target)
                texts["".join(self._iter_blocks(self.archive.read_xml(target)))] = None
        return "".join(text for text in texts if re.search(r"[^\W\d_]{2}", re.sub(r"<[^>]*>", "", text)))

    def _format_notes(self, member: str, prefix: str) -> str:
        notes = []
        self._relationships = self.archive.read_relationships(member)
        for note in self.archive.read_xml(member):
            if get_attribute(note, "type") not in {"separator", "continuationSeparator", "continuationNotice"}:
                author = f" {get_attribute(note, 'author')}:" if prefix == "c" else ""
                text = re.sub(r"</?p>", " ", "".join(self._iter_blocks(note)))
                notes.append(f"<p>[^{prefix}{get_attribute(note, 'id')}]:{escape(author)} {text}</p>")
        return "".join(notes)

    def _iter_blocks(self, parent: Element | None) -> Iterator[str]:
        for element in iter_children(parent):
            match get_local_name(element):
                case "p":
                    yield self._format_paragraph(element)
                case "tbl":
                    yield self._format_table(element)
                case "altChunk":
                    self.omission_counts["imported parts"] += 1
                case name if name not in _SKIPPED_TAGS:
                    yield from self._iter_blocks(element)

    def _format_paragraph(self, element: Element) -> str:
        outer_text_boxes, self._text_boxes = self._text_boxes, []
        runs = "".join(
            "".join(f"<{tag}>" for tag in tags)
            + "".join(text for _, text in group)
            + "".join(f"</{tag}>" for tag in tags[::-1])
            for tags, group in groupby(self._iter_runs(element), key=lambda run: run[0])
        )
        text_boxes, self._text_boxes = "".join(self._text_boxes), outer_text_boxes
        properties = find_child(element, "pPr")
        style = _get_child_value(properties, "pStyle")
        label, level = self._list_numbers.compute_label(properties, style)
        heading_level = self._styles.get_heading_level(style, properties)
        if heading_level and runs.strip():
            return f"<h{heading_level}>{escape(label + ' ' if label else '')}{runs}</h{heading_level}>{text_boxes}"
        if label:
            return f'<li marker="{escape(label)}" level="{level}">{runs}</li>{text_boxes}'
        return f"<p>{runs}</p>{text_boxes}"

    def _iter_runs(self, parent: Element) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the pieces of a paragraph, each with the HTML elements that it is in."""
        for element in parent:
            name = get_local_name(element)
            match name:
                case "r":
                    tags_of_run = self._get_mark_tags(find_child(element, "rPr"))
                    for text in self._iter_run_texts(element):
                        yield tags_of_run, text
                case "hyperlink":
                    _, target = self._relationships.get(get_attribute(element, "id"), ("", ""))
                    text = "".join(piece for _, piece in self._iter_runs(element))
                    yield (), f'<a href="{escape(target)}">{text}</a>' if target else text
                case "oMath" | "oMathPara":
                    yield (), " ".join(map(format_formula, iter_descendants(element, "oMath")))
                case "sdt":
                    checkbox = next(iter_descendants(element, "checkbox"), None)
                    if checkbox is not None and find_child(element, "sdtPr", "checkbox") is checkbox:
                        yield (), "☒" if _get_child_value(checkbox, "checked", "0") not in _FALSE_VALUES else "☐"
                    else:
                        yield from self._iter_runs(element)
                case _ if name not in _SKIPPED_TAGS:
                    yield from self._iter_runs(element)

    def _get_mark_tags(self, properties: Element | None) -> tuple[str, ...]:
        tags = []
        for element in iter_children(properties):
            name, value = get_local_name(element), get_attribute(element, "val")
            if name in _MARK_TAGS and value not in _FALSE_VALUES:
                tags.append(_MARK_TAGS[name])
            elif name == "vertAlign" and value in {"superscript", "subscript"}:
                tags.append(value[:3])
        return tuple(sorted(set(tags)))

    def _iter_run_texts(self, run: Element) -> Iterator[str]:
        for element in run:
            match get_local_name(element):
                case "t":
                    yield escape(self._map_letters(element.text or "", run))
                case "tab" | "ptab":
                    yield " "
                case "br" | "cr":
                    yield "<br>"
                case "ruby":
                    base, reading = (
                        "".join(text for part in iter_children(element, name) for _, text in self._iter_runs(part))
                        for name in ("rubyBase", "rt")
                    )
                    yield f"<ruby>{base}<rt>{reading}</rt></ruby>"
                case "noBreakHyphen":
                    yield "-"
                case "sym":
                    yield self._map_symbol(get_attribute(element, "font"), get_attribute(element, "char").upper())
                case "footnoteReference" | "endnoteReference" | "commentReference" as kind:
                    prefix = {"f": "", "e": "e", "c": "c"}[kind[0]]
                    yield f"[^{prefix}{get_attribute(element, 'id')}]"
                case "fldChar":
                    yield self._format_field(element)
                case "AlternateContent":
                    choice = find_child(element, "Choice")
                    yield from self._iter_run_texts(element if choice is None else choice)
                case "drawing" | "pict" | "object":
                    yield self._format_drawing(element)

    def _map_letters(self, text: str, run: Element) -> str:
        """Return a run's text, with symbols for the letters of a symbol font."""
        if not _SYMBOL_LETTERS.search(text):
            return text
        font = get_attribute(find_child(run, "rPr", "rFonts"), "ascii")
        return _SYMBOL_LETTERS.sub(lambda match: self._map_symbol(font, f"{ord(match[0]):X}"), text)

    def _map_symbol(self, font: str, code: str) -> str:
        character = None
        if _SYMBOL_CODE.fullmatch(code):
            if font == "Symbol":
                character = _SYMBOLS.get(chr(int(code[-2:], 16)))
            elif code.startswith("F0") or "dings" in font:  # other fonts show the character of the code
                character = _DINGBATS.get(code[-2:])
            if character is None and not code.startswith("F0"):
                character = chr(int(code, 16))
        if character is None:
            self.omission_counts["symbols whose characters are not known"] += 1
        return character or ""

    def _format_field(self, element: Element) -> str:
        """Return the value of a legacy form field without text: a check box or a choice."""
        data = find_child(element, "ffData")
        checkbox, drop_down = find_child(data, "checkBox"), find_child(data, "ddList")
        if checkbox is not None:
            state = find_child(checkbox, "checked")
            state = find_child(checkbox, "default") if state is None else state
            return "☒" if state is not None and get_attribute(state, "val", "1") not in _FALSE_VALUES else "☐"
        if drop_down is not None:
            entries = [get_attribute(node, "val") for node in iter_children(drop_down, "listEntry")]
            return escape("".join(entries[get_int_attribute(find_child(drop_down, "result"), "val", 0) :][:1]))
        return ""

    def _format_drawing(self, element: Element) -> str:
        """Return the descriptions of pictures; text boxes among them come after the paragraph."""
        descriptions = []
        picture_count = 0
        for node in _iter_drawing(element):
            match get_local_name(node):
                case "docPr" | "shape" if text := (get_attribute(node, "descr") or get_attribute(node, "alt")).strip():
                    descriptions.append(f"![{escape(text)}]")
                case "blip" | "imagedata" if get_local_name(element) != "object":
                    picture_count += 1
                case "decorative" if get_attribute(node, "val") not in _FALSE_VALUES:
                    picture_count -= 1
                case "txbxContent":
                    self._text_boxes += self._iter_blocks(node)
                case "textpath":
                    descriptions.append(escape(get_attribute(node, "string")))
                case "chart":
                    self.omission_counts["charts"] += 1
                case "relIds":
                    self.omission_counts["diagrams"] += 1
        if picture_count > 0 and not descriptions:
            self.omission_counts[UNDESCRIBED_PICTURES] += picture_count
        return " ".join(descriptions)

    def _format_table(self, table: Element) -> str:
        rows: list[list[list[Any]]] = []
        cells_above: dict[int, list[Any]] = {}
        """The last cell that began in each column."""
        for row in iter_table_parts(table, "tr"):
            properties = find_child(row, "trPr")
            if find_child(properties, "del") is not None:
                continue
            column = get_int_attribute(find_child(properties, "gridBefore"), "val", 0)
            cells: list[list[Any]] = [["", column, 1]] if column else []
            for cell in iter_table_parts(row, "tc"):
                span = max(1, get_int_attribute(find_child(cell, "tcPr", "gridSpan"), "val", 1))
                merge = find_child(cell, "tcPr", "vMerge")
                if merge is not None and get_attribute(merge, "val") != "restart" and column in cells_above:
                    cells_above[column][2] += 1
                else:
                    cells_above[column] = ["".join(self._iter_blocks(cell)), span, 1]
                    cells.append(cells_above[column])
                column += span
            rows.append(cells)
        return make_html_table(rows)


def _iter_drawing(parent: Element) -> Iterator[Element]:
    """Yield the elements of a drawing, except the contents of text boxes and the fallbacks for older programs."""
    for element in parent:
        if get_local_name(element) != "Fallback":
            yield element
            if get_local_name(element) != "txbxContent":
                yield from _iter_drawing(element)


def _get_child_value(element: Element | None, name: str, default: str = "") -> str:
    """Return the attribute `val` of a child element."""
    return get_attribute(find_child(element, name), "val", default)


class _Styles:
    """Paragraph styles, some of which make headings or number their paragraphs."""

    def __init__(self, root: Element) -> None:
        self._styles = {get_attribute(node, "styleId"): node for node in root}

    def iter_chain(self, style: str) -> Iterator[Element]:
        """Yield a style, then the styles that it is based on."""
        visited_styles: set[str] = set()
        while style in self._styles and style not in visited_styles:
            visited_styles.add(style)
            yield self._styles[style]
            style = _get_child_value(self._styles[style], "basedOn")

    def get_heading_level(self, style: str, properties: Element | None) -> int:
        """Return the level of a paragraph's heading, from 1 to 6; 0 for other paragraphs."""
        levels = [find_child(properties, "outlineLvl")]
        for node in self.iter_chain(style):
            name = _get_child_value(node, "name").lower()
            if match := re.fullmatch(r"heading ([1-9])", name):
                return min(int(match[1]), 6)
            if name == "title":
                return 1
            levels.append(find_child(node, "pPr", "outlineLvl"))
        level = next(
            (get_int_attribute(node, "val", _BODY_TEXT_LEVEL) for node in levels if node is not None), _BODY_TEXT_LEVEL
        )
        if (
            level == _BODY_TEXT_LEVEL
            and style not in self._styles
            and (match := re.fullmatch(r"Heading([1-9])", style))
        ):
            return min(int(match[1]), 6)
        return min(level + 1, 6) if level < _BODY_TEXT_LEVEL else 0


class _ListNumbers:
    """Computes the numbers that Word shows for headings and list items, in the document's order."""

    def __init__(self, root: Element, styles: _Styles) -> None:
        self._styles = styles
        self._lists: dict[str, tuple[str, dict[int, Element], dict[int, int]]] = {}
        """The definition, the levels and their start numbers, by list id."""
        self._last_numbers: dict[str, dict[int, int]] = {}
        """The last number at each level, by list definition."""
        self._restarted_lists: set[str] = set()
        levels_by_definition: dict[str, dict[int, Element]] = {}
        definitions = [*iter_children(root, "abstractNum")]
        definitions_by_style = {_get_child_value(node, "styleLink"): node for node in definitions}
        for node in definitions:
            style = _get_child_value(node, "numStyleLink")  # the levels are in the definition of this list style
            defining_node = definitions_by_style.get(style, node) if style else node
            levels = {get_int_attribute(level, "ilvl", 0): level for level in iter_children(defining_node, "lvl")}
            levels_by_definition[get_attribute(node, "abstractNumId")] = levels
        for node in iter_children(root, "num"):
            definition_id = _get_child_value(node, "abstractNumId")
            levels_of_list, start_numbers = dict(levels_by_definition.get(definition_id, {})), dict[int, int]()
            for override in iter_children(node, "lvlOverride"):
                level = get_int_attribute(override, "ilvl", 0)
                if (start := find_child(override, "startOverride")) is not None:
                    start_numbers[level] = get_int_attribute(start, "val", 1)
                if (level_definition := find_child(override, "lvl")) is not None:
                    levels_of_list[level] = level_definition
            self._lists[get_attribute(node, "numId")] = definition_id, levels_of_list, start_numbers

    def compute_label(self, properties: Element | None, style: str) -> tuple[str, int]:
        """Return a paragraph's number as Word shows it, or "-" for a bullet, and its level; "" for other paragraphs."""
        style_numberings = (find_child(node, "pPr", "numPr") for node in self._styles.iter_chain(style))
        numberings = [find_child(properties, "numPr"), *style_numberings]
        list_id = next(filter(None, (_get_child_value(node, "numId") for node in numberings)), "")
        if list_id not in self._lists:
            return "", 0
        definition_id, levels, start_numbers = self._lists[list_id]
        level_text = next(filter(None, (_get_child_value(node, "ilvl") for node in numberings)), "")
        if level_text.isdecimal():
            level = int(level_text)
        else:  # a level may name the style that uses it
            level = next(
                (list_level for list_level, node in levels.items() if _get_child_value(node, "pStyle") == style), 0
            )
        if level not in levels:
            return "-", level
        last_numbers = self._last_numbers.setdefault(definition_id, {})
        if list_id not in self._restarted_lists:
            self._restarted_lists.add(list_id)
            for other_level in start_numbers:
                last_numbers.pop(other_level, None)
        for deeper_level in [other_level for other_level in last_numbers if other_level > level]:
            del last_numbers[deeper_level]
        for other_level in range(level + 1):
            start = find_child(levels.get(other_level), "start")
            first_number = start_numbers.get(other_level, get_int_attribute(start, "val", 1))
            last_numbers[other_level] = (
                last_numbers.get(other_level, first_number - 1) + 1
                if other_level == level
                else last_numbers.get(other_level, first_number)
            )
        level_element = levels[level]
        if _get_child_value(level_element, "numFmt", "decimal") == "bullet":
            return "-", level
        is_decimal = find_child(level_element, "isLgl") is not None

        def format_level(match: re.Match[str]) -> str:
            other_level = int(match[1]) - 1
            number_style = "decimal" if is_decimal else _get_child_value(levels.get(other_level), "numFmt", "decimal")
            return format_number(last_numbers.get(other_level, 1), number_style)

        return _LEVEL_PLACEHOLDER.sub(format_level, _get_child_value(level_element, "lvlText")).strip(), level
