"""The same question on the same document gives the same requests to the policy through every interface.

Ids, headers, a cache salt, and the request for token ids may differ; the last depends on the log. Evaluation and
training are not compared: an evaluation samples with the seed of its tasks, and training has its own temperature and
accepts invented memories, because rewards are for what the policy wrote.
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
from memagent_graph import MemAgent
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import PolicyError
from memagent_graph.settings import ReadSettings
from memagent_mcp.mcp_command import Mcp
from memagent_serve.app import ServerResources, make_app
from memagent_serve.serve_command import Serve

MANY_SCRIPTS = "Schlüssel ключ κλειδί مفتاح מפתח चाबी กุญแจ 钥匙 カギ 열쇠 e\u0301 👩‍👧 \u2028"
TEXT = make_document({0.1: MANY_SCRIPTS, 0.3: "The key of harbor is 4711."}, words=1200)
QUESTION = "What is the key (ключ, 鍵) of harbor?"
COMPARED_FIELDS = ("model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop")


@pytest.fixture(params=["overwrite", "gated", None])
def strategy(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, strategy: str | None) -> Iterator[FakeServer]:
    """The policy server of every interface, named in the environment, with the profile of the embedded policy."""
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


def make_options(strategy: str | None) -> list[str]:
    return ["--profile", "embedded", "--layout", "paper", *(["--strategy", strategy] if strategy else [])]


def make_settings(strategy: str | None) -> dict[str, Any]:
    return {"profile": "embedded", "layout": "paper", "strategy": strategy}


def read_by_command(book: Path, strategy: str | None) -> None:
    memagent("read", book, "-q", QUESTION, *make_options(strategy))


def read_in_python(book: Path, strategy: str | None) -> None:
    with MemAgent(**make_settings(strategy)) as reader:
        reader.read(book, QUESTION)


def read_by_settings(book: Path, strategy: str | None) -> None:
    with MemAgent(settings=ReadSettings(**make_settings(strategy))) as reader:
        reader.read(book, QUESTION)


def read_by_tool(book: Path, strategy: str | None) -> None:
    ReadLongDocument(roots=[book.parent]).invoke({"questions": [QUESTION], "path": str(book)})


def read_by_graph(book: Path, strategy: str | None) -> None:
    platform._build_once.__wrapped__().invoke({"question": QUESTION, "document": book.read_text()})


def read_by_node(book: Path, strategy: str | None) -> None:
    with MemAgent(**make_settings(strategy)) as reader:
        memagent_node(reader).invoke({"question": QUESTION, "document": book})


def read_by_mcp(book: Path, strategy: str | None) -> None:
    command = Mcp(root=[book.parent], **make_settings(strategy))

    async def call() -> None:
        async with command.make_reader() as reader:
            server = command.make_server(reader)
            async with create_connected_server_and_client_session(server) as client:
                result = await client.call_tool("read_document", {"path": book.name, "questions": QUESTION})
            await server.aclose()
            assert not result.isError, result.content

    asyncio.run(call())


def read_by_serve(book: Path, strategy: str | None) -> None:
    command = Serve(without_keys=True, **make_settings(strategy))
    file = {"filename": book.name, "file_data": base64.b64encode(book.read_bytes()).decode()}
    content = [{"type": "file", "file": file}, {"type": "text", "text": QUESTION}]
    app = make_app(ServerResources(command.make_reader(), command.make_serve_settings()))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


def read_by_corpus(book: Path, strategy: str | None) -> None:
    memagent("corpus", book.parent, "-q", QUESTION, "--out", book.parents[1] / "table", *make_options(strategy))


def read_by_report(book: Path, strategy: str | None) -> None:
    expected_code = ExitCode.NO_ANSWER if strategy == "gated" else ExitCode.ANSWERED  # the server writes no decisions
    memagent("report", QUESTION, book, "-q", QUESTION, "--extractive", *make_options(strategy), code=expected_code)


INTERFACES = (
    read_by_command, read_in_python, read_by_settings, read_by_tool, read_by_graph,
    read_by_node, read_by_mcp, read_by_serve, read_by_corpus, read_by_report
)  # fmt: skip


def test_every_interface_sends_the_same_requests(server, book, strategy) -> None:
    requests: dict[str, list[dict[str, Any]]] = {}
    for read in INTERFACES:
        server.requests.clear()
        read(book, strategy)
        requests[read.__name__] = [{name: body.get(name) for name in COMPARED_FIELDS} for body in server.requests]
    expected = requests[read_by_command.__name__]
    assert len(expected) > 4, "the document has several chunks, and every interface reads all of them"
    for interface, bodies in requests.items():
        assert bodies == expected, interface


@pytest.mark.parametrize(
    ("strategy", "description_text"),
    [
        (None, "all of it, from beginning to end, unless the read stops early, which the answer then says"),
        ("gated", "all of it, from beginning to end, unless the read stops early, which the answer then says"),
        ("retrieval", "only the passages that a search finds for each question, not the whole document"),
        ("middle_truncation", "its beginning and its end, and the middle only if all of it fits"),
    ],
    indirect=["strategy"],
)
async def test_tool_descriptions_say_which_text_the_reader_sees(server, strategy, description_text, tmp_path) -> None:
    async with Mcp(**make_settings(strategy)).make_reader() as reader:
        tools = [*await Mcp().make_server(reader).list_tools(), *MemAgentMiddleware(reader).tools]
    document_tool = ReadLongDocument(roots=[tmp_path])
    descriptions = {tool.name: tool.description for tool in tools} | {"tool": document_tool.description}
    for name in ("read_document", "ask_again", "ask_tool_result", "tool"):
        assert description_text in descriptions[name], name


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
def test_every_command_without_a_policy_says_how_to_name_one(book, arguments) -> None:
    result = memagent(*(argument.format(book=book, books=book.parent) for argument in arguments), code=ExitCode.POLICY)
    assert "--base-url" in result.output and "`memagent policy add english`" in result.output


@pytest.mark.parametrize("make", [MemAgent, ReadLongDocument, platform._build_once.__wrapped__])
def test_the_error_without_a_policy_names_the_arguments_of_python(make) -> None:
    with pytest.raises(PolicyError, match=r"no policy is named.*base_url.*model.*`memagent policy add english`"):
        make()
