"""A prompt that the server cut is shown at every door: in results, logs, pages, replies and tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from support.command_line import memagent
from support.scripts import document_with
from support.server_dialects import counting_server

from memagent_graph import MemAgent, ReadResult, RunLog, load_tokenizer
from memagent_graph.documents import DocumentStore
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.view import load_run_view
from memagent_mcp.tool_results import format_run
from memagent_serve.chat_replies import read_details
from memagent_serve.live.live_events import format_update

QUESTION = "What is the key of harbor?"
TEXT = document_with({0.3: "The key of harbor is 4711."}, words=500)
BUDGET = {"chunk_tokens": 400, "memory_tokens": 60, "question_tokens": 40, "answer_tokens": 40}
OPTIONS = [
    *("--tokenizer", "embedded"),
    *(part for name, value in BUDGET.items() for part in (f"--{name.replace('_', '-')}", str(value))),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with counting_server(load_tokenizer("embedded").count, window=250) as server:
        server.models = None
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        (tmp_path / "books").mkdir()
        (tmp_path / "books" / "book.txt").write_text(TEXT)
        yield tmp_path


def result_of(place: Path) -> ReadResult:
    with MemAgent(tokenizer="embedded", store=place / "texts", run_log=place / "log.sqlite", **BUDGET) as reader:
        return reader.read(TEXT, QUESTION)


def timeline_of(place: Path) -> Any:
    result = result_of(place)
    return build_timeline(load_run_view(RunLog(place / "log.sqlite"), result.run_id, DocumentStore(place / "texts")))


def rows_of(place: Path) -> str:
    memagent("corpus", place / "books", "-q", QUESTION, "--out", place / "table", *OPTIONS)
    parts = [str(part) for part in (place / "table").glob("*.parquet")]
    return str(pyarrow.dataset.dataset(parts).to_table().to_pylist())


DOORS: dict[str, Callable[[Path], str]] = {
    "result": lambda place: str([event.kind.value for event in result_of(place).events]),
    "command line": lambda place: (
        memagent("read", place / "books" / "book.txt", "-q", QUESTION, "--json", *OPTIONS).stdout
    ),
    "log": lambda place: (result_of(place), memagent("show", "latest", "--log", place / "log.sqlite").stdout)[1],
    "page": lambda place: render_page(timeline_of(place)),
    "live page": lambda place: json.dumps([format_update(update, "") for update in result_of(place).updates]),
    "serve": lambda place: json.dumps(read_details(result_of(place), ["upload"])),
    "mcp": lambda place: format_run(timeline_of(place)),
    "corpus": rows_of,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_cut_prompt_is_shown(door: str, place: Path) -> None:
    assert "prompt_cut" in DOORS[door](place)
