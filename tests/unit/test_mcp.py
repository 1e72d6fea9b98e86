"""The MCP server as clients meet it: real clients, real processes, a real policy server, hostile arguments."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from mcp.server.stdio import stdio_server
from mcp.shared.memory import create_connected_server_and_client_session
from support.command_line import memagent
from support.document_files import make_pdf
from support.fake_server import FakeServer
from support.programs import Program, run_program
from support.scripts import SMALL_OPTIONS, extract, make_document, read_perfectly
from support.strategies import answer_perfectly

from memagent_graph import Budget, Document, DocumentStore, MemAgent, RunLog, ScriptedPolicy, load_prompts
from memagent_graph.addresses import is_local, listen
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.state import Limits
from memagent_mcp import make_server
from memagent_mcp import server as server_module
from memagent_mcp.client_roots import get_local_path
from memagent_mcp.server import get_url, make_security_settings
from memagent_mcp.tools import shield_work

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.62: "The key of castle is 1234."}, words=600)
QUESTION = "What is the key of harbor?"
SMALL = ["--tokenizer", "embedded", *SMALL_OPTIONS]
INITIALIZE_REQUEST: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
ACCEPT = {"Accept": "application/json, text/event-stream"}
SMALL_BUDGET = Budget(context_window=900, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with a book in it, and a secret beside it."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "book.txt").write_text(TEXT)
    (tmp_path / "secret.txt").write_text("The key of harbor is 9999.")
    return tmp_path / "library"


@pytest.fixture
def policy() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class ProgressReports(list[tuple[float, float | None, str | None]]):
    """A progress callback that keeps what it is told."""

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.append((progress, total, message))

    @property
    def fractions(self) -> list[float]:
        return [share for share, *_ in self]


def make_roots_callback(*paths: str) -> Any:
    """A client's answer when it is asked for its roots."""

    async def tell(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=path) for path in paths])  # type: ignore[arg-type]

    return tell


def make_command(*options: object) -> list[str]:
    return [sys.executable, "-m", "memagent_graph", "mcp", *map(str, options)]


@asynccontextmanager
async def session_with(process: Program, *, list_roots: Any = None) -> AsyncIterator[Any]:
    """A session with a server over its standard streams."""
    incoming, outgoing = anyio.wrap_file(process.stdout), anyio.wrap_file(process.stdin)
    async with stdio_server(stdin=incoming, stdout=outgoing) as streams:
        try:
            async with ClientSession(*streams, list_roots_callback=list_roots) as session:
                await session.initialize()
                yield session
        finally:
            process.stdin.close()


@asynccontextmanager
async def over_stdio(*options: object) -> AsyncIterator[Any]:
    """A session with a server in a process of its own."""
    streams = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with Program(make_command(*options), **streams, stderr=subprocess.DEVNULL) as process:
        async with session_with(process) as session:
            yield session


@contextmanager
def http_server(*options: object) -> Iterator[tuple[str, Program]]:
    """`memagent mcp --http` on a free port; its URL and its process."""
    process = Program(make_command("--http", "--port", 0, *options), stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"http://\S+/mcp", line)
        assert url, line + process.stderr.read()
        yield url[0], process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) is not None
        process.stderr.close()


@asynccontextmanager
async def over_http(url: str, *, list_roots: Any = None) -> AsyncIterator[Any]:
    async with (
        streamable_http_client(url) as (incoming, outgoing, _),
        ClientSession(incoming, outgoing, list_roots_callback=list_roots) as session,
    ):
        await session.initialize()
        yield session


@asynccontextmanager
async def in_process(
    *own: Path, list_roots: Any = None, script: Any = read_perfectly, reader: Any = None, **bounds: Any
) -> AsyncIterator[Any]:
    """A client and a server made by `make_server`, joined in memory; the policy reads perfectly, or by the script."""
    options: Any = {"tokenizer": "embedded", "budget": SMALL_BUDGET, "prompts": load_prompts(), **(reader or {})}
    policy = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script)
    async with (
        MemAgent(policy, **options) as agent,
        aclosing(make_server(agent, roots=own, **bounds)) as server,
        create_connected_server_and_client_session(server, list_roots_callback=list_roots) as session,
    ):
        yield session


async def begin_session(client: httpx.AsyncClient, url: str, **capabilities: Any) -> dict[str, str]:
    """The headers of a session of a client that speaks HTTP itself."""
    hello = {**INITIALIZE_REQUEST, "params": {**INITIALIZE_REQUEST["params"], "capabilities": capabilities}}
    reply = await client.post(url, json=hello, headers=ACCEPT)
    assert reply.status_code == 200
    return {**ACCEPT, "Mcp-Session-Id": reply.headers["mcp-session-id"]}


def text_of(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


async def read_book(session: Any, reports: ProgressReports | None = None, **arguments: Any) -> Any:
    """Ask the tool that reads: about the book, and the harbor, unless the arguments say otherwise."""
    source = {} if "text" in arguments else {"path": "book.txt"}
    arguments = {"questions": QUESTION, **source, **arguments}
    return await session.call_tool("read_document", arguments, progress_callback=reports)


def answers_of(result: types.CallToolResult) -> list[dict[str, Any]]:
    assert not result.isError, text_of(result)
    assert result.structuredContent
    answers: list[dict[str, Any]] = result.structuredContent["answers"]
    return answers


def answer_of(result: types.CallToolResult) -> dict[str, Any]:
    return answers_of(result)[0]


def get_error_text(result: types.CallToolResult) -> str:
    assert result.isError
    assert "Traceback" not in text_of(result)
    assert "9999" not in text_of(result)
    return text_of(result)


async def use_every_tool(session: Any, path: Path | str) -> None:
    """What both transports must be able to do."""
    reports = ProgressReports()
    read = await read_book(session, reports, path=str(path), questions=[QUESTION, "What is the key of castle?"])
    assert [answer["answer"] for answer in answers_of(read)] == ["4711", "1234"]
    first = answer_of(read)
    assert TEXT[first["evidence"][0]["start_char"] : first["evidence"][0]["end_char"]] == first["evidence"][0]["quote"]
    assert '- "harbor is 4711" in "' in text_of(read)
    assert "The key of harbor is 4711. word" in first["evidence"][0]["context"]
    assert first["run_id"] in text_of(read)

    fractions = reports.fractions
    assert len(fractions) == 2 * first["chunks_read"] > 4
    assert fractions == sorted(set(fractions))
    assert fractions[-1] == 1.0
    assert {total for _, total, _ in reports} == {1.0}
    assert re.fullmatch(r"book\.txt: chunk \d+ for question [12] of 2, \d+% read", reports[3][2] or "")

    reports = ProgressReports()
    follow_up = {"run_id": first["run_id"], "questions": "And the key of castle?"}
    again = await session.call_tool("ask_again", follow_up, progress_callback=reports)
    assert answer_of(again)["answer"] == "1234"
    assert len(reports) > 2

    listing = await session.call_tool("list_runs", {"contains": "CASTLE", "limit": 5})
    assert [run["question"] for run in listing.structuredContent["runs"]] == [
        "And the key of castle?",
        "What is the key of castle?",
    ]
    assert listing.structuredContent["runs_in_log"] == 3
    assert "book.txt" in text_of(listing)

    report = await session.call_tool("show_run", {"run_id": first["run_id"]})
    assert report.structuredContent["answer"] == "4711"
    assert report.structuredContent["changes"] == len(re.findall(r"^chunk \d+ +\+\d+", text_of(report), re.M))
    for words in (QUESTION, "│ 4711 ", "book.txt", "harbor 4711\n  chunk "):
        assert words in text_of(report)
    assert "\x1b" not in text_of(report)

    for outside in ("../secret.txt", str(Path(str(path)).parent.parent / "secret.txt")):
        assert "no file" in get_error_text(await read_book(session, path=outside))


async def test_a_client_over_standard_streams_reads_asks_again_lists_and_shows(folder, policy) -> None:
    async with over_stdio("--root", folder, "--base-url", policy.base_url, *SMALL) as session:
        await use_every_tool(session, folder / "book.txt")


async def test_a_client_over_http_reads_asks_again_lists_and_shows(folder, policy) -> None:
    with http_server("--root", folder, "--base-url", policy.base_url, *SMALL) as (url, _):
        async with over_http(url) as session:
            await use_every_tool(session, folder / "book.txt")


async def test_questions_of_a_call_share_one_pass_and_equal_ones_are_read_for_once(folder) -> None:
    castle, prompts = "What is the key of castle?", list[str]()

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return read_perfectly(prompt)

    async with in_process(folder, script=script) as session:
        read = await read_book(session, questions=[QUESTION, castle, QUESTION])
    first, second, third = answers_of(read)
    assert (first["answer"], second["answer"]) == ("4711", "1234")
    assert first == third
    assert first["run_id"] != second["run_id"]
    sections = [extract(prompt, "section") for prompt in prompts if "<section>" in prompt]
    assert sections == [section for section in dict.fromkeys(sections) for _ in range(2)]


async def test_tools_describe_themselves_and_their_results(folder) -> None:
    async with over_stdio("--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "embedded") as session:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
    names = {"read_document", "wait", "cancel_read", "resume_read", "ask_again", "list_runs", "show_run"}
    assert set(tools) == names
    assert set(tools["read_document"].inputSchema["properties"]) == {
        "questions", "path", "text", "pages", "response_format", "max_chunks", "max_tokens", "max_seconds",
        "background",
    }  # fmt: skip
    for tool in tools.values():
        assert len(tool.description) > 60
        assert tool.annotations.readOnlyHint
        assert all("description" in schema for schema in tool.inputSchema["properties"].values())
    answers = tools["read_document"].outputSchema["properties"]["answers"]["description"]
    assert "the limit at which the read stopped" in answers


async def test_a_reader_that_searches_says_so_in_answers(tmp_path) -> None:
    async with in_process(tmp_path, reader={"strategy": "retrieval"}) as session:
        read = await read_book(session, text=TEXT * 5)
    [answer] = answers_of(read)
    assert re.fullmatch(
        r"The policy was shown [\d,]+ of [\d,]+ tokens of the document, chosen by retrieval\.", answer["extent"]
    )
    assert answer["extent"] in text_of(read)


async def test_progress_of_branches_side_by_side_never_falls_and_names_no_chunk_for_a_merge() -> None:
    lines = {place / 25: f"The key of harbor is {place}000{place}000." for place in range(1, 25)}
    reports = ProgressReports()
    async with in_process(script=answer_perfectly, reader={"strategy": "map_reduce"}) as session:
        read = await read_book(session, reports, text=make_document(lines, words=600))
    assert not read.isError, text_of(read)
    fractions = reports.fractions
    assert (fractions, fractions[-1]) == (sorted(fractions), 1.0)
    merges = [message for *_, message in reports if "chunk" not in (message or "")]
    assert merges
    assert set(merges) == {"text: findings merged, 100% read"}


async def test_without_a_log_there_is_only_reading() -> None:
    async with in_process(reader={"run_log": False}) as session:
        assert [tool.name for tool in (await session.list_tools()).tools] == ["read_document", "wait", "cancel_read"]
        read = await read_book(session, text=TEXT)
        assert answer_of(read)["answer"] == "4711"


async def test_the_command_lines_bounds_hold_for_every_call(folder, policy) -> None:
    bounds = ["--max-bytes", len(TEXT), "--max-chunks", 2, "--replace-undecodable", "--root", folder]
    (folder / "stray.txt").write_bytes(b"stray \x81\x8d bytes " * 20)
    async with over_stdio(*bounds, "--base-url", policy.base_url, *SMALL) as session:
        read = await read_book(session)
        assert answer_of(read)["stop_reason"] == "max_chunks"
        run = answer_of(read)["run_id"]
        again = await session.call_tool("ask_again", {"run_id": run, "questions": QUESTION, "max_chunks": 99})
        assert answer_of(again)["chunks_read"] == 2
        (folder / "book.txt").write_text(TEXT + ".")
        longer = await read_book(session)
        assert f"more than the {len(TEXT):,} that are allowed" in get_error_text(longer)
        stray = await read_book(session, path="stray.txt")
        assert not stray.isError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"questions": QUESTION}, "neither a path nor a text"),
        ({"questions": QUESTION, "path": "book.txt", "text": "x"}, "both a path and a text"),
        ({"questions": [], "text": "x"}, "at least 1"),
        ({"questions": ["why?"] * 17, "text": "x"}, "at most 16"),
        ({"questions": " ", "text": TEXT}, "question is empty"),
        ({"text": TEXT}, "questions: Field required. Its arguments are questions, path"),
        ({"questions": QUESTION, "text": TEXT, "pagse": "1"}, "pagse: there is no such argument"),
        ({"questions": "why " * 100, "text": TEXT}, "question has"),
        ({"questions": QUESTION, "text": " \n "}, "no text"),
        ({"questions": QUESTION, "text": TEXT, "max_chunks": 0}, "greater than or equal to 1"),
        ({"questions": QUESTION, "text": "long " * 3000}, "more than the 12,000"),
    ],
)
async def test_wrong_arguments_are_tool_errors_with_a_remedy(folder, arguments, words) -> None:
    async with in_process(folder, max_bytes=12_000) as session:
        assert words in get_error_text(await session.call_tool("read_document", arguments))


async def test_a_text_that_is_json_or_names_a_file_is_read_as_the_text_it_is(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    async with in_process(folder) as session:
        for text in (json.dumps({"note": "The key of harbor is 4711."}), "secret.txt"):
            read = await read_book(session, text=text)
            answer = answer_of(read)["answer"]
            assert (answer == "4711") == ("4711" in text)
            assert read.structuredContent["document_bytes"] == len(text)


async def test_a_failure_of_another_kind_is_raised_once_the_other_reads_have_ended(folder) -> None:
    questions: list[str] = []

    def script(prompt: str) -> Any:
        if "castle" in extract(prompt, "problem"):
            raise KeyError("a defect somewhere")
        if "<section>" not in prompt:
            questions.append(extract(prompt, "problem"))
        return read_perfectly(prompt)

    async with in_process(folder, script=script) as session:
        failure = await read_book(session, questions=["What is the key of castle?", QUESTION])
        assert "a defect somewhere" in get_error_text(failure)
        assert questions == [QUESTION]


async def test_a_disk_error_of_one_read_leaves_the_others(folder) -> None:
    def script(prompt: str) -> Any:
        if "castle" in extract(prompt, "problem"):
            raise sqlite3.OperationalError("database or disk is full")
        return read_perfectly(prompt)

    async with in_process(folder, script=script) as session:
        read = await read_book(session, questions=[QUESTION, "What is the key of castle?"])
    good, bad = answers_of(read)
    assert good["answer"] == "4711"
    assert "OperationalError: database or disk is full. Check the server's free disk space" in bad["error"]


async def test_invalid_unicode_names_do_not_crash_the_server(isolated_home, policy) -> None:
    """Logs hold such names of files that other programs, or earlier versions, have read."""
    name = "caf\udce9.txt"
    store, log = DocumentStore(isolated_home / "documents"), RunLog(isolated_home / "runs.sqlite")
    stored = store.add(Document.from_text(TEXT))
    log.begin("kept", QUESTION, {**stored, "name": name}, {})
    log.wait(log.begin("lost", QUESTION, {**stored, "key": "sha256:" + "0" * 64, "name": name}, {}))
    log.close()
    async with over_stdio("--base-url", policy.base_url, *SMALL) as session:
        with anyio.fail_after(60):  # a server that has ended never answers
            listing = await session.call_tool("list_runs", {})
            assert {run["document"] for run in listing.structuredContent["runs"]} == {"caf\ufffd.txt"}
            lost = await session.call_tool("ask_again", {"run_id": "lost", "questions": QUESTION})
            assert "caf\ufffd.txt" in get_error_text(lost)
            reports = ProgressReports()
            again = {"run_id": "kept", "questions": QUESTION}
            reply = await session.call_tool("ask_again", again, progress_callback=reports)
            assert answer_of(reply)["answer"] == "4711"
            assert (reports[0][2] or "").startswith("caf\ufffd.txt: chunk 1")


async def test_an_unknown_run_is_an_error_that_names_known_ones(folder) -> None:
    async with in_process(folder) as session:
        read = await read_book(session)
        for tool, more in (("show_run", {}), ("ask_again", {"questions": QUESTION})):
            answer = get_error_text(await session.call_tool(tool, {"run_id": "nope", **more}))
            assert answer_of(read)["run_id"] in answer


async def test_a_read_stops_at_the_lower_of_the_servers_and_the_calls_limit(folder) -> None:
    async with in_process(folder, limits=Limits(max_chunks=3)) as session:
        for requested, chunks in ((None, 3), (2, 2), (9, 3)):
            read = await read_book(session, max_chunks=requested)
            (answer,) = answers_of(read)
            assert (answer["answer"], answer["stop_reason"], answer["chunks_read"]) == (None, "max_chunks", chunks)
            assert "stopped at its limit (max_chunks) after" in text_of(read)


def test_of_two_limits_the_lower_counts() -> None:
    assert Limits().tighten(Limits()) == Limits()
    assert Limits(max_chunks=3, max_seconds=5).tighten(Limits(max_chunks=9, max_tokens_total=7)) == Limits(3, 7, 5)


# Roots


@pytest.mark.parametrize(
    ("own", "declared", "readable"),
    [
        ([], None, set()),
        (["a"], None, {"a", "a/b"}),
        ([], ["a/b"], {"a/b"}),
        (["a"], ["a/b", "c"], {"a/b"}),
        (["a/b"], ["."], {"a/b"}),
        (["a"], ["c"], set()),
        (["a"], [], set()),
        (["a"], ["missing"], set()),
        ([], ["file://elsewhere/a"], set()),
    ],
)
async def test_files_are_read_below_the_servers_and_the_clients_roots(tmp_path, own, declared, readable) -> None:
    for name in ("a", "a/b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "note.txt").write_text("The key of harbor is 4711.")
    client_roots = None
    if declared is not None:
        client_roots = make_roots_callback(
            *(root if "://" in root else (tmp_path / root).as_uri() for root in declared)
        )
    async with in_process(*(tmp_path / item for item in own), list_roots=client_roots) as session:
        for name in ("a", "a/b", "c"):
            read = await read_book(session, path=str(tmp_path / name / "note.txt"))
            assert read.isError == (name not in readable), text_of(read)


async def test_a_client_that_does_not_tell_its_roots_reads_no_file(folder) -> None:
    async def fail(context: Any) -> types.ErrorData:
        return types.ErrorData(code=types.INTERNAL_ERROR, message="not now")

    async with in_process(folder, list_roots=fail) as session:
        answer = get_error_text(await read_book(session))
        assert "did not list them" in answer


async def test_over_http_a_clients_roots_narrow_the_servers_and_grant_nothing(folder, policy) -> None:
    everything = make_roots_callback("file:///")
    options = ["--base-url", policy.base_url, *SMALL]
    book = str(folder / "book.txt")
    with http_server(*options) as (url, _):
        async with over_http(url, list_roots=everything) as session:
            assert "pass the text" in get_error_text(await read_book(session, path=book))
    with http_server("--root", folder, *options) as (url, _):
        async with over_http(url, list_roots=everything) as session:
            assert not (await read_book(session, path=book)).isError
        async with over_http(url, list_roots=make_roots_callback((folder.parent / "home").as_uri())) as session:
            get_error_text(await read_book(session, path=book))


async def test_roots_are_asked_for_where_a_client_without_a_stream_of_its_own_hears_it(folder, policy) -> None:
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {
        "name": "read_document", "arguments": {"path": "book.txt", "questions": QUESTION}}}  # fmt: skip
    with http_server("--root", folder, "--base-url", policy.base_url, *SMALL) as (url, _):
        async with httpx.AsyncClient(timeout=30) as client:
            session = await begin_session(client, url, roots={})
            await client.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
            async with client.stream("POST", url, json=call, headers=session) as events:
                messages = (json.loads(line[5:]) async for line in events.aiter_lines() if line.startswith("data: {"))
                question = await anext(messages)
                assert question["method"] == "roots/list"
                reply = {"jsonrpc": "2.0", "id": question["id"], "result": {"roots": [{"uri": folder.as_uri()}]}}
                assert (await client.post(url, json=reply, headers=session)).status_code == 202
                answer = await anext(messages)
    assert answer["id"] == 2
    assert answer["result"]["structuredContent"]["answers"][0]["answer"] == "4711"


def test_only_file_uris_of_this_machine_are_paths(tmp_path) -> None:
    named = tmp_path / "a b#c"
    named.mkdir()
    assert get_local_path(named.as_uri()) == named.resolve()
    assert get_local_path(f"file://localhost{tmp_path}") == tmp_path.resolve()
    for other in ("https://example.org/", f"file://host{tmp_path}", "file://", "file:", (tmp_path / "no").as_uri()):
        assert get_local_path(other) is None


# Cancelling and stopping


def test_the_server_ends_with_its_client_and_with_ctrl_c(folder) -> None:
    for end in ("close", "interrupt"):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = Program(make_command("--base-url", "http://127.0.0.1:9/v1", *SMALL), **streams)
        process.stdin.write(json.dumps(INITIALIZE_REQUEST) + "\n")
        process.stdin.flush()
        server = json.loads(process.stdout.readline())["result"]["serverInfo"]
        assert (server["name"], server["version"]) == ("memagent", version("memagent-graph"))
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
            process.wait(5)
        rest, errors = process.communicate(timeout=10)
        assert process.returncode == (0 if end == "close" else -signal.SIGINT)
        assert (rest, "Traceback" in errors) == ("", False)


async def test_sessions_over_http_are_bounded_and_names_that_clients_send_are_logged_in_a_line(
    folder, monkeypatch
) -> None:
    handler = logging.StreamHandler(log := io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(server_module, "_MAX_SESSIONS", 1)
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "none\x1b[2J", "arguments": {}}}
    async with MemAgent(ScriptedPolicy(read_perfectly), tokenizer="embedded", budget=SMALL_BUDGET) as reader:
        with listen("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(server_module.serve_http(make_server(reader), listener, ()))
            async with httpx.AsyncClient() as client:
                session = await begin_session(client, get_url(listener))
                await client.post(get_url(listener), json=call, headers=session)
                assert (
                    await client.post(get_url(listener), json=INITIALIZE_REQUEST, headers=ACCEPT)
                ).status_code == 503
                await client.delete(get_url(listener), headers=session)
                await begin_session(client, get_url(listener))
            serving.cancel()
            await asyncio.wait([serving])
    assert "none [2J" in log.getvalue()
    assert "\x1b" not in log.getvalue()


async def test_the_http_server_stops_while_clients_hold_on(folder) -> None:
    with http_server("--base-url", "http://127.0.0.1:9/v1", *SMALL) as (url, process):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as halfway:
            halfway.sendall(
                f"POST /mcp HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
                "Content-Length: 1000\r\n\r\n{".encode()
            )
            async with httpx.AsyncClient(timeout=30) as client:
                session = await begin_session(client, url)
                async with client.stream("GET", url, headers=session) as events:
                    assert events.status_code == 200
                    process.send_signal(signal.SIGINT)
                    assert await asyncio.to_thread(process.wait, 60) == 130


def test_a_client_that_sends_headers_without_end_is_cut_off(http_url) -> None:
    address = urlsplit(http_url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as client:
        client.sendall(f"POST /mcp HTTP/1.1\r\nHost: {address.netloc}\r\n".encode())
        try:
            for number in range(64):
                client.sendall(f"X-{number}: {'x' * 2**14}\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        except (ConnectionResetError, BrokenPipeError):
            pass  # it was closed while the rest was sent


async def test_a_cancellation_waits_for_a_read_to_be_closed() -> None:
    closed = False

    async def work() -> None:
        nonlocal closed
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0.01)
            closed = True

    with anyio.move_on_after(0.05) as scope:
        await shield_work(work())
    assert scope.cancelled_caught
    assert closed


def test_standard_output_carries_the_protocol_alone() -> None:
    code = (
        "import os, subprocess\n"
        "from memagent_mcp.server import reserve_standard_output\n"
        "protocol = reserve_standard_output()\n"
        "print('from Python', flush=True)\n"
        "os.write(1, b'from native code')\n"
        "subprocess.run(['echo', 'from a child'])\n"
        "protocol.write('{}'); protocol.flush()\n"
    )
    done = run_program([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == "{}"
    assert all(name in done.stderr for name in ("from Python", "from native code", "from a child"))


# Who may connect


def test_other_machines_are_let_in_only_when_that_is_said(folder) -> None:
    def fail(*options: object) -> str:
        done = memagent("mcp", *options, code=ExitCode.USAGE)
        assert done.stdout == ""
        return " ".join(re.sub("[│╭╰╮╯─]", " ", done.stderr).split())

    assert "--allow-remote" in fail("--http", "--host", "0.0.0.0")
    assert "--server-name" in fail("--http", "--host", "0.0.0.0", "--allow-remote")
    assert "--http" in fail("--host", "0.0.0.0")
    assert "does not exist" in fail("--root", folder / "nowhere")
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert "cannot listen" in fail("--http", "--port", port, "--base-url", "http://127.0.0.1:9/v1", *SMALL)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "rebound.example.org"}, 421),
        ({"Host": "localhost.example.org:80"}, 421),
        ({"Origin": "https://example.org"}, 403),
    ],
)
async def test_web_pages_cannot_reach_the_server_by_a_name_of_their_own(http_url, headers, status) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(http_url, json=INITIALIZE_REQUEST, headers={**ACCEPT, **headers})
    assert reply.status_code == status


@pytest.fixture(scope="module")
def http_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMAGENT_HOME", str(tmp_path_factory.mktemp("home")))
        with http_server("--base-url", "http://127.0.0.1:9/v1", *SMALL) as (url, _):
            yield url


def test_a_name_that_no_host_can_have_is_refused() -> None:
    with pytest.raises(MemAgentError, match=r"cannot listen on a\.\.b.*host"):
        listen("a..b", 0)


def test_server_names_are_allowed_besides_localhost() -> None:
    settings = make_security_settings(["reader.example.org", "::2"])
    assert settings.enable_dns_rebinding_protection
    assert {"reader.example.org", "reader.example.org:*", "[::2]:*", "localhost:*"} <= set(settings.allowed_hosts)
    assert "https://reader.example.org:*" in settings.allowed_origins
    assert [is_local(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost", "0.0.0.0", "::", "host")] == [
        True, True, True, True, False, False, False
    ]  # fmt: skip


# The example


def test_the_example_shows_progress_answer_and_evidence(tmp_path, policy) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "mcp_client.py"
    (tmp_path / "note.txt").write_text(TEXT)
    command = [sys.executable, example, "note.txt", QUESTION, "--base-url", policy.base_url, *SMALL]
    done = run_program(command, check=True, capture_output=True, timeout=120, cwd=tmp_path)
    assert "answer: 4711" in done.stdout
    assert "harbor is 4711" in done.stdout
    assert len(re.findall(r"^ *\d+%  note\.txt: chunk \d+", done.stdout, re.M)) > 2


class TestStructuredAnswersAndPages:
    SCHEMA: ClassVar = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}

    @staticmethod
    def script(prompt: str) -> str:
        return '{"key": 4711}' if "<schema>" in prompt else read_perfectly(prompt)

    async def test_an_answer_has_the_form_of_a_schema(self, folder) -> None:
        async with in_process(folder, script=self.script) as session:
            read = await read_book(session, response_format=self.SCHEMA)
            [answer] = answers_of(read)
            assert (answer["value"], answer["stop_reason"]) == ({"key": 4711}, "answered")
            assert 'Answer: {"key": 4711}' in text_of(read)
            other = {**self.SCHEMA, "required": ["castle"]}
            follow_up = {"run_id": answer["run_id"], "questions": QUESTION, "response_format": other}
            again = await session.call_tool("ask_again", follow_up)
            [answer] = answers_of(again)
            assert (answer["value"], answer["stop_reason"]) == (None, "invalid_answer")
            assert [event["kind"] for event in answer["events"]].count("invalid_answer") == 3
            assert "The answer does not match response_format" in text_of(again)

    async def test_pages_of_a_pdf_are_chosen_and_named_without_where_the_file_lies(self, folder) -> None:
        (folder / "a.pdf").write_bytes(make_pdf("The key of castle is 12.", "4.2 Keys", "The key of harbor is 4711."))
        async with in_process(folder) as session:
            read = await read_book(session, path="a.pdf", pages="2-3")
            [quote] = answer_of(read)["evidence"]
            assert (quote["page"], quote["section"]) == (3, "4.2 Keys")
            assert "page 3, 4.2 Keys" in text_of(read)
            assert str(folder) not in json.dumps(read.structuredContent)
            assert "has 3 pages, and 4 was asked for" in get_error_text(
                await read_book(session, path="a.pdf", pages="4")
            )
            assert "has no pages to choose" in get_error_text(await read_book(session, pages="2-3"))
