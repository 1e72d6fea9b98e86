"""Inputs at random: whatever a server, a client or somebody else's file says is read, or refused with our own error.

Each test goes on for an hour at full size, or for `MEMAGENT_FUZZ_SECONDS`.
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
from support.serving import build_reader, served

from memagent_graph import Document, DocumentStore, MemAgent, ScriptedPolicy
from memagent_graph.documents import find_store
from memagent_graph.errors import DocumentError, MemAgentError
from memagent_graph.policies.replies import BrokenOffError, MalformedReplyError, decode_completion
from memagent_graph.policy import SamplingParams
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs, import_runs
from memagent_graph.storage.state_serializer import CompressedSerializer
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import load_run_view

SECONDS = int(os.environ.get("MEMAGENT_FUZZ_SECONDS", "3600"))
BATCH = 20
Size = Callable[[int, int], int]


def explore(seconds: float, check: Callable[..., None], *inputs: st.SearchStrategy[Any]) -> int:
    """Check one batch of inputs, and others until so many seconds have passed; returns how many there were."""
    began, batches = time.monotonic(), 0
    while not batches or time.monotonic() - began < seconds:
        options = settings(
            max_examples=BATCH, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
        )
        options(seed(batches)(given(*inputs)(check)))()
        batches += 1
    return batches * BATCH


def values(*names: str) -> st.SearchStrategy[Any]:
    """JSON values, whose objects have some of these keys, often."""
    texts = st.one_of(
        st.sampled_from(["", "x", "user", "text", "\x00", "\ud800", "é", "[DONE]", *names]), st.text(max_size=9)
    )
    numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 2**63, 2**64, 1e308]))
    plain = st.one_of(st.none(), st.booleans(), numbers, texts)
    keys = st.one_of(st.sampled_from(names), texts) if names else texts
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5))


@st.composite
def altered(draw: st.DrawFn, whole: Any, inner: st.SearchStrategy[Any]) -> Any:
    """A JSON value, with a few of its parts replaced, removed or doubled."""
    value = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
                if draw(st.integers(0, 3)) == 0:
                    del place[key]
                else:
                    place[key] = draw(inner)
                break
            place = place[key]
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with a few parts replaced, removed or doubled."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([1, 8, 64])))
        data = (
            data[:start] + draw(st.sampled_from([b"", data[start:end] * 2, draw(st.binary(max_size=8))])) + data[end:]
        )
    return data


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


REPLY = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "finish_reason": "stop", "token_ids": [3], "text": "a", "stop_reason": None,
                 "message": {"role": "assistant", "content": "a", "refusal": None, "reasoning": "b", "tool_calls": []},
                 "logprobs": {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": []}]}}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3,
              "prompt_tokens_details": {"cached_tokens": 1}}, "error": None,
}  # fmt: skip
OF_A_REPLY = values("choices", "message", "content", "text", "usage", "error", "logprobs", "logprob", "index", "delta")


def check_reply(content: bytes, logprobs: bool) -> None:
    try:
        completion = decode_completion(content, model="m", sampling=SamplingParams(logprobs=logprobs))
    except (BrokenOffError, MalformedReplyError):
        return
    assert isinstance(completion.text, str)
    assert isinstance(completion.model, str)


def test_a_reply_is_a_completion_or_malformed(size: Size, record_property: Callable[[str, Any], None]) -> None:
    bodies = st.one_of(altered(REPLY, OF_A_REPLY).map(as_json), OF_A_REPLY.map(as_json), damaged(as_json(REPLY)))
    record_property("inputs", explore(size(0, SECONDS), check_reply, bodies, st.booleans()))


FILES = {
    "paper.pdf": make_pdf("The first page.", "The second one.", "And the last."),
    "letter.docx": make_docx("Dear reader,", "this is a letter."),
    "page.html": b"<!doctype html><html><head><title>T</title></head><body><h1>One</h1><p>Two <b>three</b></p></body>",
}


def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    store, ends = DocumentStore(tmp_path), Counter[str]()

    def check_file(name: str, content: bytes) -> None:
        try:
            ref = store.add(Document.from_bytes(content, name))
        except DocumentError as error:
            assert name in error.message
            ends["refused"] += 1
        else:
            assert store.read(ref, 0, ref["size"])
            ends["read"] += 1

    inputs = st.one_of(st.tuples(st.just(name), damaged(data)) for name, data in FILES.items())
    record_property("inputs", explore(size(0, SECONDS), lambda drawn: check_file(*drawn), inputs))
    record_property("ends", dict(ends))
    assert len(ends) == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a log of one run, its checkpoints, and its export."""
    with reader(tmp_path) as agent:
        agent.read("The tower was built in 1904. " * 60, "When?", run_id="r")
    with closing(RunLog(tmp_path / "runs.sqlite")) as log:
        log.reward("r", 1.0)
        export_runs(log, tmp_path / "runs.parquet")
    return tmp_path


def reader(folder: Path) -> MemAgent:
    return build_reader(None, folder, policy=ScriptedPolicy(lambda prompt: r"\boxed{1904}"))


OF_A_RUN = values("kind", "rule", "path", "store", "key", "name", "size", "call_id", "text", "memory", "position")


def check_log(path: Path, folder: Path) -> None:
    """Show all runs of a log in all forms."""
    with closing(RunLog(path)) as log:
        for run in log.runs():
            view = load_run_view(log, run.run_id, find_store(run.document, folder / "runs.sqlite"))
            timeline = build_timeline(view)
            render_page(timeline)
            render_timeline(timeline)


def test_an_export_from_others_is_imported_and_shown_or_refused(
    run: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    export, source, target = run / "runs.parquet", run / "altered.parquet", run / "other.sqlite"
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
            check_log(target, run)
        except MemAgentError as error:
            assert error.message

    @st.composite
    def altered_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
        changed = [dict(row) for row in rows]
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from(table.column_names))
            whole = rows[0][name]
            if name in json_columns:
                value = draw(altered(json.loads(whole), OF_A_RUN).map(json.dumps))
            elif isinstance(whole, list):
                value = draw(st.sampled_from([None, [], whole * 2]))
            else:
                value = draw(st.one_of(st.none(), st.integers(-9, 2**62), st.floats(), st.text(max_size=9)))
            for row in changed if name.startswith("run_") or draw(st.booleans()) else changed[:1]:
                row[name] = value
        return changed

    record_property("inputs", explore(size(0, SECONDS), check_import, altered_rows() | damaged(export.read_bytes())))


def test_a_log_from_others_is_shown_and_exported_or_refused(
    run: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    original, theirs = (run / "runs.sqlite").read_bytes(), run / "theirs.sqlite"
    with closing(sqlite3.connect(run / "runs.sqlite")) as file:
        file.row_factory = sqlite3.Row
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [(table, dict(row)) for table in tables for row in file.execute(f"SELECT * FROM {table} LIMIT 1")]
    places = [(table, column, value) for table, row in rows for column, value in row.items()]

    def check_theirs(content: bytes | None, change: tuple[str, str, Any] | None) -> None:
        for path in run.glob("theirs.*"):
            path.unlink()
        theirs.write_bytes(original if content is None else content)
        if change is not None:
            table, column, value = change
            with suppress(sqlite3.Error, OverflowError, UnicodeError), closing(sqlite3.connect(theirs)) as file, file:
                file.execute(f"UPDATE {table} SET {column} = ?", (value,))
        try:
            check_log(theirs, run)
            with closing(RunLog(theirs)) as log:
                export_runs(log, run / "theirs.parquet")
        except MemAgentError as error:
            assert error.message

    @st.composite
    def changes(draw: st.DrawFn) -> tuple[str, str, Any]:
        table, column, whole = draw(st.sampled_from(places))
        others = st.one_of(st.none(), st.integers(-9, 2**62), st.floats(), st.text(max_size=9), st.binary(max_size=9))
        if isinstance(whole, str) and whole[:1] in {"[", "{"}:
            others |= altered(json.loads(whole), OF_A_RUN).map(json.dumps)
        elif isinstance(whole, bytes):
            others |= damaged(whole)
        return table, column, draw(others)

    inputs = st.tuples(st.none(), changes()) | st.tuples(damaged(original), st.none())
    record_property("inputs", explore(size(0, SECONDS), lambda drawn: check_theirs(*drawn), inputs))


def test_a_checkpoint_from_others_is_resumed_or_refused(
    run: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    original = (run / "checkpoints.sqlite").read_bytes()
    with closing(sqlite3.connect(run / "checkpoints.sqlite")) as file:
        newest = "checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints)"
        columns = ("type", "checkpoint", "metadata", "parent_checkpoint_id", "checkpoint_ns")
        (row,) = file.execute(f"SELECT {', '.join(columns)} FROM checkpoints WHERE {newest}")

    def check_resume(column: str, value: Any, is_whole: bool) -> None:
        for path in run.glob("checkpoints.sqlite-*"):
            if path.is_file():
                path.unlink()
        (run / "checkpoints.sqlite").write_bytes(original)
        with suppress(sqlite3.IntegrityError), closing(sqlite3.connect(run / "checkpoints.sqlite")) as file, file:
            if is_whole and column == "checkpoint":
                file.execute(f"UPDATE checkpoints SET type = 'msgpack' WHERE {newest}")
            file.execute(f"UPDATE checkpoints SET {column} = ? WHERE {newest}", (value,))
        try:
            with reader(run) as agent:
                agent.resume("r")
                agent.history("r")
        except MemAgentError as error:
            assert error.message

    state = CompressedSerializer().loads_typed((row[0], row[1]))
    values_of = values(*state, *state["channel_values"])
    states = altered(json.loads(json.dumps(state, default=str)), values_of).map(packed)
    inputs = st.one_of(
        st.tuples(st.just("checkpoint"), states, st.just(True)),
        st.tuples(st.just("checkpoint"), damaged(row[1]), st.just(False)),
        st.tuples(st.just("metadata"), values("call_id", "source", "writes").map(as_json), st.just(False)),
        st.tuples(
            st.sampled_from(columns), st.one_of(st.none(), st.text(max_size=5), st.binary(max_size=9)), st.just(False)
        ),
    )
    record_property("inputs", explore(size(0, SECONDS), lambda drawn: check_resume(*drawn), inputs))


def packed(value: Any) -> bytes:
    """A value as msgpack; what msgpack cannot hold, as a byte that it does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        return ormsgpack.packb(json.loads(text), option=ormsgpack.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):
        return b"\xc1"


LONG = "The key of harbor is 4711. " * 400
REQUEST = {
    "model": "fake", "stream": False, "n": 1, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"],
    "max_tokens": 9,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": LONG},
                                     {"type": "file", "file": {"filename": "a.txt", "file_data": "aGVsbG8gd29ybGQ="}}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        {"role": "user", "content": "What is the key of harbor?"},
    ],
}  # fmt: skip
OF_A_REQUEST = values("messages", "role", "content", "type", "text", "file", "file_id", "source", "data", "input_text")


def test_a_request_is_answered_or_refused_in_the_form_of_the_api(
    tmp_path: Path, size: Size, record_property: Callable[[str, Any], None]
) -> None:
    policy = ScriptedPolicy(lambda prompt: r"\boxed{4711}")
    with served(None, tmp_path, policy=policy, max_body=2**20) as server, httpx2.Client(timeout=60) as client:

        def check_request(path: str, body: bytes) -> None:
            reply = client.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code < 500, reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        short = {**REQUEST, "messages": [{"role": "user", "content": "hello"}]}
        bodies = st.one_of(
            altered(REQUEST, OF_A_REQUEST).map(as_json),
            altered(short, OF_A_REQUEST).map(as_json),
            OF_A_REQUEST.map(as_json),
            damaged(as_json(short)),
        )
        record_property("inputs", explore(size(0, SECONDS), check_request, st.just("/v1/chat/completions"), bodies))
