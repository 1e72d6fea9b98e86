"""Omissions, the parts of a file that are not text: they are events, a reason to stop, or the task of a converter."""

from __future__ import annotations

import pytest
from support.made_documents import make_documents

from memagent_graph.converters import Block, Omission
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.documents.omissions import list_document_events, load_omissions
from memagent_graph.errors import DocumentError, IncompleteDocumentError, UnsupportedDocumentError
from memagent_graph.events import EventKind
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.reader import MemAgent
from memagent_graph.storage.private_files import get_default_store_path
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import load_run_view
from memagent_mcp.tool_results import format_run
from memagent_serve.chat_replies import describe_read
from memagent_serve.request_texts import iter_stored_pieces

MIXED_CASE = next(case for case in make_documents() if case.name == "mixed.pdf")
IMAGE_PAGES = "pages that are images (1: page 2)"


def make_mixed_pdf():
    return Document.from_bytes(MIXED_CASE.data, name=MIXED_CASE.name)


def make_agent(**settings):
    return MemAgent(ScriptedPolicy(lambda *_: "\\boxed{x}"), tokenizer="embedded", **settings)


@pytest.mark.usefixtures("in_process_conversion")
def test_every_view_shows_the_omission():
    with make_agent() as agent:
        result = agent.read(make_mixed_pdf(), "What?")
        assert result.stop_reason.value == "answered"
        assert [(event.kind, event.chunk_index) for event in list_document_events(result.document)] == [
            (EventKind.DOCUMENT_INCOMPLETE, None)
        ]
        assert result.events[0].detail.startswith(f"Not in the text: {IMAGE_PAGES}. Run optical character recognition")
        assert not result.is_whole
        assert IMAGE_PAGES in result.extent
        assert result.to_dict()["events"][0]["kind"] == "document_incomplete"
        assert any(IMAGE_PAGES in detail for detail in describe_read(result, [])["not_in_text"])
        timeline = build_timeline(load_run_view(agent.run_log, result.run_id, DocumentStore(get_default_store_path())))
    assert timeline.events[EventKind.DOCUMENT_INCOMPLETE] == 1
    assert IMAGE_PAGES in render_page(timeline)
    assert "document_incomplete 1" in format_run(timeline)


@pytest.mark.usefixtures("in_process_conversion")
def test_on_incomplete_stop_refuses_an_incomplete_document():
    with make_agent(on_incomplete="stop") as agent:
        with pytest.raises(IncompleteDocumentError, match=r"pages that are images \(1: page 2\).*on_incomplete report"):
            agent.read(make_mixed_pdf(), "What?")
        with pytest.raises(IncompleteDocumentError):
            agent.read(agent.store.add(make_mixed_pdf()), "What?")
        assert agent.read(Document.from_text("All of it is text."), "What?").is_whole


CONVERTERS = """
from memagent_graph.converters import Block, Omission

def ocr(source):
    for part in source.convert():
        yield Block(f"[read from {part.place}]") if isinstance(part, Omission) else part

def decline(source):
    return None

def describe(source):
    return Block("# All of " + source.kind, 0, (1,)), Omission("scans", 2)

def fail(source):
    raise OSError("no scanner")

def yield_number(source):
    yield 7
"""


@pytest.fixture
def converter_store(store, tmp_path, monkeypatch):
    (tmp_path / "own_converter.py").write_text(CONVERTERS)
    monkeypatch.chdir(tmp_path)
    return store


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own_converter.py:ocr", "Before.\n\n\n\n[read from page 2]After."),
        ("own_converter:ocr", "Before.\n\n\n\n[read from page 2]After."),
        ("own_converter.py:decline", "Before.\n\n\n\nAfter."),
        ("own_converter.py:describe", "# All of pdf"),
        ("pdf", "Before.\n\n\n\nAfter."),
    ],
)
def test_a_named_converter_converts_the_file(name, text, converter_store):
    store = converter_store.with_options(converter=name)
    ref = store.add(make_mixed_pdf())
    assert store.read(ref, 0, ref["size"]) == text
    assert ("omissions" in ref) == ("[read" not in text)


@pytest.mark.usefixtures("in_process_conversion")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own_converter.py:fail", "failed at mixed.pdf: OSError: no scanner"),
        ("own_converter.py:yield_number", "yields blocks, omissions and texts, not a int"),
        ("nowhere.py:convert", "there is no file"),
        ("~nouser/nowhere.py:convert", "home directory"),
    ],
)
def test_a_failing_converter_is_an_error_with_its_reason(name, error, converter_store):
    with pytest.raises(DocumentError, match=error):
        converter_store.with_options(converter=name).add(make_mixed_pdf())


@pytest.mark.usefixtures("in_process_conversion")
def test_a_named_converter_converts_unknown_types_but_no_text(converter_store):
    drawing = Document.from_bytes(b"PK\x03\x04\x00\x00\xff\xfe", "plan.xyz")
    ref = converter_store.with_options(converter="own_converter.py:describe").add(drawing)
    assert (converter_store.read(ref, 0, ref["size"]), ref["media_type"]) == ("# All of xyz", "application/x-xyz")
    with pytest.raises(DocumentError, match="has no 'missing'"):
        converter_store.with_options(converter="own_converter.py:missing").add(drawing)
    with pytest.raises(UnsupportedDocumentError, match="xyz"):
        converter_store.with_options(converter="own_converter.py:decline").add(drawing)
    notes = Document.from_bytes(b"As it is.", "notes.xyz")
    text_ref = converter_store.with_options(converter="own_converter.py:describe").add(notes)
    assert converter_store.read(text_ref, 0, text_ref["size"]) == "As it is."


@pytest.mark.usefixtures("in_process_conversion")
def test_the_setting_converter_is_not_logged(converter_store):
    with make_agent(converter="own_converter.py:ocr") as agent:
        result = agent.read(make_mixed_pdf(), "What?")
        assert result.is_whole
        assert "converter" not in agent.run_log.get(result.run_id).settings


def test_many_omissions_are_summarized_in_a_short_list(store):
    pages = [Omission("scans", f"page {number}", "Do.") for number in (1, 2, 3, 7, 9, 10)]
    files = [Omission("files", f"file {number}") for number in range(500)]
    kinds = [Omission(f"kind {number}") for number in range(500)]
    parts = [Block("text"), *pages, *files, *kinds]
    summary = store.add(Document.from_pieces(lambda: iter(parts)))["omissions"]
    assert summary[0] == {"what": "scans", "count": 6, "places": "pages 1-3, page 7, pages 9-10", "remedy": "Do."}
    assert summary[1]["count"] == 500
    assert len(str(summary)) < 4_000
    assert load_omissions({"omissions": summary[:1]}) == [Omission("scans", summary[0]["places"], "Do.", 6)]


def test_a_copied_document_keeps_labels_headings_and_omissions(store):
    blocks = Block("One. ", "first"), Omission("scans", "2nd"), Block("Two.", "third", ("Two",)), Block("é", "last")
    ref = store.add(Document.from_pieces(lambda: iter(blocks)))
    copied_ref = store.add(Document.from_pieces(lambda: iter_stored_pieces(store, ref)))
    for document_ref in (ref, copied_ref):
        assert document_ref["key"] == ref["key"]
        labels = [(mark.start_char, mark.label) for mark in store.sections(document_ref)]
        assert labels == [(0, "first"), (5, "third"), (9, "last")]
        assert [(mark.start_char, mark.label) for mark in store.headings(document_ref)] == [(5, "Two")]
        assert document_ref["omissions"] == [{"what": "scans", "count": 1, "places": "2nd", "remedy": ""}]
