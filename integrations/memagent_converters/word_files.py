"""Word files (.docx): numbered headings and lists, notes, forms, formulas, tracked changes.

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

from memagent_converters.html_to_markdown import PICTURES, format_number, iter_markdown, list_omissions
from memagent_converters.xml_archives import (
    XmlArchive,
    find_child,
    format_formula,
    get_attribute,
    get_int,
    iter_descendants,
    local_name,
    make_html_table,
)
from memagent_graph.converters import Parts, SourceFile

_MAIN: Final = "word/document.xml"
_SKIPPED_TAGS: Final = frozenset(
    ("del", "moveFrom", "instrText", "delText", "rPr", "pPr", "Fallback", "sdtPr", "sectPr")
)
_MARKS: Final = {"b": "b", "i": "i", "strike": "s", "dstrike": "s"}
_OFF: Final = frozenset(("0", "false", "none", "off"))
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
"""The characters that the font Symbol shows for letters."""
_SYMBOL_LETTERS: Final = re.compile("[\uf020-\uf0ff]")
_LEVEL: Final = re.compile(r"%([1-9])")


def convert(source: SourceFile) -> Parts:
    """Convert a Word file."""
    document = _WordDocument(XmlArchive(source.name, source.file))
    yield from iter_markdown(document.to_html())
    yield from list_omissions(document.omission_counts)
    archive = document.archive
    for name in sorted(archive.names):
        if name.startswith("word/embeddings/"):
            yield from source.embedded(name.rpartition("/")[2], archive.read(name))


class _WordDocument:
    """Converts a Word file to HTML, and counts the parts that it leaves out."""

    def __init__(self, archive: XmlArchive) -> None:
        self.archive = archive
        self.omission_counts: Counter[str] = Counter()
        self._relations = archive.read_relations(_MAIN)
        self._styles = _Styles(archive.read_xml("word/styles.xml"))
        self._numbers = _ListNumbers(archive.read_xml("word/numbering.xml"), self._styles)
        self._text_boxes: list[str] = []
        """The text boxes of the current paragraph, as HTML."""
        self._field: list[Element] = []
        """The `ffData` of the open fields."""

    def to_html(self) -> str:
        """Return the whole document."""
        root = self.archive.read_required_xml(_MAIN)
        body = find_child(root, "body")
        header, footer = self._format_headers("header"), self._format_headers("footer")
        text = "".join(self._iter_blocks(body)) if body is not None else ""
        notes = "".join(
            self._format_notes(f"word/{name}.xml", mark)
            for name, mark in (("footnotes", ""), ("endnotes", "e"), ("comments", "c"))
        )
        return f"{header}{text}{notes}{footer}"

    def _format_headers(self, kind: str) -> str:
        """Return the headers or footers, each text once."""
        texts: dict[str, None] = {}
        for type_, target in self._relations.values():
            root = self.archive.read_xml(target) if type_ == kind else None
            if root is not None:
                texts["".join(self._iter_blocks(root))] = None
        return "".join(text for text in texts if re.search(r"[^\W\d_]{2}", re.sub(r"<[^>]*>", "", text)))

    def _format_notes(self, member: str, mark: str) -> str:
        root = self.archive.read_xml(member)
        notes = []
        for note in root if root is not None else ():
            if get_attribute(note, "type") not in {"separator", "continuationSeparator", "continuationNotice"}:
                author = f" {get_attribute(note, 'author')}:" if mark == "c" else ""
                text = re.sub(r"</?p>", " ", "".join(self._iter_blocks(note)))
                notes.append(f"<p>[^{mark}{get_attribute(note, 'id')}]:{escape(author)} {text}</p>")
        return "".join(notes)

    def _iter_blocks(self, parent: Element) -> Iterator[str]:
        for element in parent:
            match local_name(element):
                case "p":
                    yield self._format_paragraph(element)
                case "tbl":
                    yield self._format_table(element)
                case "altChunk":
                    self.omission_counts["imported parts"] += 1
                case name if name not in _SKIPPED_TAGS:
                    yield from self._iter_blocks(element)

    def _format_paragraph(self, element: Element) -> str:
        outer, self._text_boxes = self._text_boxes, []
        runs = "".join(
            "".join(f"<{tag}>" for tag in tags)
            + "".join(text for _, text in same)
            + "".join(f"</{tag}>" for tag in tags[::-1])
            for tags, same in groupby(self._iter_runs(element), key=lambda run: run[0])
        )
        boxes, self._text_boxes = "".join(self._text_boxes), outer
        properties = find_child(element, "pPr")
        style = _get_child_value(properties, "pStyle")
        label, level = self._numbers.compute_label(properties, style)
        heading = self._styles.get_heading_level(style, properties)
        if heading and runs.strip():
            return f"<h{heading}>{escape(label + ' ' if label else '')}{runs}</h{heading}>{boxes}"
        if label:
            return f'<li marker="{escape(label)}" level="{level}">{runs}</li>{boxes}'
        return f"<p>{runs}</p>{boxes}"

    def _iter_runs(self, parent: Element) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the pieces of a paragraph, each with the HTML elements that it is in."""
        for element in parent:
            name = local_name(element)
            match name:
                case "r":
                    tags_of_run = self._get_tags(find_child(element, "rPr"))
                    for text in self._iter_run(element):
                        yield tags_of_run, text
                case "hyperlink":
                    _, target = self._relations.get(get_attribute(element, "id"), ("", ""))
                    text = "".join(piece for _, piece in self._iter_runs(element))
                    yield (), f'<a href="{escape(target)}">{text}</a>' if target else text
                case "oMath" | "oMathPara":
                    yield (), " ".join(map(format_formula, iter_descendants(element, "oMath")))
                case "sdt":
                    box = next(iter_descendants(element, "checkbox"), None)
                    if box is not None and find_child(element, "sdtPr", "checkbox") is box:
                        yield (), "☒" if _get_child_value(box, "checked", "0") not in _OFF else "☐"
                    else:
                        yield from self._iter_runs(element)
                case _ if name not in _SKIPPED_TAGS:
                    yield from self._iter_runs(element)

    def _get_tags(self, properties: Element | None) -> tuple[str, ...]:
        tags = []
        for element in properties if properties is not None else ():
            name, value = local_name(element), get_attribute(element, "val")
            if name in _MARKS and value not in _OFF:
                tags.append(_MARKS[name])
            elif name == "vertAlign" and value in {"superscript", "subscript"}:
                tags.append(value[:3])
        return tuple(sorted(set(tags)))

    def _iter_run(self, run: Element) -> Iterator[str]:
        for element in run:
            match local_name(element):
                case "t":
                    yield escape(self._map_letters(element.text or "", run))
                case "tab" | "ptab":
                    yield " "
                case "br" | "cr":
                    yield "<br>"
                case "noBreakHyphen":
                    yield "-"
                case "sym":
                    yield self._map_symbol(get_attribute(element, "font"), get_attribute(element, "char").upper())
                case "footnoteReference" | "endnoteReference" | "commentReference" as kind:
                    mark = {"f": "", "e": "e", "c": "c"}[kind[0]]
                    yield f"[^{mark}{get_attribute(element, 'id')}]"
                case "fldChar":
                    yield self._format_field(element)
                case "AlternateContent":
                    choice = find_child(element, "Choice")
                    yield from self._iter_run(element if choice is None else choice)
                case "drawing" | "pict" | "object":
                    yield self._format_drawing(element)

    def _map_letters(self, text: str, run: Element) -> str:
        """Return a run's text, with symbols for the letters of a symbol font."""
        if not _SYMBOL_LETTERS.search(text):
            return text
        font = get_attribute(find_child(run, "rPr", "rFonts"), "ascii")
        return _SYMBOL_LETTERS.sub(lambda match: self._map_symbol(font, f"{ord(match[0]):X}"), text)

    def _map_symbol(self, font: str, code: str) -> str:
        mark = _SYMBOLS.get(chr(int(code[-2:], 16))) if font == "Symbol" and code else _DINGBATS.get(code[-2:])
        if mark is None and code and not code.startswith("F0"):
            mark = chr(int(code, 16))
        if mark is None:
            self.omission_counts["symbols whose characters are not known"] += 1
        return mark or ""

    def _format_field(self, element: Element) -> str:
        """Return the value of a legacy form field without text: a check box or a choice."""
        data = find_child(element, "ffData")
        box, choice = find_child(data, "checkBox"), find_child(data, "ddList")
        if box is not None:
            state = find_child(box, "checked")
            state = find_child(box, "default") if state is None else state
            return "☒" if state is not None and get_attribute(state, "val", "1") not in _OFF else "☐"
        if choice is not None:
            entries = [get_attribute(node, "val") for node in choice if local_name(node) == "listEntry"]
            return escape("".join(entries[get_int(find_child(choice, "result"), 0) :][:1]))
        return ""

    def _format_drawing(self, element: Element) -> str:
        """Return the descriptions of pictures; text boxes among them come after the paragraph."""
        descriptions = []
        pictures = 0
        for node in _iter_drawing(element):
            match local_name(node):
                case "docPr" | "shape" if text := (get_attribute(node, "descr") or get_attribute(node, "alt")).strip():
                    descriptions.append(f"![{escape(text)}]")
                case "blip" | "imagedata" if local_name(element) != "object":
                    pictures += 1
                case "decorative" if get_attribute(node, "val") not in _OFF:
                    pictures -= 1
                case "txbxContent":
                    self._text_boxes += self._iter_blocks(node)
                case "textpath":
                    descriptions.append(escape(get_attribute(node, "string")))
                case "chart":
                    self.omission_counts["charts"] += 1
                case "relIds":
                    self.omission_counts["diagrams"] += 1
        if pictures > 0 and not descriptions:
            self.omission_counts[PICTURES] += pictures
        return " ".join(descriptions)

    def _format_table(self, table: Element) -> str:
        rows: list[list[list[Any]]] = []
        above: dict[int, list[Any]] = {}
        """The last cell that began in each column."""
        for row in _iter_members(table, "tr"):
            properties = find_child(row, "trPr")
            if find_child(properties, "del") is not None:
                continue
            column = get_int(find_child(properties, "gridBefore"), 0)
            cells: list[list[Any]] = [["", column, 1]] if column else []
            for cell in _iter_members(row, "tc"):
                span = max(1, get_int(find_child(cell, "tcPr", "gridSpan"), 1))
                merge = find_child(cell, "tcPr", "vMerge")
                if merge is not None and get_attribute(merge, "val") != "restart" and column in above:
                    above[column][2] += 1
                else:
                    above[column] = ["".join(self._iter_blocks(cell)), span, 1]
                    cells.append(above[column])
                column += span
            rows.append(cells)
        return make_html_table(rows)


def _iter_drawing(parent: Element) -> Iterator[Element]:
    """Yield the elements of a drawing, except the contents of text boxes and the fallbacks for older programs."""
    for element in parent:
        if local_name(element) != "Fallback":
            yield element
            if local_name(element) != "txbxContent":
                yield from _iter_drawing(element)


def _iter_members(parent: Element, name: str) -> Iterator[Element]:
    """Yield the rows of a table or the cells of a row, including inserted ones and those in content controls."""
    for element in parent:
        if local_name(element) == name:
            yield element
        elif local_name(element) in {"sdt", "sdtContent", "ins", "customXml"}:
            yield from _iter_members(element, name)


def _get_child_value(element: Element | None, name: str, default: str = "") -> str:
    """Return the attribute `val` of a child element."""
    return get_attribute(find_child(element, name), "val", default)


class _Styles:
    """Paragraph styles, some of which make headings or number their paragraphs."""

    def __init__(self, root: Element | None) -> None:
        self._styles = {get_attribute(node, "styleId"): node for node in (root if root is not None else ())}

    def iter_chain(self, style: str) -> Iterator[Element]:
        """Yield a style, then the styles that it is based on."""
        visited: set[str] = set()
        while style in self._styles and style not in visited:
            visited.add(style)
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
        level = next((get_int(node, 9) for node in levels if node is not None), 9)
        if level == 9 and style not in self._styles and (match := re.fullmatch(r"Heading([1-9])", style)):
            return min(int(match[1]), 6)
        return min(level + 1, 6) if level < 9 else 0


class _ListNumbers:
    """Computes the numbers that Word shows for headings and list items, in the document's order."""

    def __init__(self, root: Element | None, styles: _Styles) -> None:
        self._styles = styles
        self._lists: dict[str, tuple[str, dict[int, Element], dict[int, int]]] = {}
        """The definition, the levels and their start numbers, by list id."""
        self._counts: dict[str, dict[int, int]] = {}
        """The last number of each level, by definition."""
        self._restarted: set[str] = set()
        levels: dict[str, dict[int, Element]] = {}
        for node in root if root is not None else ():
            if local_name(node) == "abstractNum":
                levels[get_attribute(node, "abstractNumId")] = {
                    int(get_attribute(level, "ilvl", "0")): level for level in node if local_name(level) == "lvl"
                }
        for node in root if root is not None else ():
            if local_name(node) == "num":
                definition = _get_child_value(node, "abstractNumId")
                levels_of_list, starts = dict(levels.get(definition, {})), dict[int, int]()
                for override in (part for part in node if local_name(part) == "lvlOverride"):
                    level = int(get_attribute(override, "ilvl", "0"))
                    if (start := find_child(override, "startOverride")) is not None:
                        starts[level] = get_int(start, 1)
                    if (changed := find_child(override, "lvl")) is not None:
                        levels_of_list[level] = changed
                self._lists[get_attribute(node, "numId")] = definition, levels_of_list, starts

    def compute_label(self, properties: Element | None, style: str) -> tuple[str, int]:
        """Return a paragraph's number as Word shows it, or "-" for a bullet, and its level; "" for other paragraphs."""
        of_styles = (find_child(node, "pPr", "numPr") for node in self._styles.iter_chain(style))
        numberings = [find_child(properties, "numPr"), *of_styles]
        list_id = next(filter(None, (_get_child_value(node, "numId") for node in numberings)), "")
        if list_id not in self._lists:
            return "", 0
        definition, levels, starts = self._lists[list_id]
        if value := next(filter(None, (_get_child_value(node, "ilvl") for node in numberings)), ""):
            level = int(value)
        else:  # a level may name the style that has it
            level = next((number for number, node in levels.items() if _get_child_value(node, "pStyle") == style), 0)
        if level not in levels:
            return "-", level
        counts = self._counts.setdefault(definition, {})
        if list_id not in self._restarted:
            self._restarted.add(list_id)
            for other in starts:
                counts.pop(other, None)
        for deeper in [other for other in counts if other > level]:
            del counts[deeper]
        for other in range(level + 1):
            first = starts.get(other, get_int(find_child(levels.get(other), "start"), 1))
            counts[other] = counts.get(other, first - 1) + 1 if other == level else counts.get(other, first)
        form = levels[level]
        if _get_child_value(form, "numFmt", "decimal") == "bullet":
            return "-", level
        plain = find_child(form, "isLgl") is not None

        def format_level(match: re.Match[str]) -> str:
            other = int(match[1]) - 1
            style = "decimal" if plain else _get_child_value(levels.get(other), "numFmt", "decimal")
            return format_number(counts.get(other, 1), style)

        return _LEVEL.sub(format_level, _get_child_value(form, "lvlText")).strip(), level
