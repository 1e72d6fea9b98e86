"""Word files (.docx): numbered headings and lists, notes, forms, formulas, tracked changes.

Insertions are kept, deletions are dropped. Each header and footer appears once. Notes and comments are at the end, with
a mark like [^1] at their place in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final
from xml.etree.ElementTree import Element

from memagent_converters.html_to_markdown import PICTURES, blocks, numeral, omissions
from memagent_converters.xml_archives import (
    XmlArchive,
    attribute,
    child,
    descendants,
    formula,
    html_table,
    local,
    number,
    quoted,
)
from memagent_graph.converters import Parts, SourceFile

_MAIN: Final = "word/document.xml"
_UNREAD: Final = frozenset(("del", "moveFrom", "instrText", "delText", "rPr", "pPr", "Fallback", "sdtPr", "sectPr"))
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
_OF_SYMBOLS: Final = re.compile("[\uf020-\uf0ff]")
_LEVEL: Final = re.compile(r"%([1-9])")


def convert(source: SourceFile) -> Parts:
    """Convert a Word file."""
    document = _WordDocument(XmlArchive(source.name, source.file))
    yield from blocks(document.html())
    yield from omissions(document.lost)
    archive = document.archive
    for name in sorted(archive.names):
        if name.startswith("word/embeddings/"):
            yield from source.embedded(name.rpartition("/")[2], archive.read(name))


class _WordDocument:
    """A Word file's parts, and what was lost on the way to HTML."""

    def __init__(self, archive: XmlArchive) -> None:
        self.archive = archive
        self.lost: Counter[str] = Counter()
        self._relations = archive.relations(_MAIN)
        self._styles = _Styles(archive.xml("word/styles.xml"))
        self._numbers = _ListNumbers(archive.xml("word/numbering.xml"), self._styles)
        self._boxes: list[str] = []
        """Text boxes of the paragraph that is converted."""
        self._field: list[Element] = []
        """The fields that are open: their `ffData`."""

    def html(self) -> str:
        """Return the whole document."""
        root = self.archive.required(_MAIN)
        body = child(root, "body")
        around = {kind: self._around(kind) for kind in ("header", "footer")}
        text = "".join(self._blocks(body)) if body is not None else ""
        notes = "".join(
            self._notes(f"word/{name}.xml", mark)
            for name, mark in (("footnotes", ""), ("endnotes", "e"), ("comments", "c"))
        )
        return f"{around['header']}{text}{notes}{around['footer']}"

    def _around(self, kind: str) -> str:
        """Return the headers or footers, each text once."""
        texts: dict[str, None] = {}
        for type_, target in self._relations.values():
            root = self.archive.xml(target) if type_ == kind else None
            if root is not None:
                texts["".join(self._blocks(root))] = None
        return "".join(text for text in texts if re.search(r"[^\W\d_]{2}", re.sub(r"<[^>]*>", "", text)))

    def _notes(self, member: str, mark: str) -> str:
        root = self.archive.xml(member)
        notes = []
        for note in root if root is not None else ():
            if attribute(note, "type") not in {"separator", "continuationSeparator", "continuationNotice"}:
                author = f" {attribute(note, 'author')}:" if mark == "c" else ""
                text = re.sub(r"</?p>", " ", "".join(self._blocks(note)))
                notes.append(f"<p>[^{mark}{attribute(note, 'id')}]:{quoted(author)} {text}</p>")
        return "".join(notes)

    def _blocks(self, parent: Element) -> Iterator[str]:
        for element in parent:
            match local(element):
                case "p":
                    yield self._paragraph(element)
                case "tbl":
                    yield self._table(element)
                case "altChunk":
                    self.lost["imported parts"] += 1
                case name if name not in _UNREAD:
                    yield from self._blocks(element)

    def _paragraph(self, element: Element) -> str:
        outer, self._boxes = self._boxes, []
        runs = "".join(
            "".join(f"<{tag}>" for tag in tags)
            + "".join(text for _, text in same)
            + "".join(f"</{tag}>" for tag in tags[::-1])
            for tags, same in groupby(self._runs(element), key=lambda run: run[0])
        )
        boxes, self._boxes = "".join(self._boxes), outer
        properties = child(element, "pPr")
        style = attribute(child(properties, "pStyle"), "val")
        label, level = self._numbers.label(properties, style)
        heading = self._styles.heading(style, properties)
        if heading and runs.strip():
            return f"<h{heading}>{quoted(label + ' ' if label else '')}{runs}</h{heading}>{boxes}"
        if label:
            return f'<li marker="{quoted(label)}" level="{level}">{runs}</li>{boxes}'
        return f"<p>{runs}</p>{boxes}"

    def _runs(self, parent: Element, tags: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the pieces of a paragraph, each with the HTML elements that it is in."""
        for element in parent:
            name = local(element)
            match name:
                case "r":
                    tags_of_run = self._tags(child(element, "rPr"))
                    for text in self._run(element):
                        yield tags_of_run, text
                case "hyperlink":
                    _, target = self._relations.get(attribute(element, "id"), ("", ""))
                    text = "".join(piece for _, piece in self._runs(element))
                    yield (), f'<a href="{quoted(target)}">{text}</a>' if target else text
                case "oMath" | "oMathPara":
                    yield (), " ".join(map(formula, descendants(element, "oMath")))
                case "sdt":
                    box = next(descendants(element, "checkbox"), None)
                    if box is not None and child(element, "sdtPr", "checkbox") is box:
                        yield (), "☒" if attribute(child(box, "checked"), "val", "0") not in _OFF else "☐"
                    else:
                        yield from self._runs(element)
                case _ if name not in _UNREAD:
                    yield from self._runs(element)

    def _tags(self, properties: Element | None) -> tuple[str, ...]:
        tags = []
        for element in properties if properties is not None else ():
            name, value = local(element), attribute(element, "val")
            if name in _MARKS and value not in _OFF:
                tags.append(_MARKS[name])
            elif name == "vertAlign" and value in {"superscript", "subscript"}:
                tags.append(value[:3])
        return tuple(sorted(set(tags)))

    def _run(self, run: Element) -> Iterator[str]:
        for element in run:
            match local(element):
                case "t":
                    yield quoted(self._letters(element.text or "", run))
                case "tab" | "ptab":
                    yield " "
                case "br" | "cr":
                    yield "<br>"
                case "noBreakHyphen":
                    yield "-"
                case "sym":
                    yield self._symbol(attribute(element, "font"), attribute(element, "char").upper())
                case "footnoteReference" | "endnoteReference" | "commentReference" as kind:
                    mark = {"f": "", "e": "e", "c": "c"}[kind[0]]
                    yield f"[^{mark}{attribute(element, 'id')}]"
                case "fldChar":
                    yield self._form_field(element)
                case "AlternateContent":
                    choice = child(element, "Choice")
                    yield from self._run(element if choice is None else choice)
                case "drawing" | "pict" | "object":
                    yield self._drawing(element)

    def _letters(self, text: str, run: Element) -> str:
        """Return a run's text, in which letters of a symbols' font are the symbols that it shows."""
        if not _OF_SYMBOLS.search(text):
            return text
        font = attribute(child(run, "rPr", "rFonts"), "ascii")
        return _OF_SYMBOLS.sub(lambda match: self._symbol(font, f"{ord(match[0]):X}"), text)

    def _symbol(self, font: str, code: str) -> str:
        mark = _SYMBOLS.get(chr(int(code[-2:], 16))) if font == "Symbol" and code else _DINGBATS.get(code[-2:])
        if mark is None and code and not code.startswith("F0"):
            mark = chr(int(code, 16))
        if mark is None:
            self.lost["symbols whose characters are not known"] += 1
        return mark or ""

    def _form_field(self, element: Element) -> str:
        """Return the value of an old form's field that has no text of its own: a check box, a choice."""
        data = child(element, "ffData")
        box, choice = child(data, "checkBox"), child(data, "ddList")
        if box is not None:
            state = child(box, "checked")
            state = child(box, "default") if state is None else state
            return "☒" if state is not None and attribute(state, "val", "1") not in _OFF else "☐"
        if choice is not None:
            entries = [attribute(each, "val") for each in choice if local(each) == "listEntry"]
            return quoted("".join(entries[number(child(choice, "result"), 0) :][:1]))
        return ""

    def _drawing(self, element: Element) -> str:
        """Return the descriptions of pictures; text boxes among them come after the paragraph."""
        descriptions = []
        pictures = 0
        for each in _drawn(element):
            match local(each):
                case "docPr" | "shape" if text := (attribute(each, "descr") or attribute(each, "alt")).strip():
                    descriptions.append(f"![{quoted(text)}]")
                case "blip" | "imagedata" if local(element) != "object":
                    pictures += 1
                case "decorative" if attribute(each, "val") not in _OFF:
                    pictures -= 1
                case "txbxContent":
                    self._boxes += self._blocks(each)
                case "textpath":
                    descriptions.append(quoted(attribute(each, "string")))
                case "chart":
                    self.lost["charts"] += 1
                case "relIds":
                    self.lost["diagrams"] += 1
        if pictures > 0 and not descriptions:
            self.lost[PICTURES] += pictures
        return " ".join(descriptions)

    def _table(self, table: Element) -> str:
        rows: list[list[list[Any]]] = []
        above: dict[int, list[Any]] = {}
        """By column: the last cell that began there."""
        for row in _members(table, "tr"):
            properties = child(row, "trPr")
            if child(properties, "del") is not None:
                continue
            column = number(child(properties, "gridBefore"), 0)
            cells: list[list[Any]] = [["", column, 1]] if column else []
            for cell in _members(row, "tc"):
                span = max(1, number(child(cell, "tcPr", "gridSpan"), 1))
                merge = child(cell, "tcPr", "vMerge")
                if merge is not None and attribute(merge, "val") != "restart" and column in above:
                    above[column][2] += 1
                else:
                    above[column] = ["".join(self._blocks(cell)), span, 1]
                    cells.append(above[column])
                column += span
            rows.append(cells)
        return html_table(rows)


def _drawn(parent: Element) -> Iterator[Element]:
    """Yield the elements of a drawing, except the contents of text boxes and the fallbacks for older programs."""
    for element in parent:
        if local(element) != "Fallback":
            yield element
            if local(element) != "txbxContent":
                yield from _drawn(element)


def _members(parent: Element, name: str) -> Iterator[Element]:
    """Yield the rows of a table or the cells of a row, also those that are inserted or in a content control."""
    for element in parent:
        if local(element) == name:
            yield element
        elif local(element) in {"sdt", "sdtContent", "ins", "customXml"}:
            yield from _members(element, name)


class _Styles:
    """Paragraph styles: which are headings, and which number their paragraphs."""

    def __init__(self, root: Element | None) -> None:
        self._styles = {attribute(each, "styleId"): each for each in (root if root is not None else ())}

    def chain(self, style: str) -> Iterator[Element]:
        """Yield a style and those that it is based on."""
        known: set[str] = set()
        while style in self._styles and style not in known:
            known.add(style)
            yield self._styles[style]
            style = attribute(child(self._styles[style], "basedOn"), "val")

    def heading(self, style: str, properties: Element | None) -> int:
        """Return the level of a paragraph's heading, from 1 to 6; 0 for other paragraphs."""
        levels = [child(properties, "outlineLvl")]
        for each in self.chain(style):
            name = attribute(child(each, "name"), "val").lower()
            if match := re.fullmatch(r"heading ([1-9])", name):
                return min(int(match[1]), 6)
            if name == "title":
                return 1
            levels.append(child(each, "pPr", "outlineLvl"))
        level = next((number(each, 9) for each in levels if each is not None), 9)
        if level == 9 and style not in self._styles and (match := re.fullmatch(r"Heading([1-9])", style)):
            return min(int(match[1]), 6)
        return min(level + 1, 6) if level < 9 else 0


class _ListNumbers:
    """The numbers that Word gives headings and items of lists; counted in the document's order."""

    def __init__(self, root: Element | None, styles: _Styles) -> None:
        self._styles = styles
        self._lists: dict[str, tuple[str, dict[int, Element], dict[int, int]]] = {}
        """By number of a list: its definition, its levels, and where they restart."""
        self._counts: dict[str, dict[int, int]] = {}
        """By definition: the last number of each level."""
        self._restarted: set[str] = set()
        levels: dict[str, dict[int, Element]] = {}
        for each in root if root is not None else ():
            if local(each) == "abstractNum":
                levels[attribute(each, "abstractNumId")] = {
                    int(attribute(level, "ilvl", "0")): level for level in each if local(level) == "lvl"
                }
        for each in root if root is not None else ():
            if local(each) == "num":
                definition = attribute(child(each, "abstractNumId"), "val")
                own, starts = dict(levels.get(definition, {})), dict[int, int]()
                for override in (part for part in each if local(part) == "lvlOverride"):
                    level = int(attribute(override, "ilvl", "0"))
                    if (start := child(override, "startOverride")) is not None:
                        starts[level] = number(start, 1)
                    if (changed := child(override, "lvl")) is not None:
                        own[level] = changed
                self._lists[attribute(each, "numId")] = definition, own, starts

    def label(self, properties: Element | None, style: str) -> tuple[str, int]:
        """Return a paragraph's number as it is shown, or "-" for a bullet, and its level; "" for other paragraphs."""
        chosen = [child(properties, "numPr"), *(child(each, "pPr", "numPr") for each in self._styles.chain(style))]
        list_id = next((value for each in chosen if (value := attribute(child(each, "numId"), "val"))), "")
        if list_id not in self._lists:
            return "", 0
        definition, levels, starts = self._lists[list_id]
        level = next((int(value) for each in chosen if (value := attribute(child(each, "ilvl"), "val"))), None)
        if level is None:  # a level may name the style that has it
            level = next((at for at, each in levels.items() if attribute(child(each, "pStyle"), "val") == style), 0)
        if level not in levels:
            return "-", level
        counts = self._counts.setdefault(definition, {})
        if list_id not in self._restarted:
            self._restarted.add(list_id)
            for at in starts:
                counts.pop(at, None)
        for below in [at for at in counts if at > level]:
            del counts[below]
        for at in range(level + 1):
            first = starts.get(at, number(child(levels.get(at), "start"), 1))
            counts[at] = counts.get(at, first - 1) + 1 if at == level else counts.get(at, first)
        own = levels[level]
        if attribute(child(own, "numFmt"), "val", "decimal") == "bullet":
            return "-", level
        plain = child(own, "isLgl") is not None

        def shown(match: re.Match[str]) -> str:
            at = int(match[1]) - 1
            style = "decimal" if plain else attribute(child(levels.get(at), "numFmt"), "val", "decimal")
            return numeral(counts.get(at, 1), style)

        return _LEVEL.sub(shown, attribute(child(own, "lvlText"), "val")).strip(), level
