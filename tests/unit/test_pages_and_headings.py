"""Chosen pages of PDF files, headings and numbered clauses, and the pages and sections of evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.document_files import make_docx, make_pdf
from support.scripts import read_perfectly

from memagent_graph import Document, DocumentStore, MemAgent, RunLog, ScriptedPolicy
from memagent_graph.documents.headings import find_headings
from memagent_graph.documents.sources import SourceMark, normalise_pages
from memagent_graph.errors import DocumentError, UnsupportedDocumentError
from memagent_graph.provenance.places import Places
from memagent_graph.run_log.exchange import export_runs
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page

pytestmark = pytest.mark.usefixtures("in_process_conversion")
QUESTION = "What is the key of harbor?"
PAGES = (
    "1. Definitions",
    "Nothing is said here of any harbor.",
    "2. Keys",
    "The key of harbor is 4711.",
    "2.1 Other keys",
    "The key of castle is 12.",
)
CONTRACT = """MASTER AGREEMENT

1. Definitions
1.1 "Agreement" means this agreement.
1.2 Term. The term is five years and
3.5 Million people read it. In
2019 Revenue was high.
2 Payment ........ 12
2. Payment
2.1 Fees
~~~~~~~~
1. Apples
2. Pears
3. Plums
2.2 Taxes and duties
ARTICLE IV TERMINATION
4.1 Termination for convenience. Either party may terminate this agreement on thirty days' notice to the other.
4.2 Either party may, having given notice in writing of thirty days at least to the other party hereto, terminate.
§ 12 Notices
Section 7 of the act says things.

# a line that stands alone

Article V
# comment
x = 1
5. Wash the car.
"""


def write_pdf(folder: Path, *pages: str) -> Path:
    path = folder / "the report.pdf"
    path.write_bytes(make_pdf(*(pages or PAGES)))
    return path


class TestChosenPages:
    @pytest.mark.parametrize(
        ("pages", "normalised"),
        [("4", "4"), ("2-4", "2-4"), (" 1 - 2 , 4 ", "1-2,4"), ("3-", "3-"), ("5–6", "5-6"), (7, "7"), ("3-3", "3")],
    )
    def test_chosen_pages_are_normalised(self, pages, normalised) -> None:
        assert normalise_pages(pages) == normalised
        assert normalise_pages(normalised) == normalised

    @pytest.mark.parametrize(
        "pages", ["", "0", "-3", "5-2", "a", "1,,2", "1-2-3", "1 2", "99999999", ",".join("1" * 2000)]
    )
    def test_invalid_page_ranges_are_refused(self, pages) -> None:
        with pytest.raises(DocumentError, match=r"does not name pages.*1-3,7"):
            normalise_pages(pages)

    def test_only_chosen_pages_are_stored(self, store, tmp_path) -> None:
        ref = store.add(Document.from_path(write_pdf(tmp_path)).only("2-3,6"))
        assert ref["pages"] == "2-3,6"
        assert store.read(ref, 0, 10_000) == "\n\n".join((PAGES[1], PAGES[2], PAGES[5]))
        assert [mark.label for mark in store.sections(ref)] == ["page 2", "page 3", "page 6"]
        document_from_bytes = Document.from_bytes(b"\r\n" + write_pdf(tmp_path).read_bytes(), "a.pdf").only("2-3,6")
        assert store.add(document_from_bytes)["key"] == ref["key"]

    async def test_a_reattached_document_keeps_its_chosen_pages(self, store, tmp_path) -> None:
        path = write_pdf(tmp_path)
        ref = store.add(Document.from_path(path).only("4"))
        store.remove(ref)
        await store.reattach(ref, Document.from_path(path))
        assert store.read(ref, 0, 100) == PAGES[3]

    @pytest.mark.parametrize(
        ("pages", "message"),
        [
            ("7", "has 6 pages, and 7 was asked for.*from 1 to 6"),
            ("5-9", "5-9 was asked.*5- goes"),
            ("9-", "9- was asked"),
        ],
    )
    def test_pages_after_the_end_are_an_error(self, store, tmp_path, pages, message) -> None:
        with pytest.raises(DocumentError, match=message):
            store.add(Document.from_path(write_pdf(tmp_path)).only(pages))

    def test_pages_cannot_be_chosen_in_a_document_without_pages(self, store, tmp_path) -> None:
        (tmp_path / "notes.txt").write_text("text")
        (tmp_path / "notes.md").write_text("# text")
        (tmp_path / "notes.docx").write_bytes(make_docx("text"))
        sources: list[Any] = [tmp_path / name for name in ("notes.txt", "notes.md", "notes.docx")]
        for source in [*sources, "text", b"text", iter(["text"])]:
            with pytest.raises(UnsupportedDocumentError, match=r"has no pages to choose.*Leave out the pages"):
                store.add(Document.of(source).only("1"))

    def test_a_read_of_chosen_pages_reads_no_others(self, make_reader, tmp_path) -> None:
        reader = make_reader()
        path = write_pdf(tmp_path)
        result = reader.read(path, QUESTION, pages="3-4")
        assert result.answer == "4711"
        assert not any("castle" in prompt for prompt in reader.policy.prompts)
        [result_of_page_4] = reader.read(path, questions=[QUESTION], pages="4")
        [quote] = result_of_page_4.evidence
        assert (quote.page, quote.section, quote.place) == (4, "page 4", "page 4"), "page numbers are those of the file"
        with pytest.raises(DocumentError, match="is already stored"):
            reader.read(result.document, QUESTION, pages="4")


class TestHeadings:
    def test_headings_of_a_contract_are_its_clauses(self) -> None:
        assert [mark.label for mark in find_headings([CONTRACT], "text/plain")] == [
            "1. Definitions", "1.1", "1.2 Term", "2. Payment", "2.1 Fees", "2.2 Taxes and duties",
            "ARTICLE IV TERMINATION", "4.1 Termination for convenience", "4.2", "§ 12 Notices",
            "a line that stands alone", "Article V",
        ]  # fmt: skip
        for mark in find_headings([CONTRACT], "text/plain"):
            assert CONTRACT[mark.start_char - 1] == "\n"
            assert CONTRACT[mark.start_char :].lstrip("# ").startswith(mark.label.split()[0])

    def test_a_number_in_a_sentence_is_not_a_heading(self) -> None:
        text = (
            "4. Conveying Copies.\n\nThe work must carry notices that it is released under the terms of section\n"
            "7. This requirement changes section 4.\n\n5. Conveying Sources.\n\nYou may.\n"
        )
        labels = [mark.label for mark in find_headings([text], "text/plain")]
        assert labels == ["4. Conveying Copies", "5. Conveying Sources"]
        text_with_line_break = text.replace(
            "7. This requirement changes section 4.", "7.  This requirement changes that to\nthe same."
        )
        assert len(find_headings([text_with_line_break], "text/plain")) == 2

    def test_comments_in_code_are_not_headings(self) -> None:
        code = "```\n# code\n```\n````\n```\n~~~\n# code\n````\n``` not code ```\n~~~ py\n```\n# code\n~~~~"
        text = f"# Title\n{code}\n## **Bold** part ##\r\ntext\n### 2.1 Clause\n"
        assert [mark.label for mark in find_headings([text], "text/markdown")] == ["Title", "Bold part", "2.1 Clause"]

    def test_headings_do_not_depend_on_how_the_text_is_split(self) -> None:
        text = CONTRACT * 2_000  # several blocks
        headings = find_headings([text], "text/plain")
        pieces = (text[start : start + 777_777] for start in range(0, len(text), 777_777))
        assert headings == find_headings(pieces, "text/plain")
        assert len(headings) > 2_000 * 10
        assert len(headings) == len(find_headings([text.replace("\n", "\r\n")], "text/plain"))

    @pytest.mark.parametrize(
        ("start", "rest"),
        [("", "9"), ("", " "), ("", "#"), ("1 ", ". "), ("1. A\n", "\n"), ("1. A\n2. B\nc\n", "3. C\n.\n")],
    )
    def test_headings_are_found_in_linear_time(self, start, rest) -> None:
        assert len(find_headings([start + rest * (2_200_000 // len(rest)), "x"], "text/plain")) <= 1

    @pytest.mark.parametrize(
        ("name", "data", "expected"),
        [
            ("a.html", b"<h1>Report</h1><p>4.1 It</p><h2>Costs</h2>", ["Report", "Report > Costs"]),
            ("a.html", b"<h1>Title alone</h1><p>4.1 Term</p><p>4.2 End</p>", ["Title alone", "4.1 Term", "4.2 End"]),
            ("a.docx", make_docx("4.1 Term", "It lasts.", "4.2 End", "It ends."), ["4.1 Term", "4.2 End"]),
        ],
    )
    def test_headings_are_detected_if_the_converter_gives_none_but_a_title(
        self, name: str, data: bytes, expected: list[str], store: DocumentStore
    ) -> None:
        ref = store.add(Document.from_bytes(data, name))
        assert [mark.label for mark in store.headings(ref)] == expected
        store.remove(ref)
        assert not list((store.root / "sections").iterdir())


class TestEvidence:
    @pytest.fixture
    def reader(self, make_reader, tmp_path) -> MemAgent:
        reader: MemAgent = make_reader(ScriptedPolicy(read_perfectly), run_log=tmp_path / "runs.sqlite")
        return reader

    def test_a_quote_has_a_page_a_section_and_a_link_to_the_page(self, reader, tmp_path) -> None:
        path = write_pdf(tmp_path)
        result = reader.read(path, QUESTION)
        [quote] = result.evidence
        assert (quote.page, quote.section) == (4, "2. Keys")
        assert quote.place == "page 4, 2. Keys"
        assert quote.link == f"{path.as_uri()}#page=4"
        assert "the%20report.pdf#page=4" in quote.link
        [quote_json] = result.to_dict()["evidence"]
        assert (quote_json["page"], quote_json["section"], quote_json["link"]) == (4, "2. Keys", quote.link)
        page = render_page(build_timeline(result.view()))
        assert '"section":"page 4, 2. Keys"' in page
        assert f'"pdf":"{path.as_uri()}"' in page
        served_page = render_page(build_timeline(result.view()), document_link="/#document/1")
        assert path.as_uri() not in served_page

    @pytest.mark.parametrize(
        ("name", "text", "section"),
        [
            ("a.md", "# Report\n\nNo.\n\n## 4.2 Keys\n\nThe key of harbor is 4711.\n\n## 4.3 Rest", "4.2 Keys"),
            ("a.html", "<h1>Ports</h1><p>Old.<h2>Keys</h2><p>The key of harbor is 4711.<h2>Ships</h2>", "Ports > Keys"),
        ],
    )
    def test_a_quote_without_pages_has_only_a_section(self, reader, name, text, section) -> None:
        (quote, *_) = reader.read(Document.from_bytes(text.encode(), name), QUESTION).evidence
        assert (quote.page, quote.section, quote.place, quote.link) == (None, section, section, None)

    def test_a_quote_of_an_unknown_file_is_linked_by_name(self, reader, tmp_path) -> None:
        document = Document.from_bytes(write_pdf(tmp_path).read_bytes(), "javascript:alert(1).pdf")
        [quote] = reader.read(document, QUESTION).evidence
        assert quote.link == "javascript%3Aalert%281%29.pdf#page=4"

    def test_the_path_of_a_file_is_not_in_exports_or_redacted_logs(self, reader, tmp_path) -> None:
        path = write_pdf(tmp_path)
        assert reader.read(path, QUESTION).document["path"] == str(path)
        export_runs(reader.run_log, tmp_path / "runs.parquet")
        assert str(tmp_path) not in repr(parquet.read_table(tmp_path / "runs.parquet").to_pylist())
        log = RunLog(tmp_path / "other.sqlite", redact=lambda kind, text: text.replace("report", "[hidden]"))
        with reader.copy(run_log=log) as other_reader:
            run = log.get(other_reader.read(path, QUESTION).run_id)
        assert run.document["name"] == "the [hidden].pdf"
        assert "path" not in run.document
        log.close()


def test_a_heading_ends_with_its_source() -> None:
    places = Places(
        sections=[SourceMark(0, "a.txt"), SourceMark(100, "b.txt")],
        headings=[SourceMark(20, "1. One"), SourceMark(150, "2. Two")],
    )
    assert [places.find_section(char) for char in (0, 30, 120, 160)] == ["a.txt", "1. One", "b.txt", "2. Two"]
    assert places.find_page(30) is None
    places = Places([SourceMark(50, "page 2"), SourceMark(60, "page 3")])
    assert [places.find_section(char) for char in (49, 50, 59, 60)] == [None, "page 2", "page 2", "page 3"]
