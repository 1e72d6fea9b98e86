"""The MCP server with real clients, processes and policy servers, and with invalid arguments."""

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
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from mcp.server.fastmcp.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.shared.memory import create_connected_server_and_client_session
from starlette.exceptions import HTTPException
from support.command_line import memagent
from support.document_files import make_pdf
from support.fake_server import FakeServer
from support.programs import Program, run_program
from support.scripts import SMALL_OPTIONS, extract, make_document, read_perfectly
from support.strategies import answer_perfectly

from memagent_graph import Budget, Document, DocumentStore, MemAgent, RunLog, ScriptedPolicy, load_prompts
from memagent_graph.addresses import list_host_names, listen
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
SMALL_SETTINGS = ["--tokenizer", "embedded", *SMALL_OPTIONS]
INITIALIZE_REQUEST: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
ACCEPT_HEADER = {"Accept": "application/json, text/event-stream"}
SMALL_BUDGET = Budget(context_window=900, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with a book, and a secret outside it."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "book.txt").write_text(TEXT)
    (tmp_path / "secret.txt").write_text("The key of harbor is 9999.")
    return tmp_path / "library"


@pytest.fixture
def policy_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class ProgressReports(list[tuple[float, float | None, str | None]]):
    """A progress callback that stores the reports."""

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.append((progress, total, message))

    @property
    def fractions(self) -> list[float]:
        return [fraction for fraction, *_ in self]


def make_roots_callback(*paths: str) -> Any:
    """Return a callback with which a client lists these roots."""

    async def list_roots(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=path) for path in paths])  # type: ignore[arg-type]

    return list_roots


def make_command(*options: object) -> list[str]:
    return [sys.executable, "-m", "memagent_graph", "mcp", *map(str, options)]


@asynccontextmanager
async def open_session(process: Program, *, list_roots: Any = None) -> AsyncIterator[Any]:
    """Open a session with a server process over its standard streams."""
    incoming, outgoing = anyio.wrap_file(process.stdout), anyio.wrap_file(process.stdin)
    async with stdio_server(stdin=incoming, stdout=outgoing) as streams:
        try:
            async with ClientSession(*streams, list_roots_callback=list_roots) as session:
                await session.initialize()
                yield session
        finally:
            process.stdin.close()


@asynccontextmanager
async def connect_over_stdio(*options: object) -> AsyncIterator[Any]:
    """Start a server in a process and open a session with it."""
    streams = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with Program(make_command(*options), **streams, stderr=subprocess.DEVNULL) as process:
        async with open_session(process) as session:
            yield session


@asynccontextmanager
async def serve_in_process(policy: ScriptedPolicy) -> AsyncIterator[str]:
    """Serve HTTP on a free port of this process; yield the URL."""
    async with MemAgent(policy, tokenizer="embedded", budget=SMALL_BUDGET) as reader:
        with listen("127.0.0.1", 0) as listener:
            server_task = asyncio.create_task(server_module.serve_http(make_server(reader), listener, ()))
            yield get_url(listener)
            server_task.cancel()
            await asyncio.wait([server_task])


@contextmanager
def run_http_server(*options: object) -> Iterator[tuple[str, Program]]:
    """Run `memagent mcp --http` on a free port; yield its URL and its process."""
    process = Program(make_command("--http", "--port", 0, *options), stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"http://\S+/mcp", line)
        assert url, line + process.stderr.read()
        yield url[0], process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) is not None and "ClosedResourceError" not in process.stderr.read()
        process.stderr.close()


@asynccontextmanager
async def connect_over_http(url: str, *, list_roots: Any = None) -> AsyncIterator[Any]:
    async with (
        streamable_http_client(url) as (incoming, outgoing, _),
        ClientSession(incoming, outgoing, list_roots_callback=list_roots) as session,
    ):
        await session.initialize()
        yield session


@asynccontextmanager
async def connect_in_process(
    *roots: Path, list_roots: Any = None, script: Any = read_perfectly, reader: Any = None, **server_options: Any
) -> AsyncIterator[Any]:
    """Connect a client to a server of `make_server` in memory; the policy reads perfectly or follows the script."""
    options: Any = {"tokenizer": "embedded", "budget": SMALL_BUDGET, "prompts": load_prompts(), **(reader or {})}
    policy = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script)
    async with (
        MemAgent(policy, **options) as agent,
        aclosing(make_server(agent, roots=roots, **server_options)) as server,
        create_connected_server_and_client_session(server, list_roots_callback=list_roots) as session,
    ):
        yield session


async def begin_session(client: httpx.AsyncClient, url: str, **capabilities: Any) -> dict[str, str]:
    """Start a session with plain HTTP requests; return the headers of its further requests."""
    request = {**INITIALIZE_REQUEST, "params": {**INITIALIZE_REQUEST["params"], "capabilities": capabilities}}
    reply = await client.post(url, json=request, headers=ACCEPT_HEADER)
    assert reply.status_code == 200
    return {**ACCEPT_HEADER, "Mcp-Session-Id": reply.headers["mcp-session-id"]}


def make_call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def get_text(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


async def read_book(session: Any, reports: ProgressReports | None = None, **arguments: Any) -> Any:
    """Call the tool `read_document`, by default for the key of harbor in the book."""
    source = {} if "text" in arguments else {"path": "book.txt"}
    arguments = {"questions": QUESTION, **source, **arguments}
    return await session.call_tool("read_document", arguments, progress_callback=reports)


def get_answers(result: types.CallToolResult) -> list[dict[str, Any]]:
    assert not result.isError, get_text(result)
    assert result.structuredContent
    answers: list[dict[str, Any]] = result.structuredContent["answers"]
    return answers


def get_answer(result: types.CallToolResult) -> dict[str, Any]:
    return get_answers(result)[0]


def get_error_text(result: types.CallToolResult) -> str:
    assert result.isError
    assert not any(text in get_text(result) for text in ("Traceback", "9999"))
    return get_text(result)


async def use_every_tool(session: Any, path: Path | str) -> None:
    """Call every tool in a session and check the results."""
    reports = ProgressReports()
    result = await read_book(session, reports, path=str(path), questions=[QUESTION, "What is the key of castle?"])
    assert [answer["answer"] for answer in get_answers(result)] == ["4711", "1234"]
    first_answer = get_answer(result)
    quote = first_answer["evidence"][0]
    assert TEXT[quote["start_char"] : quote["end_char"]] == quote["quote"]
    assert '- "harbor is 4711" in "' in get_text(result)
    assert "The key of harbor is 4711. word" in quote["context"]
    assert first_answer["run_id"] in get_text(result)

    fractions = reports.fractions
    assert len(fractions) == 2 * first_answer["chunks_read"] > 4
    assert (fractions, fractions[-1]) == (sorted(set(fractions)), 1.0)
    assert {total for _, total, _ in reports} == {1.0}
    assert re.fullmatch(r"book\.txt: chunk \d+ for question [12] of 2, \d+% read", reports[3][2] or "")

    reports = ProgressReports()
    follow_up = {"run_id": first_answer["run_id"], "questions": "And the key of castle?"}
    follow_up_result = await session.call_tool("ask_again", follow_up, progress_callback=reports)
    assert get_answer(follow_up_result)["answer"] == "1234"
    assert len(reports) > 2

    listing = await session.call_tool("list_runs", {"contains": "CASTLE", "limit": 5})
    questions = [run["question"] for run in listing.structuredContent["runs"]]
    assert questions == ["And the key of castle?", "What is the key of castle?"]
    assert (listing.structuredContent["runs_in_log"], "book.txt" in get_text(listing)) == (3, True)

    report = await session.call_tool("show_run", {"run_id": first_answer["run_id"]})
    assert report.structuredContent["answer"] == "4711"
    assert report.structuredContent["changes"] == len(re.findall(r"^chunk \d+ +\+\d+", get_text(report), re.M))
    assert all(text in get_text(report) for text in (QUESTION, "│ 4711 ", "book.txt", "harbor 4711\n  chunk "))
    assert "\x1b" not in get_text(report)

    for outside_path in ("../secret.txt", str(Path(str(path)).parent.parent / "secret.txt")):
        assert "no file" in get_error_text(await read_book(session, path=outside_path))


async def test_every_tool_works_over_standard_streams(folder, policy_server) -> None:
    async with connect_over_stdio("--root", folder, "--base-url", policy_server.base_url, *SMALL_SETTINGS) as session:
        await use_every_tool(session, folder / "book.txt")


async def test_every_tool_works_over_http(folder, policy_server) -> None:
    with run_http_server("--root", folder, "--base-url", policy_server.base_url, *SMALL_SETTINGS) as (url, _):
        async with connect_over_http(url) as session:
            await use_every_tool(session, folder / "book.txt")


async def test_questions_of_a_call_share_one_pass_and_equal_questions_one_run(folder) -> None:
    castle_question, prompts = "What is the key of castle?", list[str]()

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return read_perfectly(prompt)

    async with connect_in_process(folder, script=script) as session:
        result = await read_book(session, questions=[QUESTION, castle_question, QUESTION])
    first_answer, second_answer, third_answer = get_answers(result)
    assert (first_answer["answer"], second_answer["answer"], third_answer) == ("4711", "1234", first_answer)
    assert first_answer["run_id"] != second_answer["run_id"]
    sections = [extract(prompt, "section") for prompt in prompts if "<section>" in prompt]
    assert sections == [section for section in dict.fromkeys(sections) for _ in range(2)]


async def test_tools_describe_themselves_and_their_results(folder) -> None:
    async with connect_over_stdio("--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "embedded") as session:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
    assert set(tools) == {"read_document", "wait", "cancel_read", "resume_read", "ask_again", "list_runs", "show_run"}
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


async def test_an_answer_of_a_retrieval_strategy_says_how_much_was_shown(tmp_path) -> None:
    async with connect_in_process(tmp_path, reader={"strategy": "retrieval"}) as session:
        result = await read_book(session, text=TEXT * 5)
    [answer] = get_answers(result)
    pattern = r"The policy was shown [\d,]+ of [\d,]+ tokens of the document, chosen by retrieval\."
    assert re.fullmatch(pattern, answer["extent"])
    assert answer["extent"] in get_text(result)


async def test_progress_of_parallel_branches_never_decreases() -> None:
    facts = {number / 25: f"The key of harbor is {number}000{number}000." for number in range(1, 25)}
    reports = ProgressReports()
    async with connect_in_process(script=answer_perfectly, reader={"strategy": "map_reduce"}) as session:
        result = await read_book(session, reports, text=make_document(facts, words=600))
    assert not result.isError, get_text(result)
    fractions = reports.fractions
    assert (fractions, fractions[-1]) == (sorted(fractions), 1.0)
    merge_messages = [message for *_, message in reports if "chunk" not in (message or "")]
    assert set(merge_messages) == {"text: findings merged, 100% read"}


@pytest.mark.parametrize("missing_part", [{"run_log": False}, {"checkpoints": None}])
async def test_without_a_log_or_checkpoints_their_tools_are_not_listed(missing_part) -> None:
    async with connect_in_process(reader=missing_part) as session:
        names = {tool.name for tool in (await session.list_tools()).tools}
        log_tools = {"ask_again", "list_runs", "show_run"} if "checkpoints" in missing_part else set()
        assert names == {"read_document", "wait", "cancel_read", *log_tools}
        reading = get_answer(await read_book(session, text=TEXT, background=True))
        assert get_answer(await session.call_tool("wait", {"run_id": reading["run_id"]}))["answer"] == "4711"


async def test_limits_of_the_command_line_apply_to_every_call(folder, policy_server) -> None:
    limits = ["--max-bytes", len(TEXT), "--max-chunks", 2, "--replace-undecodable", "--root", folder]
    (folder / "stray.txt").write_bytes(b"stray \x81\x8d bytes " * 20)
    async with connect_over_stdio(*limits, "--base-url", policy_server.base_url, *SMALL_SETTINGS) as session:
        answer = get_answer(await read_book(session))
        assert answer["stop_reason"] == "max_chunks"
        arguments = {"run_id": answer["run_id"], "questions": QUESTION, "max_chunks": 99}
        assert get_answer(await session.call_tool("ask_again", arguments))["chunks_read"] == 2
        (folder / "book.txt").write_text(TEXT + ".")
        assert f"more than the {len(TEXT):,} that are allowed" in get_error_text(await read_book(session))
        assert not (await read_book(session, path="stray.txt")).isError


@pytest.mark.parametrize(
    ("arguments", "message"),
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
async def test_invalid_arguments_are_tool_errors(folder, arguments, message) -> None:
    async with connect_in_process(folder, max_bytes=12_000) as session:
        assert message in get_error_text(await session.call_tool("read_document", arguments))


async def test_a_text_that_is_json_or_a_file_name_is_read_as_text(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    async with connect_in_process(folder) as session:
        for text in (json.dumps({"note": "The key of harbor is 4711."}), "secret.txt"):
            result = await read_book(session, text=text)
            assert (get_answer(result)["answer"] == "4711") == ("4711" in text)
            assert result.structuredContent["document_bytes"] == len(text)


@pytest.mark.parametrize("failure", [KeyError("a defect"), sqlite3.OperationalError("the disk is full")])
async def test_an_unexpected_error_is_raised_after_the_other_reads_but_one_of_the_disk_is_not(folder, failure) -> None:
    answered_questions: list[str] = []

    def script(prompt: str) -> Any:
        if "castle" in extract(prompt, "problem"):
            raise failure
        if "<section>" not in prompt:
            answered_questions.append(extract(prompt, "problem"))
        return read_perfectly(prompt)

    async with connect_in_process(folder, script=script) as session:
        result = await read_book(session, questions=["What is the key of castle?", QUESTION])
    assert answered_questions == [QUESTION]
    if isinstance(failure, KeyError):
        assert "a defect" in get_error_text(result)
    else:
        castle, harbor = get_answers(result)
        assert harbor["answer"] == "4711"
        assert "OperationalError: the disk is full. Check the server's free disk space" in castle["error"]


async def test_invalid_unicode_names_do_not_crash_the_server(isolated_home, policy_server) -> None:
    """Logs of other programs or earlier versions can have such file names."""
    name = "caf\udce9.txt"
    store, log = DocumentStore(isolated_home / "documents"), RunLog(isolated_home / "runs.sqlite")
    document_ref = store.add(Document.from_text(TEXT))
    log.begin("kept", QUESTION, {**document_ref, "name": name}, {})
    log.wait(log.begin("lost", QUESTION, {**document_ref, "key": "sha256:" + "0" * 64, "name": name}, {}))
    log.close()
    async with connect_over_stdio("--base-url", policy_server.base_url, *SMALL_SETTINGS) as session:
        with anyio.fail_after(60):  # a server that has ended never answers
            listing = await session.call_tool("list_runs", {})
            assert {run["document"] for run in listing.structuredContent["runs"]} == {"caf\ufffd.txt"}
            lost_result = await session.call_tool("ask_again", {"run_id": "lost", "questions": QUESTION})
            assert "caf\ufffd.txt" in get_error_text(lost_result)
            arguments, reports = {"run_id": "kept", "questions": QUESTION}, ProgressReports()
            reply = await session.call_tool("ask_again", arguments, progress_callback=reports)
            assert get_answer(reply)["answer"] == "4711"
            assert (reports[0][2] or "").startswith("caf\ufffd.txt: chunk 1")


async def test_an_unknown_run_is_an_error_that_names_known_runs(folder) -> None:
    async with connect_in_process(folder) as session:
        result = await read_book(session)
        for tool, arguments in (("show_run", {}), ("ask_again", {"questions": QUESTION})):
            error_text = get_error_text(await session.call_tool(tool, {"run_id": "nope", **arguments}))
            assert get_answer(result)["run_id"] in error_text


async def test_a_read_stops_at_the_lower_limit_of_server_and_call(folder) -> None:
    async with connect_in_process(folder, limits=Limits(max_chunks=3)) as session:
        for max_chunks, chunks_read in ((None, 3), (2, 2), (9, 3)):
            (answer,) = get_answers(result := await read_book(session, max_chunks=max_chunks))
            assert (answer["answer"], answer["stop_reason"], answer["chunks_read"]) == (None, "max_chunks", chunks_read)
            assert "stopped at its limit (max_chunks) after" in get_text(result)
    assert Limits().tighten(Limits()) == Limits()
    assert Limits(max_chunks=3, max_seconds=5).tighten(Limits(max_chunks=9, max_tokens_total=7)) == Limits(3, 7, 5)


# Roots


@pytest.mark.parametrize(("server_roots", "client_roots", "readable"), [
    ([], None, set()), (["a"], None, {"a", "a/b"}), ([], ["a/b"], {"a/b"}), (["a"], ["a/b", "c"], {"a/b"}),
    (["a/b"], ["."], {"a/b"}), (["a"], ["c"], set()), (["a"], [], set()), (["a"], ["missing"], set()),
    ([], ["file://elsewhere/a"], set()),
])  # fmt: skip
async def test_files_are_read_below_the_roots_of_both_sides(tmp_path, server_roots, client_roots, readable) -> None:
    for name in ("a", "a/b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "note.txt").write_text("The key of harbor is 4711.")
    list_roots = None
    if client_roots is not None:
        list_roots = make_roots_callback(
            *(root if "://" in root else (tmp_path / root).as_uri() for root in client_roots)
        )
    async with connect_in_process(*(tmp_path / root for root in server_roots), list_roots=list_roots) as session:
        for name in ("a", "a/b", "c"):
            result = await read_book(session, path=str(tmp_path / name / "note.txt"))
            assert result.isError == (name not in readable), get_text(result)


async def test_a_client_that_fails_to_list_its_roots_reads_no_file(folder) -> None:
    async def fail_to_list(context: Any) -> types.ErrorData:
        return types.ErrorData(code=types.INTERNAL_ERROR, message="not now")

    async with connect_in_process(folder, list_roots=fail_to_list) as session:
        assert "did not list them" in get_error_text(await read_book(session))


async def test_roots_of_http_clients_only_restrict_those_of_the_server(folder, policy_server) -> None:
    list_all = make_roots_callback("file:///")
    options = ["--base-url", policy_server.base_url, *SMALL_SETTINGS]
    book = str(folder / "book.txt")
    with run_http_server(*options) as (url, _):
        async with connect_over_http(url, list_roots=list_all) as session:
            assert "pass the text" in get_error_text(await read_book(session, path=book))
    with run_http_server("--root", folder, *options) as (url, _):
        async with connect_over_http(url, list_roots=list_all) as session:
            assert not (await read_book(session, path=book)).isError
        async with connect_over_http(url, list_roots=make_roots_callback((folder.parent / "home").as_uri())) as session:
            get_error_text(await read_book(session, path=book))


async def test_roots_are_requested_on_the_stream_of_the_tool_call(folder, policy_server) -> None:
    call = make_call("read_document", 2, path="book.txt", questions=QUESTION)
    with run_http_server("--root", folder, "--base-url", policy_server.base_url, *SMALL_SETTINGS) as (url, _):
        async with httpx.AsyncClient(timeout=30) as client:
            headers = await begin_session(client, url, roots={})
            await client.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
            async with client.stream("POST", url, json=call, headers=headers) as events:
                messages = (json.loads(line[5:]) async for line in events.aiter_lines() if line.startswith("data: {"))
                roots_request = await anext(messages)
                assert roots_request["method"] == "roots/list"
                reply = {"jsonrpc": "2.0", "id": roots_request["id"], "result": {"roots": [{"uri": folder.as_uri()}]}}
                assert (await client.post(url, json=reply, headers=headers)).status_code == 202
                response = await anext(messages)
    assert response["id"] == 2
    assert response["result"]["structuredContent"]["answers"][0]["answer"] == "4711"


def test_only_file_uris_of_this_machine_are_paths(tmp_path) -> None:
    folder = tmp_path / "a b#c"
    folder.mkdir()
    assert get_local_path(folder.as_uri()) == folder.resolve()
    assert get_local_path(f"file://localhost{tmp_path}") == tmp_path.resolve()
    for uri in ("https://example.org/", f"file://host{tmp_path}", "file://", "file:", (tmp_path / "no").as_uri()):
        assert get_local_path(uri) is None


# Cancelling and stopping


def test_the_server_exits_when_its_input_closes_or_on_an_interrupt(folder) -> None:
    for way_to_end in ("close", "interrupt"):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = Program(make_command("--base-url", "http://127.0.0.1:9/v1", *SMALL_SETTINGS), **streams)
        process.stdin.write(json.dumps(INITIALIZE_REQUEST) + "\n")
        process.stdin.flush()
        server_info = json.loads(process.stdout.readline())["result"]["serverInfo"]
        assert (server_info["name"], server_info["version"]) == ("memagent", version("memagent-graph"))
        if way_to_end == "interrupt":
            process.send_signal(signal.SIGINT)
            process.wait(5)
        output, errors = process.communicate(timeout=10)
        assert process.returncode == (0 if way_to_end == "close" else -signal.SIGINT)
        assert (output, "Traceback" in errors) == ("", False)


async def test_http_sessions_are_limited_and_logged_tool_names_are_sanitized(folder, monkeypatch) -> None:
    handler = logging.StreamHandler(log_output := io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(server_module, "_MAX_SESSIONS", 1)
    monkeypatch.setattr(server_module, "_BODY_SECONDS", 0.3)
    async with serve_in_process(ScriptedPolicy(read_perfectly)) as url, httpx.AsyncClient() as client:
        headers = await begin_session(client, url)
        await client.post(url, json=make_call("none\x1b[2J", 2), headers=headers)
        assert (await client.post(url, json=INITIALIZE_REQUEST, headers=ACCEPT_HEADER)).status_code == 503
        await client.delete(url, headers=headers)
        await begin_session(client, url)
        slow_reply, sender = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        sender.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert (await asyncio.wait_for(slow_reply.read(), 30)).startswith(b"HTTP/1.1 408")
        sender.close()
    assert ("none [2J" in log_output.getvalue(), "\x1b" in log_output.getvalue()) == (True, False)


async def test_texts_count_until_their_calls_end_even_if_the_client_has_gone(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_SMALL_BYTES", 1000)
    monkeypatch.setattr(server_module, "_MAX_BODY_BYTES", 2000)
    policy = ScriptedPolicy(read_perfectly, delay=1)
    async with serve_in_process(policy) as url, httpx.AsyncClient(timeout=30) as client:
        headers = await begin_session(client, url)
        await client.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)

        async def read_text(number: int, seconds: float = 30) -> str:
            call = make_call("read_document", number, text="word " * 300, questions=QUESTION)
            return (await client.post(url, json=call, headers=headers, timeout=seconds)).text

        with pytest.raises(httpx.ReadTimeout):
            await read_text(2, 0.5)
        assert "try again later" in await read_text(3)
        policy.delay = 0
        while "try again later" in (reply := await read_text(4)):
            pass
        assert "run_id" in reply


async def test_large_bodies_count_until_their_requests_end(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_BODY_BYTES", 100_000)

    async def receive_body() -> Any:
        return {"body": bytes(70_000)}

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["others"]:
            await bodies({"type": "http", "others": 0}, receive_body, send)

    bodies = server_module._BoundedBodies(respond)
    for others in (0, 1, 0):
        with nullcontext() if others == 0 else pytest.raises(HTTPException, match="503"):
            await bodies({"type": "http", "others": others}, receive_body, None)


async def test_the_http_server_stops_with_open_connections(folder) -> None:
    with run_http_server("--base-url", "http://127.0.0.1:9/v1", *SMALL_SETTINGS) as (url, process):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(
                f"POST /mcp HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
                "Content-Length: 1000\r\n\r\n{".encode()
            )
            async with httpx.AsyncClient(timeout=30) as client:
                headers = await begin_session(client, url)
                async with client.stream("GET", url, headers=headers) as events:
                    assert events.status_code == 200
                    process.send_signal(signal.SIGINT)
                    assert await asyncio.to_thread(process.wait, 60) == 130


def test_a_client_that_sends_endless_headers_is_disconnected(http_url) -> None:
    address = urlsplit(http_url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as client:
        client.sendall(f"POST /mcp HTTP/1.1\r\nHost: {address.netloc}\r\n".encode())
        try:
            for number in range(64):
                client.sendall(f"X-{number}: {'x' * 2**14}\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server closed the connection during a send


async def test_a_cancellation_waits_for_the_cleanup_of_the_read() -> None:
    is_closed = False

    async def sleep_and_close() -> None:
        nonlocal is_closed
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0.01)
            is_closed = True

    with anyio.move_on_after(0.05) as scope:
        await shield_work(sleep_and_close())
    assert (scope.cancelled_caught, is_closed) == (True, True)


def test_standard_output_has_only_the_protocol() -> None:
    program = (
        "import os, subprocess\n"
        "from memagent_mcp.server import reserve_standard_output\n"
        "protocol = reserve_standard_output()\n"
        "print('from Python', flush=True)\n"
        "os.write(1, b'from native code')\n"
        "subprocess.run(['echo', 'from a child'])\n"
        "protocol.write('{}'); protocol.flush()\n"
    )
    run = run_program([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout == "{}"
    assert all(source in run.stderr for source in ("from Python", "from native code", "from a child"))


# Hosts and origins


def test_remote_clients_need_an_explicit_option(folder) -> None:
    def get_usage_error(*options: object) -> str:
        run = memagent("mcp", *options, code=ExitCode.USAGE)
        assert run.stdout == ""
        return " ".join(re.sub("[│╭╰╮╯─]", " ", run.stderr).split())

    assert "--allow-remote" in get_usage_error("--http", "--host", "0.0.0.0")
    assert "--server-name" in get_usage_error("--http", "--host", "0.0.0.0", "--allow-remote")
    assert "--http" in get_usage_error("--host", "0.0.0.0")
    assert "does not exist" in get_usage_error("--root", folder / "nowhere")
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        options = ("--http", "--port", port, "--base-url", "http://127.0.0.1:9/v1", *SMALL_SETTINGS)
        assert "cannot listen" in get_usage_error(*options)


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"Host": "localhost:1"}, 200), ({"Host": "rebound.example.org"}, 421),
    ({"Host": "localhost.example.org:80"}, 421), ({"Origin": "https://example.org"}, 403),
])  # fmt: skip
async def test_requests_with_a_foreign_host_or_origin_are_refused(http_url, headers, status) -> None:
    async with httpx.AsyncClient() as client:
        reply = await client.post(http_url, json=INITIALIZE_REQUEST, headers={**ACCEPT_HEADER, **headers})
    assert reply.status_code == status


@pytest.fixture(scope="module")
def http_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMAGENT_HOME", str(tmp_path_factory.mktemp("home")))
        with run_http_server("--base-url", "http://127.0.0.1:9/v1", *SMALL_SETTINGS) as (url, _):
            yield url


def test_server_names_are_allowed_in_addition_to_localhost_and_invalid_ones_refused() -> None:
    with pytest.raises(MemAgentError, match=r"cannot listen on a\.\.b.*host"):
        listen("a..b", 0)
    settings = make_security_settings(["reader.example.org", "::2"])
    assert settings.enable_dns_rebinding_protection
    assert {"reader.example.org", "reader.example.org:*", "[::2]:*", "localhost:*"} <= set(settings.allowed_hosts)
    assert "https://reader.example.org:*" in settings.allowed_origins
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert list_host_names(host, ["a"], danger="there is no login", remedy="") == ("a", host)
    with pytest.raises(MemAgentError, match="other machines can reach reader"):
        list_host_names("reader.example.org", ["a"], danger="there is no login", remedy="")


# The example


def test_the_example_shows_progress_answer_and_evidence(tmp_path, policy_server) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "mcp_client.py"
    (tmp_path / "note.txt").write_text(TEXT)
    command = [sys.executable, example, "note.txt", QUESTION, "--base-url", policy_server.base_url, *SMALL_SETTINGS]
    run = run_program(command, check=True, capture_output=True, timeout=120, cwd=tmp_path)
    assert "answer: 4711" in run.stdout
    assert "harbor is 4711" in run.stdout
    assert len(re.findall(r"^ *\d+%  note\.txt: chunk \d+", run.stdout, re.M)) > 2


class TestStructuredAnswersAndPages:
    SCHEMA: ClassVar = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}

    @staticmethod
    def script(prompt: str) -> str:
        return '{"key": 4711}' if "<schema>" in prompt else read_perfectly(prompt)

    async def test_an_answer_matches_its_response_format(self, folder) -> None:
        async with connect_in_process(folder, script=self.script) as session:
            result = await read_book(session, response_format=self.SCHEMA)
            [answer] = get_answers(result)
            assert (answer["value"], answer["stop_reason"]) == ({"key": 4711}, "answered")
            assert 'Answer: {"key": 4711}' in get_text(result)
            other_schema = {**self.SCHEMA, "required": ["castle"]}
            follow_up = {"run_id": answer["run_id"], "questions": QUESTION, "response_format": other_schema}
            follow_up_result = await session.call_tool("ask_again", follow_up)
            [answer] = get_answers(follow_up_result)
            assert (answer["value"], answer["stop_reason"]) == (None, "invalid_answer")
            assert [event["kind"] for event in answer["events"]].count("invalid_answer") == 3
            assert "The answer does not match response_format" in get_text(follow_up_result)

    async def test_pages_of_a_pdf_can_be_chosen_and_its_folder_stays_hidden(self, folder) -> None:
        (folder / "a.pdf").write_bytes(make_pdf("The key of castle is 12.", "4.2 Keys", "The key of harbor is 4711."))
        async with connect_in_process(folder) as session:
            result = await read_book(session, path="a.pdf", pages="2-3")
            [quote] = get_answer(result)["evidence"]
            assert (quote["page"], quote["section"]) == (3, "4.2 Keys")
            assert "page 3, 4.2 Keys" in get_text(result)
            assert str(folder) not in json.dumps(result.structuredContent)
            assert "has 3 pages, and 4 was asked for" in get_error_text(
                await read_book(session, path="a.pdf", pages="4")
            )
            assert "has no pages to choose" in get_error_text(await read_book(session, pages="2-3"))


async def test_a_call_outside_of_a_request_is_a_clear_error(tmp_path: Path) -> None:
    server = make_server(MemAgent(policy=ScriptedPolicy(read_perfectly), tokenizer="embedded", store=tmp_path))
    with pytest.raises(ToolError, match="outside of a request"):
        await server.call_tool("read_document", {"text": TEXT, "questions": QUESTION})
