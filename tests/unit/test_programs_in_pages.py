"""The Python programs in README and the user pages run as written, with a server that stands in for a model."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langgraph.graph import StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel
from support.document_files import pdf
from support.fake_server import FakeServer
from support.scripts import document_with
from typing_extensions import TypedDict

from memagent_graph import MemAgent, OpenAICompatiblePolicy
from memagent_graph.policies.profile import EMBEDDED_FOLDER

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/*.md") if path.name != "commands.md")]
SERVER = "http://localhost:8000/v1"
OTHERS = ("s3://", "langchain_anthropic", "localhost:8080")
"""What is in a program that needs a service or a package of others, or `memagent serve`, which has its own tests."""


class State(TypedDict):
    """Of the graph that nodes are added to."""

    question: str
    report: str
    document: str
    answer: str
    quotes: list[Any]


class Filing(BaseModel):
    """The form of an answer."""

    company: str


def programs(page: Path) -> list[str]:
    found = re.findall(r"(?s)```python\n(.*?)```", page.read_text("utf-8"))
    return [program for program in found if not any(word in program for word in OTHERS)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Its model has the tokenizer and the budgets of the embedded policy."""
    with FakeServer(window=2048, root=str(EMBEDDED_FOLDER)) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "nobody's")
    text = document_with({0.3: "The key of harbor is 4711."}, words=9000)
    for name in ("filings", "reports", "cases"):
        (tmp_path / name).mkdir()
    (tmp_path / "filings" / "a.txt").write_text("Acme signed it.")
    (tmp_path / "book.txt").write_text(text)
    for name in ("a.txt", "note.txt"):
        (tmp_path / name).write_text("Ada signed it in May. The access code of the quiet falcon is 4711.")
    for name in ("a.pdf", "b.pdf", "contract.pdf"):
        (tmp_path / name).write_bytes(pdf(*(f"It is page {number}. Notice is thirty days." for number in range(1, 12))))
    (tmp_path / "filing.html").write_text("<p>The revenue of Acme was 12.5 million dollars.</p>")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=lambda page: page.name)
def test_a_page_s_programs_run(page: Path, server: FakeServer, folder: Path) -> None:
    policy = OpenAICompatiblePolicy(base_url=server.base_url)
    with MemAgent(policy) as agent:
        names: dict[str, Any] = {
            "agent": agent, "policy": policy, "result": agent.read("Ada signed it.", "Who signed it?"), "tools": [],
            "Path": Path, "Filing": Filing, "model": FakeListChatModel(responses=["yes"]),
            "builder": StateGraph(State), "found": [Document("Ada signed it.")], "question": "Who signed it?",
            "store": InMemoryStore(), "thread_id": "1", "secret": "4711", "create_agent": lambda *_, **__: None,
        }  # fmt: skip
        for program in programs(page):
            code = compile(
                program.replace(SERVER, server.base_url), page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            if (waiting := eval(code, names)) is not None:  # it has an `await` outside of a function
                asyncio.run(waiting)
