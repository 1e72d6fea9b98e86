"""Renders a report as Markdown and as one HTML page, and escapes text for these formats and for spreadsheets.

Documents are not trusted. Their text and the text of the policy may contain a spreadsheet formula, a link, or a remote
image; a report shows all of it as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from string import Template
from typing import Final

from memagent_graph.plain_text import make_printable
from memagent_graph.timeline.page import escape_html, format_page_title, make_content_policy, read_resource

_FORMULA_START: Final = re.compile(r"^\s*[=+\-@\uff1d\uff0b\uff0d\uff20\u2212|%]|^[\t\r\n]")
_MARKDOWN_SYNTAX: Final = re.compile(r"([\\`*_{}\[\]|<>~$&#]|!(?=\[))|(^[+\-=:!])|(?<=^)(\d+)([.)])")
_LINK_TEXT: Final = re.compile(r"(?i)\b(https?|ftp|file|mailto|javascript|data)(:)|(?<![\w.])(www)(\.)|(@)")
_WORD_JOINER: Final = "\u2060"
"""The word joiner: it is invisible, and programs do not turn an address that contains it into a link."""


def escape_for_spreadsheet(text: str) -> str:
    """Return a text that a spreadsheet shows as text. An apostrophe is put before a text that would be a formula."""
    text = make_printable(text)
    return f"'{text}" if _FORMULA_START.match(text) else text


def escape_markdown(text: str) -> str:
    """Escape a text, in one line, so that Markdown shows it as text: no link, image, HTML, TeX, list or table cell."""
    line = " ".join(make_printable(text).split())
    line = _LINK_TEXT.sub(lambda match: "".join(filter(None, match.groups())) + _WORD_JOINER, line)
    return _MARKDOWN_SYNTAX.sub(lambda match: f"{match[3]}\\{match[4]}" if match[3] else f"\\{match[0]}", line)


@dataclass(frozen=True, slots=True)
class Passage:
    """One line of a section. The texts are not escaped."""

    text: str
    source: str = ""
    """The document that makes the statement; shown before the text."""
    number: int | None = None
    """The number by which other passages cite it."""
    citations: tuple[int, ...] = ()
    quote: str = ""
    """Words of a document, shown at the end between quotation marks."""
    warning: str = ""
    """A warning about the passage."""
    details: tuple[str, ...] = ()
    """Lines to show below the passage."""


@dataclass(frozen=True, slots=True)
class ContentSection:
    """A heading with passages, a table, or a note if there are none."""

    heading: str
    passages: tuple[Passage, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of cells; the first row has the column headings, and the first cell of each row is the row's heading."""
    note: str = ""


# Markdown


def render_markdown(title: str, summary: str, sections: Iterable[ContentSection]) -> str:
    """Return Markdown without links, images, HTML or TeX of documents."""
    heading = f"# {escape_markdown(title)}\n\n{escape_markdown(summary)}"
    rendered_sections = ["\n".join(_iter_markdown_lines(section)) for section in sections]
    return "\n\n".join([heading, *rendered_sections]) + "\n"


def _iter_markdown_lines(section: ContentSection) -> Iterator[str]:
    yield f"## {escape_markdown(section.heading)}"
    yield ""
    for passage in section.passages:
        number_mark = "" if passage.number is None else f"[{passage.number}] "
        source = f"{escape_markdown(passage.source)}: " if passage.source else ""
        quote = f": “{escape_markdown(passage.quote)}”" if passage.quote else ""
        citations = "".join(f"[{citation}]" for citation in passage.citations)
        warning = f"**[{escape_markdown(passage.warning)}]**" if passage.warning else ""
        line = f"{number_mark}{source}{escape_markdown(passage.text)}{quote}"
        yield "- " + " ".join(filter(None, (line, citations, warning)))
        yield from (f"  - {escape_markdown(detail)}" for detail in passage.details)
    for index, row in enumerate(section.table):
        yield "| " + " | ".join(map(escape_markdown, row)) + " |"
        if index == 0:
            yield "|" + "---|" * len(row)
    if section.note:
        yield escape_markdown(section.note)


# HTML


def render_html(title: str, report_id: str, summary: str, sections: Iterable[ContentSection]) -> str:
    """Return a page without scripts that loads nothing and links only within itself. Its encoding is UTF-8."""
    style = read_resource("page.css") + read_resource("report_page.css", "memagent_report")
    return Template(read_resource("report_page.html", "memagent_report")).substitute(
        policy=make_content_policy(style),
        title=format_page_title(title),
        style=style,
        report_id=_escape(report_id),
        question=_escape(title),
        summary=_escape(summary),
        sections="\n".join(map(_render_section, sections)),
    )


def _escape(text: str) -> str:
    return escape_html(make_printable(text))


def _render_section(section: ContentSection) -> str:
    html_parts = [f"<h2>{_escape(section.heading)}</h2>"]
    if section.passages:
        html_parts.append(f'<ul class="passages">{"".join(map(_render_passage, section.passages))}</ul>')
    if section.table:
        headings, *rows = section.table
        columns = "".join(f'<th scope="col">{_escape(heading)}</th>' for heading in headings)
        body = "".join(
            f'<tr><th scope="row">{_escape(name)}</th>'
            + "".join(f"<td>{_escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for name, *cells in rows
        )
        html_parts.append(
            f'<div class="wide"><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'
        )
    if section.note:
        html_parts.append(f'<p class="hint">{_escape(section.note)}</p>')
    return f"<section>{''.join(html_parts)}</section>"


def _render_passage(passage: Passage) -> str:
    class_attribute = ' class="unquoted"' if passage.warning else ""
    anchor = "" if passage.number is None else f' id="quote-{passage.number}"'
    number_mark = "" if passage.number is None else f"[{passage.number}] "
    source = f'<span class="source">{_escape(passage.source)}:</span> ' if passage.source else ""
    quote = f"<br><q>{_escape(passage.quote)}</q>" if passage.quote else ""
    citations = "".join(
        f'<a class="reference" href="#quote-{citation}">[{citation}]</a>' for citation in passage.citations
    )
    warning = f'<span class="mark">{_escape(passage.warning)}</span>' if passage.warning else ""
    details = "".join(f"<li>{_escape(detail)}</li>" for detail in passage.details)
    details_list = f"<ul>{details}</ul>" if details else ""
    content = f"{number_mark}{source}{_escape(passage.text)}{quote}{citations}{warning}{details_list}"
    return f"<li{class_attribute}{anchor}>{content}</li>"
