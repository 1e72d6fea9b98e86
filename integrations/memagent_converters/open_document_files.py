"""OpenDocument files: texts (.odt), presentations (.odp) and spreadsheets (.ods)."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final
from xml.etree.ElementTree import Element

from memagent_converters.html_to_markdown import PICTURES, STYLES, blocks, numeral, omissions
from memagent_converters.xml_archives import (
    XmlArchive,
    attribute,
    child,
    descendants,
    formula,
    html_table,
    local,
    quoted,
)
from memagent_graph.converters import GAP, ConversionError, Parts, SourceFile

_UNREAD: Final = frozenset(
    ("tracked-changes", "sequence-decls", "variable-decls", "forms", "settings", "bookmark-ref-format")
)
_MAX_REPEATED: Final = 1000
"""How often a row or cell with a value is repeated at most; empty ones are left out."""


def convert(source: SourceFile) -> Parts:
    """Convert an OpenDocument file; slides and sheets are sections.

    Raises:
        ConversionError: it has a password, or is damaged.
    """
    archive = XmlArchive(source.name, source.file)
    manifest = archive.xml("META-INF/manifest.xml")
    if manifest is not None and next(descendants(manifest, "encryption-data"), None) is not None:
        raise ConversionError(f"{source.name} is protected by a password", "Save it without one.", kind="unsupported")
    document = _OpenDocument(archive)
    around = document.around()
    body = child(document.root, "body")
    for content in body if body is not None else ():
        parts = [each for each in content if local(each) in {"page", "table"}] if local(content) != "text" else []
        if not parts:
            html = around["header"] + "".join(map(document.block, content)) + around["footer"]
            yield from blocks(html)
        for number, part in enumerate(parts, 1):
            is_sheet = local(part) == "table"
            name = attribute(part, "name")
            heading = f"<h2>{quoted(name)}</h2>" if is_sheet else ""
            label = f"sheet {name}" if is_sheet else f"slide {number}"
            yield from blocks(heading + document.block(part), label, end=GAP)
    yield from omissions(document.lost)


class _OpenDocument:
    """A file's content, its styles, and what was lost on the way to HTML."""

    def __init__(self, archive: XmlArchive) -> None:
        self._archive = archive
        self.root = archive.required("content.xml")
        self._other = archive.xml("styles.xml")
        self.lost: Counter[str] = Counter()
        self._positions: dict[str, str] = {}
        """By style of text: sup or sub."""
        self._lists: dict[str, dict[int, Element]] = {}
        """By style of list: its levels."""
        for root in filter(lambda each: each is not None, (self._other, self.root)):
            for style in descendants(root, "style", "list-style"):  # type: ignore[arg-type]
                name = attribute(style, "name")
                position = attribute(child(style, "text-properties"), "text-position").partition(" ")[0]
                if position and position not in {"0%", "0"}:
                    self._positions[name] = "sub" if position == "sub" or position.startswith("-") else "sup"
                if local(style) == "list-style":
                    self._lists[name] = {int(attribute(each, "level", "1")): each for each in style}
        self._counts: dict[str, dict[int, int]] = {}

    def around(self) -> dict[str, str]:
        """Return the headers and the footers of the pages, each text once."""
        texts: dict[str, dict[str, None]] = {"header": {}, "footer": {}}
        for each in descendants(self._other, "header", "footer") if self._other is not None else ():
            texts[local(each)]["".join(map(self.block, each))] = None
        return {kind: "".join(several) for kind, several in texts.items()}

    def block(self, element: Element) -> str:  # noqa: PLR0911  one case for each element
        """Return an element between paragraphs as HTML."""
        match local(element):
            case "p":
                return f"<p>{self._inline(element)}</p>"
            case "h":
                level = min(int(attribute(element, "outline-level", "1")), 6)
                return f"<h{level}>{self._inline(element)}</h{level}>"
            case "list":
                return self._list(element, attribute(element, "style-name"), 1)
            case "table":
                return self._table(element)
            case name if name in _UNREAD:
                return ""
            case "notes":
                text = "".join(map(self.block, element))
                return f"<p>Notes:</p>{text}" if re.sub("<[^>]*>", "", text).strip() else ""
            case "annotation":
                return f"<p>{self._piece(element)}</p>"
            case "frame" if attribute(element, "class") == "title":
                return "".join(f"<h2>{self._inline(each)}</h2>" for each in descendants(element, "p"))
            case "frame" if child(element, "text-box", "table") is None:
                return f"<p>{self._piece(element)}</p>"
        return "".join(map(self.block, element))

    def _list(self, element: Element, style: str, level: int) -> str:
        """Return a list. Numbering continues if the list says so, or from the last list of this style at this level."""
        form = self._lists.get(style, {}).get(level)
        counts = self._counts.setdefault(style, {})
        if attribute(element, "continue-numbering") != "true" and level == 1:
            counts.clear()
        html = ""
        for item in (each for each in element if local(each) in {"list-item", "list-header"}):
            start = attribute(item, "start-value") or (attribute(form, "start-value") if level not in counts else "")
            counts[level] = int(start) if start else counts.get(level, 0) + 1
            for below in [at for at in counts if at > level]:
                del counts[below]
            text = "<br>".join(self._inline(each) for each in item if local(each) != "list")
            html += f'<li marker="{quoted(self._marker(style, form, level))}" level="{level - 1}">{text}</li>'
            html += "".join(self._list(each, style, level + 1) for each in item if local(each) == "list")
        return html

    def _marker(self, style: str, form: Element | None, level: int) -> str:
        if form is None or not attribute(form, "num-format"):
            return "-"
        first = max(1, level - int(attribute(form, "display-levels", "1")) + 1)
        numbers = [
            numeral(self._counts[style].get(at, 1), STYLES.get(attribute(each, "num-format"), "decimal"))
            for at, each in sorted(self._lists[style].items())
            if first <= at <= level
        ]
        return attribute(form, "num-prefix") + ".".join(numbers) + attribute(form, "num-suffix")

    def _table(self, table: Element) -> str:
        rows = []
        for row in descendants(table, "table-row"):
            cells = [
                cell
                for each in row
                if local(each) == "table-cell"
                for cell in [self._cell(each)]
                * min(int(attribute(each, "number-columns-repeated", "1")), _MAX_REPEATED)
            ]
            while cells and not cells[-1][0]:
                cells.pop()
            if cells:
                rows += [cells] * min(int(attribute(row, "number-rows-repeated", "1")), _MAX_REPEATED)
        return html_table(rows) + "".join(self.block(each) for each in table if local(each) == "shapes")

    def _cell(self, cell: Element) -> tuple[str, int, int]:
        html = "".join(map(self.block, cell)) or quoted(attribute(cell, "value"))
        spans = [int(attribute(cell, f"number-{what}-spanned", "1")) for what in ("columns", "rows")]
        return html, spans[0], spans[1]

    def _inline(self, element: Element) -> str:
        pieces = [quoted(element.text or "")]
        for each in element:
            pieces += [self._piece(each), quoted(each.tail or "")]
        return "".join(pieces)

    def _piece(self, element: Element) -> str:  # noqa: PLR0911  one case for each element
        match local(element):
            case "s" | "tab":
                return " "
            case "line-break":
                return "<br>"
            case "span":
                tag = self._positions.get(attribute(element, "style-name"))
                inner = self._inline(element)
                return f"<{tag}>{inner}</{tag}>" if tag else inner
            case "a":
                return f'<a href="{quoted(attribute(element, "href"))}">{self._inline(element)}</a>'
            case "note":
                body = child(element, "note-body")
                text = " ".join(map(self._inline, body)) if body is not None else ""
                return f"[^{quoted(''.join(next(descendants(element, 'note-citation'), element).itertext()))}: {text}]"
            case "annotation":
                return f"[Note: {' '.join(self._inline(each) for each in element if local(each) in {'p', 'list'})}]"
            case "object":
                member = attribute(element, "href").removeprefix("./")
                root = self._archive.xml(f"{member}/content.xml")
                if root is not None and local(root) == "math":
                    return formula(root)
                self.lost["embedded objects"] += 1
                return ""
            case "text-box" | "table" | "list":
                return "".join(map(self.block, element if local(element) == "text-box" else [element]))
            case "desc":
                return f"![{quoted(''.join(element.itertext()))}]"
            case "frame" if child(element, "image") is not None and child(element, "desc") is None:
                self.lost[PICTURES] += child(element, "object") is None
            case name if name in _UNREAD:
                return ""
        return self._inline(element)
