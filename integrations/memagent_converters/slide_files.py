"""Presentations (.pptx): the slides in order, each a section, with tables, formulas and speaker's notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final
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
    quoted,
)
from memagent_graph.converters import GAP, Parts, SourceFile

_MAIN: Final = "ppt/presentation.xml"
_TITLES: Final = frozenset(("title", "ctrTitle"))
_RELATED_PARTS: Final = {"notesSlide": "Notes:", "comments": "Comments:", "diagramData": ""}
"""The heading for each part that belongs to a slide, by relation type."""
_STYLES: Final = {
    "alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman", "romanUc": "upperRoman"
}  # fmt: skip
_UNREAD: Final = frozenset(("sldNum", "dt", "hdr", "sldImg"))
"""Placeholders without text that belongs to the slide."""


def convert(source: SourceFile) -> Parts:
    """Convert a presentation."""
    archive = XmlArchive(source.name, source.file)
    relations = archive.relations(_MAIN)
    for number, entry in enumerate(descendants(archive.required(_MAIN), "sldId"), 1):
        reference = next((value for key, value in entry.items() if key.endswith("}id")), "")
        member = relations.get(reference, ("", ""))[1]
        label, slide = f"slide {number}", archive.xml(member)
        if slide is None:
            yield from omissions(Counter({"slides that cannot be read": 1}), label)
            continue
        lost: Counter[str] = Counter()
        html = "".join(shapes(slide, lost))
        for kind, target in archive.relations(member).values():
            root = archive.xml(target) if kind in _RELATED_PARTS else None
            if root is not None:
                texts = shapes(root, lost) if kind == "notesSlide" else map(_paragraph, descendants(root, "p", "text"))
                html += f"<p>{_RELATED_PARTS[kind]}</p>{''.join(texts)}"
            elif kind == "chart":
                lost["charts"] += 1
            elif kind in {"package", "oleObject"}:
                yield from source.embedded(target.rpartition("/")[2], archive.read(target))
        yield from blocks(html, label, end=GAP)
        yield from omissions(lost, label)


def shapes(parent: Element, lost: Counter[str]) -> Iterator[str]:
    """Yield the shapes of a slide or a sheet as HTML: texts, tables, descriptions of pictures."""
    for element in parent:
        match local(element):
            case "sp":
                holder = child(element, "nvSpPr", "nvPr", "ph")
                kind = attribute(holder, "type")
                if kind not in _UNREAD:
                    yield from _texts(element, is_title=kind in _TITLES)
            case "tbl":
                rows = [
                    [
                        (
                            "".join(_texts(cell)),
                            int(attribute(cell, "gridSpan", "1")),
                            int(attribute(cell, "rowSpan", "1")),
                        )
                        for cell in row
                        if local(cell) == "tc"
                        and not {attribute(cell, "hMerge"), attribute(cell, "vMerge")} & {"1", "true"}
                    ]
                    for row in element
                    if local(row) == "tr"
                ]
                yield html_table(rows)
            case "pic":
                text = attribute(child(element, "nvPicPr", "cNvPr"), "descr").strip()
                lost[PICTURES] += not text
                yield f"<p>![{quoted(text)}]</p>" if text else ""
            case "Fallback":
                continue
            case _:
                yield from shapes(element, lost)


def _texts(shape: Element, *, is_title: bool = False) -> Iterator[str]:
    counts: dict[int, int] = {}
    """The last paragraph number, by level."""
    for paragraph in descendants(shape, "p"):
        text, properties = _paragraph(paragraph), child(paragraph, "pPr")
        level, numbers = int(attribute(properties, "lvl", "0")), child(properties, "buAutoNum")
        counts = {at: count for at, count in counts.items() if at < level + (numbers is not None)}
        if is_title:
            text = f"<h2>{text[3:-4]}</h2>"
        elif numbers is not None:
            counts[level] = counts.get(level, int(attribute(numbers, "startAt", "1")) - 1) + 1
            marker = numeral(counts[level], _STYLES.get(attribute(numbers, "type")[:7], "decimal"))
            text = f'<li marker="{marker}." level="{level}">{text[3:-4]}</li>'
        yield text


def _paragraph(paragraph: Element) -> str:
    pieces = [quoted(paragraph.text or "")] if local(paragraph) == "text" else []
    for run in paragraph.iter():
        match local(run):
            case "r" | "fld" if child(run, "t") is not None:
                text = quoted(child(run, "t").text or "")  # type: ignore[union-attr]
                baseline = int(attribute(child(run, "rPr"), "baseline", "0").rstrip("%").partition(".")[0] or 0)
                tag = "sup" if baseline > 0 else "sub" if baseline < 0 else ""
                pieces.append(f"<{tag}>{text}</{tag}>" if tag else text)
            case "br":
                pieces.append("<br>")
            case "oMath":
                pieces.append(formula(run))
    return f"<p>{''.join(pieces)}</p>"
