"""Random replies, requests and untrusted files are read, or refused with an error of this package.

At full size, each test runs for an hour, or for `MEMAGENT_FUZZ_SECONDS`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import ormsgpack
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.document_files import make_docx, make_pdf
from support.serving import build_reader, serve

from memagent_graph import Document, DocumentStore, MemAgent, ScriptedPolicy
from memagent_graph.documents import find_store
from memagent_graph.errors import DocumentError, MemAgentError
from memagent_graph.policies.replies import GenerationFailedError, MalformedReplyError, decode_completion
from memagent_graph.policy import SamplingParams
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs, import_runs
from memagent_graph.storage.state_serializer import CompressedSerializer
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import load_run_view

FUZZ_SECONDS = int(os.environ.get("MEMAGENT_FUZZ_SECONDS", "3600"))
BATCH_SIZE = 20
Size = Callable[[int, int], int]


def explore(seconds: float, check: Callable[..., None], *inputs: st.SearchStrategy[Any]) -> int:
    """Check batches of inputs for this many seconds, at least one batch, and return the number of inputs."""
    start, batches = time.monotonic(), 0
    while not batches or time.monotonic() - start < seconds:
        options = settings(
            max_examples=BATCH_SIZE,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=[*HealthCheck],
        )
        options(seed(batches)(given(*inputs)(check)))()
        batches += 1
    return batches * BATCH_SIZE


def json_values(*names: str) -> st.SearchStrategy[Any]:
    """Return a strategy for JSON values whose objects often have some of these names as keys."""
    texts = st.one_of(
        st.sampled_from(["", "x", "user", "text", "\x00", "\ud800", "é", "[DONE]", *names]), st.text(max_size=9)
    )
    numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 2**63, 2**64, 1e308]))
    plain = st.one_of(st.none(), st.booleans(), numbers, texts)
    keys = st.one_of(st.sampled_from(names), texts) if names else texts
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5))


@st.composite
def change_json(draw: st.DrawFn, original: Any, inner: st.SearchStrategy[Any]) -> Any:
    """Return a JSON value with a few of its parts replaced, removed or duplicated (in an object, under another key)."""
    value = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        container = value
        while isinstance(container, dict | list) and container:
            keys = sorted(container) if isinstance(container, dict) else range(len(container))
            key = draw(st.sampled_from(keys))
            item = container[key]
            if not isinstance(item, dict | list) or not item or draw(st.booleans()):
                change = draw(st.sampled_from(["replace", "replace", "remove", "duplicate"]))
                if change == "remove":
                    del container[key]
                elif change == "duplicate" and isinstance(container, list):
                    container.insert(key, item)
                else:
                    container[key] = draw(inner if change == "replace" else st.sampled_from([*container.values()]))
                break
            container = item
    return value


@st.composite
def change_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes with a few slices replaced, removed or doubled."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([1, 8, 64])))
        data = (
            data[:start] + draw(st.sampled_from([b"", data[start:end] * 2, draw(st.binary(max_size=8))])) + data[end:]
        )
    return data


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


REPLY = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "finish_reason": "stop", "token_ids": [3], "text": "a", "stop_reason": None,
                 "message": {"role": "assistant", "content": "a", "refusal": None, "reasoning": "b", "tool_calls": []},
                 "logprobs": {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": []}]}}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3,
              "prompt_tokens_details": {"cached_tokens": 1}}, "error": None,
}  # fmt: skip
REPLIES = json_values(
    "choices", "message", "content", "text", "usage", "error", "logprobs", "logprob", "index", "delta"
)


def check_reply(content: bytes, logprobs: bool) -> None:
    try:
        completion = decode_completion(content, model="m", sampling=SamplingParams(logprobs=logprobs))
    except (GenerationFailedError, MalformedReplyError):
        return
    assert isinstance(completion.text, str)
    assert isinstance(completion.model, str)


def test_a_reply_is_a_completion_or_malformed(size: Size, record_property: Callable[[str, Any], None]) -> None:
    bodies = st.one_of(change_json(REPLY, REPLIES).map(to_json), REPLIES.map(to_json), change_bytes(to_json(REPLY)))
    record_property("inputs", explore(size(0, FUZZ_SECONDS), check_reply, bodies, st.booleans()))


FILES = {
    "paper.pdf": make_pdf("The first page.", "The second one.", "And the last."),
    "letter.docx": make_docx("Dear reader,", "this is a letter."),
    "page.html": b"<!doctype html><html><head><title>T</title></head><body><h1>One</h1><p>Two <b>three</b></p></body>",
}


def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    store, outcomes = DocumentStore(tmp_path), Counter[str]()

    def check_file(name: str, content: bytes) -> None:
        try:
            ref = store.add(Document.from_bytes(content, name))
        except DocumentError as error:
            assert name in error.message
            outcomes["refused"] += 1
        else:
            assert store.read(ref, 0, ref["size"])
            outcomes["read"] += 1

    inputs = st.one_of(st.tuples(st.just(name), change_bytes(data)) for name, data in FILES.items())
    record_property("inputs", explore(size(0, FUZZ_SECONDS), lambda drawn: check_file(*drawn), inputs))
    record_property("outcomes", dict(outcomes))
    assert len(outcomes) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a log of one run, its checkpoints, and its export."""
    with open_reader(tmp_path) as agent:
        agent.read("The tower was built in 1904. " * 60, "When?", run_id="r")
    with closing(RunLog(tmp_path / "runs.sqlite")) as log:
        log.reward("r", 1.0)
        export_runs(log, tmp_path / "runs.parquet")
    return tmp_path


def open_reader(folder: Path) -> MemAgent:
    return build_reader(None, folder, policy=ScriptedPolicy(lambda prompt: r"\boxed{1904}"))


RUN_PARTS = json_values("kind", "rule", "path", "store", "key", "name", "size", "call_id", "text", "memory", "position")


def check_log(path: Path, folder: Path) -> None:
    """Show all runs of a log as a page and in the terminal."""
    with closing(RunLog(path)) as log:
        for run in log.runs():
            view = load_run_view(log, run.run_id, find_store(run.document, folder / "runs.sqlite"))
            timeline = build_timeline(view)
            render_page(timeline)
            render_timeline(timeline)


def test_an_untrusted_export_is_imported_and_shown_or_refused(
    folder: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    export, source, target = folder / "runs.parquet", folder / "changed.parquet", folder / "other.sqlite"
    table = pq.read_table(export)
    rows = table.to_pylist()
    json_columns = {name for name, value in rows[0].items() if isinstance(value, str) and value[:1] in {"[", "{"}}

    def check_import(content: bytes | list[dict[str, Any]]) -> None:
        target.unlink(missing_ok=True)
        try:
            if isinstance(content, bytes):
                source.write_bytes(content)
            else:
                pq.write_table(type(table).from_pylist(content, table.schema), source)
        except (ValueError, TypeError, OverflowError):  # Arrow itself cannot write it
            return
        try:
            with closing(RunLog(target)) as log:
                import_runs(log, source)
            check_log(target, folder)
        except MemAgentError as error:
            assert error.message

    @st.composite
    def change_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
        changed_rows = [dict(row) for row in rows]
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from(table.column_names))
            original = rows[0][name]
            if name in json_columns:
                value = draw(change_json(json.loads(original), RUN_PARTS).map(json.dumps))
            elif isinstance(original, list):
                value = draw(st.sampled_from([None, [], original * 2]))
            else:
                value = draw(st.one_of(st.none(), st.integers(-9, 2**62), st.floats(), st.text(max_size=9)))
            for row in changed_rows if name.startswith("run_") or draw(st.booleans()) else changed_rows[:1]:
                row[name] = value
        return changed_rows

    inputs = change_rows() | change_bytes(export.read_bytes())
    record_property("inputs", explore(size(0, FUZZ_SECONDS), check_import, inputs))


def test_an_untrusted_log_is_shown_and_exported_or_refused(
    folder: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    log_bytes, log_copy = (folder / "runs.sqlite").read_bytes(), folder / "foreign.sqlite"
    with closing(sqlite3.connect(folder / "runs.sqlite")) as file:
        file.row_factory = sqlite3.Row
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [(table, dict(row)) for table in tables for row in file.execute(f"SELECT * FROM {table} LIMIT 1")]
    cells = [(table, column, value) for table, row in rows for column, value in row.items()]

    def check_log_copy(content: bytes | None, change: tuple[str, str, Any] | None) -> None:
        for path in folder.glob("foreign.*"):
            path.unlink()
        log_copy.write_bytes(log_bytes if content is None else content)
        if change is not None:
            table, column, value = change
            with suppress(sqlite3.Error, OverflowError, UnicodeError), closing(sqlite3.connect(log_copy)) as file, file:
                file.execute(f"UPDATE {table} SET {column} = ?", (value,))
        try:
            check_log(log_copy, folder)
            with closing(RunLog(log_copy)) as log:
                export_runs(log, folder / "foreign.parquet")
        except MemAgentError as error:
            assert error.message

    @st.composite
    def draw_change(draw: st.DrawFn) -> tuple[str, str, Any]:
        table, column, original = draw(st.sampled_from(cells))
        values = st.one_of(st.none(), st.integers(-9, 2**62), st.floats(), st.text(max_size=9), st.binary(max_size=9))
        if isinstance(original, str) and original[:1] in {"[", "{"}:
            values |= change_json(json.loads(original), RUN_PARTS).map(json.dumps)
        elif isinstance(original, bytes):
            values |= change_bytes(original)
        return table, column, draw(values)

    inputs = st.tuples(st.none(), draw_change()) | st.tuples(change_bytes(log_bytes), st.none())
    record_property("inputs", explore(size(0, FUZZ_SECONDS), lambda drawn: check_log_copy(*drawn), inputs))


def test_an_untrusted_checkpoint_is_resumed_or_refused(
    folder: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    original = (folder / "checkpoints.sqlite").read_bytes()
    with closing(sqlite3.connect(folder / "checkpoints.sqlite")) as file:
        newest = "checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints)"
        columns = ("type", "checkpoint", "metadata", "parent_checkpoint_id", "checkpoint_ns")
        (row,) = file.execute(f"SELECT {', '.join(columns)} FROM checkpoints WHERE {newest}")

    def check_resume(column: str, value: Any, is_state: bool) -> None:
        for path in folder.glob("checkpoints.sqlite-*"):
            if path.is_file():
                path.unlink()
        (folder / "checkpoints.sqlite").write_bytes(original)
        with suppress(sqlite3.IntegrityError), closing(sqlite3.connect(folder / "checkpoints.sqlite")) as file, file:
            if is_state and column == "checkpoint":
                file.execute(f"UPDATE checkpoints SET type = 'msgpack' WHERE {newest}")
            file.execute(f"UPDATE checkpoints SET {column} = ? WHERE {newest}", (value,))
        try:
            with open_reader(folder) as agent:
                agent.resume("r")
                agent.history("r")
        except MemAgentError as error:
            assert error.message

    state = CompressedSerializer().loads_typed((row[0], row[1]))
    state_values = json_values(*state, *state["channel_values"])
    states = change_json(json.loads(json.dumps(state, default=str)), state_values).map(to_msgpack)
    inputs = st.one_of(
        st.tuples(st.just("checkpoint"), states, st.just(True)),
        st.tuples(st.just("checkpoint"), change_bytes(row[1]), st.just(False)),
        st.tuples(st.just("metadata"), json_values("call_id", "source", "writes").map(to_json), st.just(False)),
        st.tuples(
            st.sampled_from(columns), st.one_of(st.none(), st.text(max_size=5), st.binary(max_size=9)), st.just(False)
        ),
    )
    record_property("inputs", explore(size(0, FUZZ_SECONDS), lambda drawn: check_resume(*drawn), inputs))


def to_msgpack(value: Any) -> bytes:
    """Return a value as msgpack, or an invalid byte if msgpack cannot represent it."""
    try:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        return ormsgpack.packb(json.loads(text), option=ormsgpack.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):
        return b"\xc1"


LONG_TEXT = "The key of harbor is 4711. " * 400
REQUEST = {
    "model": "fake", "stream": False, "n": 1, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"],
    "max_tokens": 9,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": LONG_TEXT},
                                     {"type": "file", "file": {"filename": "a.txt", "file_data": "aGVsbG8gd29ybGQ="}}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        {"role": "user", "content": "What is the key of harbor?"},
    ],
}  # fmt: skip
REQUESTS = json_values("messages", "role", "content", "type", "text", "file", "file_id", "source", "data", "input_text")


def test_a_request_is_answered_or_refused_in_the_format_of_the_api(
    tmp_path: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    policy = ScriptedPolicy(lambda prompt: r"\boxed{4711}")
    with serve(None, tmp_path, policy=policy, max_body=2**20) as server, httpx2.Client(timeout=60) as client:

        def check_request(path: str, body: bytes) -> None:
            reply = client.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code < 500, reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        short = {**REQUEST, "messages": [{"role": "user", "content": "hello"}]}
        bodies = st.one_of(
            change_json(REQUEST, REQUESTS).map(to_json),
            change_json(short, REQUESTS).map(to_json),
            REQUESTS.map(to_json),
            change_bytes(to_json(short)),
        )
        record_property(
            "inputs", explore(size(0, FUZZ_SECONDS), check_request, st.just("/v1/chat/completions"), bodies)
        )
