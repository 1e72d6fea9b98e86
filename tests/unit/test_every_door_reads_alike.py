"""The same question on the same document, through every door with the same policy, gives the same requests.

What may differ: ids, headers, a cache salt, and whether token ids are asked for, which depends on the log. An
evaluation samples with the seed of its tasks. Training reads with a temperature of its own and accepts invented
memories: rewards are for what the policy wrote itself.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.memory import create_connected_server_and_client_session
from starlette.testclient import TestClient
from support.command_line import memagent
from support.fake_server import FakeServer
from support.scripts import make_document

from langchain_memagent import MemAgentMiddleware, ReadLongDocument, memagent_node, platform
from memagent_graph import MemAgent, load_tokenizer
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import PolicyError
from memagent_graph.settings import ReadSettings
from memagent_mcp.mcp_command import Mcp
from memagent_serve.app import ServerResources, make_app
from memagent_serve.serve_command import Serve

SCRIPTS = "Schlüssel ключ κλειδί مفتاح מפתח चाबी กุญแจ 钥匙 カギ 열쇠 e\u0301 👩‍👧 \u2028"
TEXT = make_document({0.1: SCRIPTS, 0.3: "The key of harbor is 4711."}, words=1200)
QUESTION = "What is the key (ключ, 鍵) of harbor?"
COMPARED = ("model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop")


@pytest.fixture(params=["overwrite", "gated", None])
def strategy(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, strategy: str | None) -> Iterator[FakeServer]:
    """The policy of every door, by the environment, with the budgets and prompts of the embedded one."""
    with FakeServer(window=2048) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("MEMAGENT_PROFILE", "embedded")
        monkeypatch.setenv("MEMAGENT_LAYOUT", "paper")
        monkeypatch.setenv("MEMAGENT_STRATEGY", strategy or "")
        yield server


@pytest.fixture
def book(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "book.txt").write_text(TEXT)
    return folder / "book.txt"


def options(strategy: str | None) -> list[str]:
    return ["--profile", "embedded", "--layout", "paper", *(["--strategy", strategy] if strategy else [])]


def choices(strategy: str | None) -> dict[str, Any]:
    return {"profile": "embedded", "layout": "paper", "strategy": strategy}


def by_command_line(book: Path, strategy: str | None) -> None:
    memagent("read", book, "-q", QUESTION, *options(strategy))


def in_python(book: Path, strategy: str | None) -> None:
    with MemAgent(**choices(strategy)) as reader:
        reader.read(book, QUESTION)


def by_settings(book: Path, strategy: str | None) -> None:
    with MemAgent(settings=ReadSettings(**choices(strategy))) as reader:
        reader.read(book, QUESTION)


def by_tool(book: Path, strategy: str | None) -> None:
    ReadLongDocument(roots=[book.parent]).invoke({"questions": [QUESTION], "path": str(book)})


def by_node(book: Path, strategy: str | None) -> None:
    platform._build_once.__wrapped__().invoke({"question": QUESTION, "document": book.read_text()})


def by_own_node(book: Path, strategy: str | None) -> None:
    with MemAgent(**choices(strategy)) as reader:
        memagent_node(reader).invoke({"question": QUESTION, "document": book})


def by_mcp(book: Path, strategy: str | None) -> None:
    command = Mcp(root=[book.parent], **choices(strategy))

    async def call() -> None:
        async with command.make_reader() as reader:
            server = command.make_server(reader)
            async with create_connected_server_and_client_session(server) as client:
                result = await client.call_tool("read_document", {"path": book.name, "questions": QUESTION})
            await server.aclose()
            assert not result.isError, result.content

    asyncio.run(call())


def by_serve(book: Path, strategy: str | None) -> None:
    command = Serve(without_keys=True, **choices(strategy))
    file = {"filename": book.name, "file_data": base64.b64encode(book.read_bytes()).decode()}
    parts = [{"type": "file", "file": file}, {"type": "text", "text": QUESTION}]
    app = make_app(ServerResources(command.make_reader(), command.make_serve_settings()))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        body = {"model": "fake", "messages": [{"role": "user", "content": parts}]}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


def by_corpus(book: Path, strategy: str | None) -> None:
    memagent("corpus", book.parent, "-q", QUESTION, "--out", book.parents[1] / "table", *options(strategy))


def by_report(book: Path, strategy: str | None) -> None:
    code = ExitCode.NO_ANSWER if strategy == "gated" else ExitCode.ANSWERED  # the scripted policy decides on nothing
    memagent("report", QUESTION, book, "-q", QUESTION, "--extractive", *options(strategy), code=code)


DOORS = (
    by_command_line, in_python, by_settings, by_tool, by_node, by_own_node, by_mcp, by_serve, by_corpus, by_report,
)  # fmt: skip


def test_every_door_sends_the_same_requests(server, book, strategy) -> None:
    requests: dict[str, list[dict[str, Any]]] = {}
    for door in DOORS:
        server.requests.clear()
        door(book, strategy)
        requests[door.__name__] = [{name: body.get(name) for name in COMPARED} for body in server.requests]
    expected = requests[by_command_line.__name__]
    assert len(expected) > 4, "the document has several chunks, and every door reads all of them"
    tokenizer = load_tokenizer("embedded")
    for door, bodies in requests.items():
        assert bodies == expected, door
        ids = [tokenizer.encode(body["messages"][-1]["content"]) for body in bodies]
        assert ids == [tokenizer.encode(body["messages"][-1]["content"]) for body in expected], door


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (None, "all of it, from beginning to end, unless the read stops early, which the answer then says"),
        ("gated", "all of it, from beginning to end, unless the read stops early, which the answer then says"),
        ("retrieval", "only the passages that a search finds for each question, not the whole document"),
        ("middle_truncation", "its beginning and its end, and the middle only if all of it fits"),
    ],
    indirect=["strategy"],
)
async def test_agents_are_told_what_the_reader_will_be_shown(server, strategy, words, tmp_path) -> None:
    async with Mcp(**choices(strategy)).make_reader() as reader:
        tools = [*await Mcp().make_server(reader).list_tools(), *MemAgentMiddleware(reader).tools]
    own = ReadLongDocument(roots=[tmp_path])
    descriptions = {tool.name: tool.description for tool in tools} | {"tool": own.description}
    for name in ("read_document", "ask_again", "ask_tool_result", "tool"):
        assert words in descriptions[name], name


COMMAND_LINES = (
    ["read", "{book}", "-q", QUESTION],
    ["doctor"],
    ["mcp", "--root", "{books}"],
    ["serve", "--port", "0", "--without-keys"],
    ["corpus", "{books}", "-q", QUESTION, "--out", "{books}/table"],
    ["report", QUESTION, "{book}"],
    ["demo"],
)


@pytest.mark.parametrize("arguments", COMMAND_LINES, ids=lambda arguments: arguments[0])
def test_without_any_policy_every_command_names_what_gives_it_one(book, arguments) -> None:
    done = memagent(*(part.format(book=book, books=book.parent) for part in arguments), code=ExitCode.POLICY)
    assert "--base-url" in done.output and "`memagent policy add english`" in done.output


@pytest.mark.parametrize("make", [MemAgent, ReadLongDocument, platform._build_once.__wrapped__])
def test_without_any_policy_python_names_its_arguments(make) -> None:
    with pytest.raises(PolicyError, match=r"no policy is named.*base_url.*model.*`memagent policy add english`"):
        make()
