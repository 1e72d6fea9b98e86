"""Converts OpenDocument files: texts (.odt), presentations (.odp) and spreadsheets (.ods)."""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Final
from xml.etree.ElementTree import Element

from memagent_converters.html_to_markdown import (
    NUMBER_STYLES,
    UNDESCRIBED_PICTURES,
    format_number,
    iter_markdown,
    list_omissions,
)
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
from memagent_graph.converters import BLOCK_SEPARATOR, ConversionError, Parts, SourceFile

_SKIPPED_TAGS: Final = frozenset(
    ("tracked-changes", "sequence-decls", "variable-decls", "forms", "settings", "bookmark-ref-format")
)
_SHAPE_TAGS: Final = frozenset(
    (
        *("text-box", "custom-shape", "rect", "ellipse", "circle", "line", "polyline", "polygon", "regular-polygon"),
        *("path", "connector", "caption", "measure"),
    )
)
"""Elements with paragraphs inside a paragraph."""
_MAX_REPETITIONS: Final = 1000
"""The maximum number of repetitions of a row or cell with a value. Empty ones are left out."""


def convert(source: SourceFile) -> Parts:
    """Convert an OpenDocument file; slides and sheets are sections.

    Raises:
        ConversionError: the file has a password, or is damaged.
    """
    archive = XMLArchive(source)
    manifest = archive.read_xml("META-INF/manifest.xml")
    if next(iter_descendants(manifest, "encryption-data"), None) is not None:
        raise ConversionError(f"{source.name} is protected by a password", "Save it without one.", kind="unsupported")
    document = _OpenDocument(archive)
    header, footer = document.format_headers_and_footers()
    for content in iter_children(find_child(document.root, "body")):
        pages = [*iter_children(content, "page", "table")]
        if not pages or get_local_name(content) == "text":
            yield from iter_markdown(header + "".join(map(document.format_block, content)) + footer)
            continue
        for page_number, page in enumerate(pages, 1):
            is_sheet = get_local_name(page) == "table"
            name = get_attribute(page, "name")
            heading = f"<h2>{escape(name)}</h2>" if is_sheet else ""
            label = f"sheet {name}" if is_sheet else f"slide {page_number}"
            yield from iter_markdown(heading + document.format_block(page), label, end=BLOCK_SEPARATOR)
    yield from list_omissions(document.omission_counts)


class _OpenDocument:
    """Converts an OpenDocument file to HTML, and counts the parts that it leaves out."""

    def __init__(self, archive: XMLArchive) -> None:
        self._archive = archive
        self.root = archive.read_required_xml("content.xml")
        self._styles_root = archive.read_xml("styles.xml")
        self.omission_counts: Counter[str] = Counter()
        self._sub_sup_tags: dict[str, str] = {}
        """The HTML tag, sup or sub, of each text style that raises or lowers its text."""
        self._list_levels: dict[str, dict[int, Element]] = {}
        """The elements of the levels of each list style."""
        for root in (self._styles_root, self.root):
            for style in iter_descendants(root, "style", "list-style"):
                name = get_attribute(style, "name")
                position = get_attribute(find_child(style, "text-properties"), "text-position").partition(" ")[0]
                if position and position not in {"0%", "0"}:
                    self._sub_sup_tags[name] = "sub" if position == "sub" or position.startswith("-") else "sup"
                if get_local_name(style) == "list-style":
                    self._list_levels[name] = {get_int_attribute(node, "level", 1): node for node in style}
        self._item_numbers: dict[str, dict[int, int]] = {}
        """The last number at each level, by list style."""

    def format_headers_and_footers(self) -> list[str]:
        """Return the headers and the footers of all pages as HTML, each text once."""
        texts: dict[str, dict[str, None]] = {"header": {}, "footer": {}}
        for node in iter_descendants(self._styles_root, "header", "footer"):
            texts[get_local_name(node)]["".join(map(self.format_block, node))] = None
        return ["".join(unique_texts) for unique_texts in texts.values()]

    def format_block(self, element: Element) -> str:  # noqa: PLR0911  one case for each element
        """Return a block element as HTML."""
        match get_local_name(element):
            case "p":
                return f"<p>{self._format_inline(element)}</p>"
            case "h":
                return self._format_heading(element, "")
            case "list":
                return self._format_list(element, get_attribute(element, "style-name"), 1)
            case "table":
                return self._format_table(element)
            case name if name in _SKIPPED_TAGS:
                return ""
            case "notes":
                text = "".join(map(self.format_block, element))
                return f"<p>Notes:</p>{text}" if re.sub("<[^>]*>", "", text).strip() else ""
            case "annotation" | "title" | "desc":
                return f"<p>{self._format_inline_element(element)}</p>"
            case "frame" if get_attribute(element, "class") == "title":
                return "".join(f"<h2>{self._format_inline(node)}</h2>" for node in iter_descendants(element, "p"))
            case "frame" if find_child(element, "text-box", "table") is None:
                return f"<p>{self._format_inline_element(element)}</p>"
        return "".join(map(self.format_block, element))

    def _format_heading(self, element: Element, number: str) -> str:
        level = min(get_int_attribute(element, "outline-level", 1), 6)
        return f"<h{level}>{escape(number)} {self._format_inline(element)}</h{level}>"

    def _format_list(self, element: Element, style: str, level: int) -> str:
        """Return a list. Numbering continues if the list says so, or from the last list of this style at this level."""
        level_style = self._list_levels.get(style, {}).get(level)
        item_numbers = self._item_numbers.setdefault(style, {})
        is_continued = get_attribute(element, "continue-numbering") == "true" or get_attribute(element, "continue-list")
        if level == 1 and not is_continued:
            item_numbers.clear()
        html = ""
        for item in iter_children(element, "list-item", "list-header"):
            blocks = [node for node in item if get_local_name(node) not in {"list", "number", "soft-page-break"}]
            text, marker = "<br>".join(map(self._format_inline, blocks)), ""
            # A header has no number, nor has an item that is only around a list of the next level.
            if get_local_name(item) == "list-item" and (blocks or level not in item_numbers):
                start = get_attribute(item, "start-value")
                if not start and level not in item_numbers:
                    start = get_attribute(level_style, "start-value")
                item_numbers[level] = int(start) if start.isdecimal() else item_numbers.get(level, 0) + 1
                for deeper_level in [other_level for other_level in item_numbers if other_level > level]:
                    del item_numbers[deeper_level]
                marker = self._format_marker(style, level_style, level)
            if [get_local_name(node) for node in blocks] == ["h"]:
                html += self._format_heading(blocks[0], marker.removeprefix("-"))
            elif blocks:
                html += f'<li marker="{escape(marker)}" level="{level - 1}">{text}</li>' if marker else f"<p>{text}</p>"
            html += "".join(self._format_list(node, style, level + 1) for node in iter_children(item, "list"))
        return html

    def _format_marker(self, style: str, level_style: Element | None, level: int) -> str:
        if level_style is None or not get_attribute(level_style, "num-format"):
            return "-"
        first_level = max(1, level - get_int_attribute(level_style, "display-levels", 1) + 1)
        numbers = [
            format_number(
                self._item_numbers[style].get(shown_level, 1),
                NUMBER_STYLES.get(get_attribute(node, "num-format"), "decimal"),
            )
            for shown_level, node in sorted(self._list_levels[style].items())
            if first_level <= shown_level <= level
        ]
        return get_attribute(level_style, "num-prefix") + ".".join(numbers) + get_attribute(level_style, "num-suffix")

    def _format_table(self, table: Element) -> str:
        rows = []
        for row in iter_table_parts(table, "table-row"):
            cells = []
            for node in iter_children(row, "table-cell"):
                repetitions = min(get_int_attribute(node, "number-columns-repeated", 1), _MAX_REPETITIONS)
                cells += [self._format_cell(node)] * repetitions
            while cells and not cells[-1][0] and cells[-1][2] == 1:  # without text, and in this row alone
                cells.pop()
            if cells or find_child(row, "covered-table-cell") is not None:
                rows += [cells] * min(get_int_attribute(row, "number-rows-repeated", 1), _MAX_REPETITIONS)
        while rows and not rows[-1]:  # rows that only repeat merged cells
            rows.pop()
        return make_html_table(rows) + "".join(map(self.format_block, iter_children(table, "shapes")))

    def _format_cell(self, cell: Element) -> tuple[str, int, int]:
        values = (value for name, value in cell.items() if name.endswith("value"))  # as in office:date-value
        html = "".join(map(self.format_block, cell)) or escape(next(values, ""))
        spans = [get_int_attribute(cell, f"number-{axis}-spanned", 1) for axis in ("columns", "rows")]
        return html, spans[0], spans[1]

    def _format_inline(self, element: Element) -> str:
        pieces = [escape(element.text or "")]
        for node in element:
            pieces += [self._format_inline_element(node), escape(node.tail or "")]
        return "".join(pieces)

    def _format_inline_element(self, element: Element) -> str:  # noqa: PLR0911, PLR0912  one case for each
        match get_local_name(element):
            case "s" | "tab":
                return " "
            case "line-break":
                return "<br>"
            case "span":
                tag = self._sub_sup_tags.get(get_attribute(element, "style-name"))
                content = self._format_inline(element)
                return f"<{tag}>{content}</{tag}>" if tag else content
            case "a":
                return f'<a href="{escape(get_attribute(element, "href"))}">{self._format_inline(element)}</a>'
            case "note":
                text = " ".join(map(self._format_inline, iter_children(find_child(element, "note-body"))))
                mark = next(iter_descendants(element, "note-citation"), element)
                return f"[^{escape(''.join(mark.itertext()))}: {text}]"
            case "annotation":
                return f"[Note: {' '.join(map(self._format_inline, iter_children(element, 'p', 'list')))}]"
            case "object":
                member = get_attribute(element, "href").removeprefix("./")
                root = self._archive.read_xml(f"{member}/content.xml")
                if get_local_name(root) == "math":
                    return format_formula(root)
                self.omission_counts["embedded objects"] += 1
                return ""
            case "ruby-text":
                return f"<rt>{self._format_inline(element)}</rt>"
            case "table" | "list":
                return self.format_block(element)
            case name if name in _SHAPE_TAGS and "".join(element.itertext()).strip():
                return "".join(map(self.format_block, element))
            case "desc":
                return f"![{escape(''.join(element.itertext()))}]"
            case "frame" if find_child(element, "image") is not None and find_child(element, "desc") is None:
                self.omission_counts[UNDESCRIBED_PICTURES] += find_child(element, "object") is None
            case name if name in _SKIPPED_TAGS:
                return ""
        return self._format_inline(element)
