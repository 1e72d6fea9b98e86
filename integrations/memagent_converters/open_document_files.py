"""OpenDocument files: texts (.odt), presentations (.odp) and spreadsheets (.ods)."""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Final
from xml.etree.ElementTree import Element

from memagent_converters.html_to_markdown import PICTURES, STYLES, format_number, list_omissions, markdown_blocks
from memagent_converters.xml_archives import (
    XmlArchive,
    find_child,
    format_formula,
    get_attribute,
    iter_descendants,
    local_name,
    make_html_table,
)
from memagent_graph.converters import GAP, ConversionError, Parts, SourceFile

_SKIPPED_TAGS: Final = frozenset(
    ("tracked-changes", "sequence-decls", "variable-decls", "forms", "settings", "bookmark-ref-format")
)
_MAX_REPEATED: Final = 1000
"""The maximum number of repetitions of a row or cell with a value. Empty ones are left out."""


def convert(source: SourceFile) -> Parts:
    """Convert an OpenDocument file; slides and sheets are sections.

    Raises:
        ConversionError: it has a password, or is damaged.
    """
    archive = XmlArchive(source.name, source.file)
    manifest = archive.read_xml("META-INF/manifest.xml")
    if manifest is not None and next(iter_descendants(manifest, "encryption-data"), None) is not None:
        raise ConversionError(f"{source.name} is protected by a password", "Save it without one.", kind="unsupported")
    document = _OpenDocument(archive)
    headings = document.page_headings()
    body = find_child(document.root, "body")
    for content in body if body is not None else ():
        parts = [node for node in content if local_name(node) in {"page", "table"}]
        if not parts or local_name(content) == "text":
            html = headings["header"] + "".join(map(document.block, content)) + headings["footer"]
            yield from markdown_blocks(html)
            continue
        for number, part in enumerate(parts, 1):
            is_sheet = local_name(part) == "table"
            name = get_attribute(part, "name")
            heading = f"<h2>{escape(name)}</h2>" if is_sheet else ""
            label = f"sheet {name}" if is_sheet else f"slide {number}"
            yield from markdown_blocks(heading + document.block(part), label, end=GAP)
    yield from list_omissions(document.omission_counts)


class _OpenDocument:
    """Converts an OpenDocument file to HTML, and counts the parts that it leaves out."""

    def __init__(self, archive: XmlArchive) -> None:
        self._archive = archive
        self.root = archive.read_required_xml("content.xml")
        self._other = archive.read_xml("styles.xml")
        self.omission_counts: Counter[str] = Counter()
        self._positions: dict[str, str] = {}
        """By style of text: sup or sub."""
        self._lists: dict[str, dict[int, Element]] = {}
        """By style of list: its levels."""
        for root in filter(lambda node: node is not None, (self._other, self.root)):
            for style in iter_descendants(root, "style", "list-style"):  # type: ignore[arg-type]
                name = get_attribute(style, "name")
                position = get_attribute(find_child(style, "text-properties"), "text-position").partition(" ")[0]
                if position and position not in {"0%", "0"}:
                    self._positions[name] = "sub" if position == "sub" or position.startswith("-") else "sup"
                if local_name(style) == "list-style":
                    self._lists[name] = {int(get_attribute(node, "level", "1")): node for node in style}
        self._counts: dict[str, dict[int, int]] = {}

    def page_headings(self) -> dict[str, str]:
        """Return the headers and the footers of the pages, each text once."""
        texts: dict[str, dict[str, None]] = {"header": {}, "footer": {}}
        for node in iter_descendants(self._other, "header", "footer") if self._other is not None else ():
            texts[local_name(node)]["".join(map(self.block, node))] = None
        return {kind: "".join(unique) for kind, unique in texts.items()}

    def block(self, element: Element) -> str:  # noqa: PLR0911  one case for each element
        """Return an element between paragraphs as HTML."""
        match local_name(element):
            case "p":
                return f"<p>{self._inline(element)}</p>"
            case "h":
                level = min(int(get_attribute(element, "outline-level", "1")), 6)
                return f"<h{level}>{self._inline(element)}</h{level}>"
            case "list":
                return self._list(element, get_attribute(element, "style-name"), 1)
            case "table":
                return self._table(element)
            case name if name in _SKIPPED_TAGS:
                return ""
            case "notes":
                text = "".join(map(self.block, element))
                return f"<p>Notes:</p>{text}" if re.sub("<[^>]*>", "", text).strip() else ""
            case "annotation":
                return f"<p>{self._piece(element)}</p>"
            case "frame" if get_attribute(element, "class") == "title":
                return "".join(f"<h2>{self._inline(node)}</h2>" for node in iter_descendants(element, "p"))
            case "frame" if find_child(element, "text-box", "table") is None:
                return f"<p>{self._piece(element)}</p>"
        return "".join(map(self.block, element))

    def _list(self, element: Element, style: str, level: int) -> str:
        """Return a list. Numbering continues if the list says so, or from the last list of this style at this level."""
        form = self._lists.get(style, {}).get(level)
        counts = self._counts.setdefault(style, {})
        if get_attribute(element, "continue-numbering") != "true" and level == 1:
            counts.clear()
        html = ""
        for item in (node for node in element if local_name(node) in {"list-item", "list-header"}):
            start = get_attribute(item, "start-value")
            if not start and level not in counts:
                start = get_attribute(form, "start-value")
            counts[level] = int(start) if start else counts.get(level, 0) + 1
            for deeper in [other for other in counts if other > level]:
                del counts[deeper]
            text = "<br>".join(self._inline(node) for node in item if local_name(node) != "list")
            html += f'<li marker="{escape(self._marker(style, form, level))}" level="{level - 1}">{text}</li>'
            html += "".join(self._list(node, style, level + 1) for node in item if local_name(node) == "list")
        return html

    def _marker(self, style: str, form: Element | None, level: int) -> str:
        if form is None or not get_attribute(form, "num-format"):
            return "-"
        first = max(1, level - int(get_attribute(form, "display-levels", "1")) + 1)
        numbers = [
            format_number(self._counts[style].get(number, 1), STYLES.get(get_attribute(node, "num-format"), "decimal"))
            for number, node in sorted(self._lists[style].items())
            if first <= number <= level
        ]
        return get_attribute(form, "num-prefix") + ".".join(numbers) + get_attribute(form, "num-suffix")

    def _table(self, table: Element) -> str:
        rows = []
        for row in iter_descendants(table, "table-row"):
            cells = [
                cell
                for node in row
                if local_name(node) == "table-cell"
                for cell in [self._cell(node)]
                * min(int(get_attribute(node, "number-columns-repeated", "1")), _MAX_REPEATED)
            ]
            while cells and not cells[-1][0]:
                cells.pop()
            if cells:
                rows += [cells] * min(int(get_attribute(row, "number-rows-repeated", "1")), _MAX_REPEATED)
        return make_html_table(rows) + "".join(self.block(node) for node in table if local_name(node) == "shapes")

    def _cell(self, cell: Element) -> tuple[str, int, int]:
        html = "".join(map(self.block, cell)) or escape(get_attribute(cell, "value"))
        spans = [int(get_attribute(cell, f"number-{what}-spanned", "1")) for what in ("columns", "rows")]
        return html, spans[0], spans[1]

    def _inline(self, element: Element) -> str:
        pieces = [escape(element.text or "")]
        for node in element:
            pieces += [self._piece(node), escape(node.tail or "")]
        return "".join(pieces)

    def _piece(self, element: Element) -> str:  # noqa: PLR0911  one case for each element
        match local_name(element):
            case "s" | "tab":
                return " "
            case "line-break":
                return "<br>"
            case "span":
                tag = self._positions.get(get_attribute(element, "style-name"))
                inner = self._inline(element)
                return f"<{tag}>{inner}</{tag}>" if tag else inner
            case "a":
                return f'<a href="{escape(get_attribute(element, "href"))}">{self._inline(element)}</a>'
            case "note":
                body = find_child(element, "note-body")
                text = " ".join(map(self._inline, body)) if body is not None else ""
                mark = next(iter_descendants(element, "note-citation"), element)
                return f"[^{escape(''.join(mark.itertext()))}: {text}]"
            case "annotation":
                return (
                    f"[Note: {' '.join(self._inline(node) for node in element if local_name(node) in {'p', 'list'})}]"
                )
            case "object":
                member = get_attribute(element, "href").removeprefix("./")
                root = self._archive.read_xml(f"{member}/content.xml")
                if root is not None and local_name(root) == "math":
                    return format_formula(root)
                self.omission_counts["embedded objects"] += 1
                return ""
            case "text-box" | "table" | "list":
                return "".join(map(self.block, element if local_name(element) == "text-box" else [element]))
            case "desc":
                return f"![{escape(''.join(element.itertext()))}]"
            case "frame" if find_child(element, "image") is not None and find_child(element, "desc") is None:
                self.omission_counts[PICTURES] += find_child(element, "object") is None
            case name if name in _SKIPPED_TAGS:
                return ""
        return self._inline(element)
