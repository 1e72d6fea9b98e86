"""Runs that answer from an excerpt in place of chunks: every view of such a run has its quotes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.memory import create_connected_server_and_client_session
from rich.console import Console
from support.scripts import extract, make_document

from memagent_graph import DocumentStore, LocalPolicy, MemAgent, RunLog, ScriptedPolicy
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import RunView, load_run_view
from memagent_mcp import make_server
from memagent_serve.api_errors import APIError
from memagent_serve.live.live_events import format_passage, format_sources

TEXT = make_document(
    {0.2: "\n\nThe key of harbor is 4711, as all know.\n\n", 0.8: "The key of castle is 12."}, words=900
)
QUOTE = "The key of harbor is 4711, as all know."
ANSWER = "The key of harbor is 4711"
QUESTION = "What is the key of harbor?"
STRATEGY = "retrieval:chunks=2:chunk_tokens=40"


def answer_from_excerpt(prompt: str) -> str:
    return "\\boxed{" + (ANSWER if "harbor is 4711" in extract(prompt, "text") else "?") + "}"


@pytest.fixture
def view(make_reader: Any, tmp_path: Path) -> RunView:
    """A logged run whose answer comes from an excerpt."""
    log = RunLog(tmp_path / "runs.sqlite")
    reader = make_reader(ScriptedPolicy(answer_from_excerpt), strategy=STRATEGY, run_log=log)
    return load_run_view(log, reader.read(TEXT, QUESTION).run_id, DocumentStore(tmp_path / "documents"))


def print_timeline(view: RunView) -> str:
    output = StringIO()
    Console(file=output, width=300).print(render_timeline(build_timeline(view)))
    return output.getvalue()


def test_the_terminal_shows_the_quotes_and_no_empty_memory(view: RunView) -> None:
    text, start = print_timeline(view), TEXT.index(QUOTE)
    assert f"What supports the answer\n  “{QUOTE}”  characters {start:,}-{start + len(QUOTE):,}" in text
    assert re.search(r"shown +2 passages of \d+ tokens in total", text)
    for words in ("memory", "0 chunks"):
        assert words not in text


def test_a_run_whose_document_is_gone_is_not_shown_as_a_run_without_quotes(view: RunView, tmp_path: Path) -> None:
    other_store = DocumentStore(tmp_path / "elsewhere")
    view_without_document = load_run_view(RunLog(tmp_path / "runs.sqlite"), view.run_id, other_store)
    assert "the document's text is no longer stored" in print_timeline(view_without_document)
    assert "no verbatim quote" not in print_timeline(view_without_document)


@pytest.mark.parametrize("words", ["not stated", "Nicht genannt.", "記載なし"])
def test_an_answer_not_stated_has_no_quotes(words: str, make_reader: Any) -> None:
    reader = make_reader(ScriptedPolicy(lambda _: f"\\boxed{{{words}}}"), strategy=STRATEGY)
    assert "What supports the answer\nnothing that was shown" in print_timeline(reader.read(TEXT, QUESTION).view())


def test_the_timeline_page_has_the_quotes(view: RunView) -> None:
    page = render_page(build_timeline(view))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    (quote,) = data["excerpt"]
    start, end = quote["span"]
    assert quote["text"] == TEXT[start:end] == QUOTE
    assert TEXT[start - len(quote["before"]) : end + len(quote["after"])] == quote["before"] + QUOTE + quote["after"]
    assert f" of {view.trace.tokens_shown:,} tokens" in dict(data["facts"])["shown"]


def test_the_live_page_links_the_answer_to_its_passage(view: RunView, tmp_path: Path) -> None:
    (line,) = format_sources(build_timeline(view))
    (quote,) = line["quotes"]
    assert (line["line"], quote["text"]) == (ANSWER, QUOTE)
    store = DocumentStore(tmp_path / "documents")
    passage = format_passage(view, store, quote["start"], quote["end"])
    assert passage["before"] + passage["passage"] + passage["after"] == TEXT
    with pytest.raises(APIError, match="has not read this passage"):
        format_passage(view, store, 0, 1)


def test_a_memory_written_from_an_excerpt_has_quotes(tmp_path: Path) -> None:
    text = make_document({0.2: "The access code of the quiet falcon is 48213.", 0.8: "A falcon flew by."}, words=900)
    with MemAgent(LocalPolicy.embedded(), store=tmp_path, run_log=False, strategy="retrieval:chunks=2") as reader:
        result = reader.read(text, "What is the access code of the quiet falcon?")
    assert result.updates[-1].chunk_index is None
    timeline = print_timeline(result.view())
    assert re.search(r"What supports the answer\n  “.*48213", timeline)
    assert "Where memory changed" in timeline


@asynccontextmanager
async def client(reader: MemAgent) -> AsyncIterator[Any]:
    async with reader, create_connected_server_and_client_session(make_server(reader)) as session:
        yield session


async def test_mcp_results_have_quotes_from_the_excerpt_in_context(make_reader: Any, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "runs.sqlite")
    reader = make_reader(ScriptedPolicy(answer_from_excerpt), strategy=STRATEGY, run_log=log)
    async with client(reader) as session:
        read = await session.call_tool("read_document", {"text": TEXT, "questions": QUESTION})
        assert not read.isError, read.content
        (answer,) = read.structuredContent["answers"]
        (quote,) = answer["evidence"]
        assert quote["quote"] == QUOTE
        assert len(QUOTE) < len(quote["context"]) and quote["context"] in " ".join(TEXT.split())
        assert set(quote["context"].split()) <= set(TEXT.split()), "the context has whole words"
        run = await session.call_tool("show_run", {"run_id": answer["run_id"]})
        assert not run.isError, run.content
        assert QUOTE in run.structuredContent["evidence"][0]["quote"]
        assert f"“{QUOTE}”" in run.content[0].text
