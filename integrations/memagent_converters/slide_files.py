"""Converts presentations (.pptx): each slide is a section with its tables, formulas and speaker's notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import Final
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
    make_html_table,
)
from memagent_graph.converters import BLOCK_SEPARATOR, Parts, SourceFile

_TITLE_PLACEHOLDERS: Final = frozenset(("title", "ctrTitle"))
_RELATED_PARTS: Final = {"notesSlide": "Notes:", "comments": "Comments:", "diagramData": ""}
"""The heading for each part that belongs to a slide, by relationship type."""
_NUMBER_STYLES: Final = {
    "alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman", "romanUc": "upperRoman"
}  # fmt: skip
_SKIPPED_PLACEHOLDERS: Final = frozenset(("sldNum", "dt", "hdr", "sldImg"))
"""Placeholders whose text is not content of the slide, such as its number."""


def convert(source: SourceFile) -> Parts:
    """Convert a presentation."""
    archive = XMLArchive(source)
    presentation = archive.find_member("ppt/presentation.xml")
    relationships = archive.read_relationships(presentation)
    for slide_number, slide_entry in enumerate(iter_descendants(archive.read_required_xml(presentation), "sldId"), 1):
        reference = next((value for key, value in slide_entry.items() if key.endswith("}id")), "")
        member = relationships.get(reference, ("", ""))[1]
        label, slide = f"slide {slide_number}", archive.read_xml(member)
        if not slide.tag:
            yield from list_omissions(Counter({"slides that cannot be read": 1}), label)
            continue
        omission_counts: Counter[str] = Counter()
        html = "".join(iter_shapes(slide, omission_counts))
        for kind, target in archive.read_relationships(member).values():
            if kind in _RELATED_PARTS and (root := archive.read_xml(target)).tag:
                paragraphs = map(_format_paragraph, iter_descendants(root, "p", "text"))
                texts = iter_shapes(root, omission_counts) if kind == "notesSlide" else paragraphs
                html += f"<p>{_RELATED_PARTS[kind]}</p>{''.join(texts)}"
            elif kind == "chart":
                omission_counts["charts"] += 1
            elif kind in {"package", "oleObject"}:
                yield from source.convert_embedded(target.rpartition("/")[2], archive.read(target))
        yield from iter_markdown(html, label, end=BLOCK_SEPARATOR)
        yield from list_omissions(omission_counts, label)


def iter_shapes(parent: Element, omission_counts: Counter[str]) -> Iterator[str]:
    """Yield the shapes of a slide or a sheet as HTML: texts, tables, descriptions of pictures."""
    for element in parent:
        match get_local_name(element):
            case "sp":
                placeholder = find_child(element, "nvSpPr", "nvPr", "ph")
                kind = get_attribute(placeholder, "type")
                if kind not in _SKIPPED_PLACEHOLDERS:
                    yield from _iter_texts(element, is_title=kind in _TITLE_PLACEHOLDERS)
            case "tbl":
                rows = [
                    [
                        (
                            "".join(_iter_texts(cell)),
                            get_int_attribute(cell, "gridSpan", 1),
                            get_int_attribute(cell, "rowSpan", 1),
                        )
                        for cell in iter_children(row, "tc")
                        if not {get_attribute(cell, "hMerge"), get_attribute(cell, "vMerge")} & {"1", "true"}
                    ]
                    for row in iter_children(element, "tr")
                ]
                yield make_html_table(rows)
            case "pic":
                text = get_attribute(find_child(element, "nvPicPr", "cNvPr"), "descr").strip()
                omission_counts[UNDESCRIBED_PICTURES] += not text
                yield f"<p>![{escape(text)}]</p>" if text else ""
            case name if name != "Fallback":
                yield from iter_shapes(element, omission_counts)


def _iter_texts(shape: Element, *, is_title: bool = False) -> Iterator[str]:
    item_numbers: dict[int, int] = {}
    """The number of the last paragraph, by level."""
    for paragraph in iter_descendants(shape, "p"):
        text, properties = _format_paragraph(paragraph), find_child(paragraph, "pPr")
        level, numbering = get_int_attribute(properties, "lvl", 0), find_child(properties, "buAutoNum")
        item_numbers = {
            outer_level: item_number
            for outer_level, item_number in item_numbers.items()
            if outer_level < level + (numbering is not None)
        }
        if is_title:
            text = f"<h2>{text[3:-4]}</h2>"
        elif numbering is not None:
            item_numbers[level] = item_numbers.get(level, get_int_attribute(numbering, "startAt", 1) - 1) + 1
            marker = format_number(
                item_numbers[level], _NUMBER_STYLES.get(get_attribute(numbering, "type")[:7], "decimal")
            )
            text = f'<li marker="{marker}." level="{level}">{text[3:-4]}</li>'
        yield text


def _format_paragraph(paragraph: Element) -> str:
    pieces = [escape(paragraph.text or "")] if get_local_name(paragraph) == "text" else []
    for run in paragraph.iter():
        match get_local_name(run):
            case "r" | "fld" if "/math}" not in run.tag:  # the runs of a formula are in its line
                text = escape("".join(node.text or "" for node in iter_children(run, "t")))
                shift = get_attribute(find_child(run, "rPr"), "baseline", "0")
                tag = "" if not shift.strip("-0.% ") else "sub" if shift.startswith("-") else "sup"
                pieces.append(f"<{tag}>{text}</{tag}>" if tag else text)
            case "br":
                pieces.append("<br>")
            case "oMath":
                pieces.append(format_formula(run))
    return f"<p>{''.join(pieces)}</p>"
