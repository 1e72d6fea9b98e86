"""Programs and commands in the README and the user pages run as written, with a fake server as the model."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda
from langgraph.graph import StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel
from support.command_line import memagent
from support.document_files import make_pdf
from support.fake_server import FakeServer
from support.scripts import make_document
from typing_extensions import TypedDict

from memagent_graph import MemAgent, OpenAICompatiblePolicy
from memagent_graph.policies.profile import EMBEDDED_FOLDER

pytestmark = pytest.mark.usefixtures("in_process_conversion")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/*.md") if path.name != "commands.md")]
SERVER_URL = "http://localhost:8000/v1"
FOREIGN_MARKERS = ("s3://", "langchain_anthropic", "localhost:8080")
"""Texts of programs that need another service or package, or `memagent serve`, which has its own tests."""

SKIPPED_COMMANDS = {
    "serve": "does not end", "mcp": "does not end", "policy": "downloads", "eval": "takes minutes",
    "eval-report": "needs an evaluation", "train": "takes minutes", "rl": "takes minutes",
}  # fmt: skip
"""The commands that are not run here, and why; each has its own tests."""


class State(TypedDict):
    """The state of the graph that programs add nodes to."""

    question: str
    report: str
    document: str
    answer: str
    quotes: list[Any]


class Filing(BaseModel):
    """A response format."""

    company: str


def find_programs(page: Path) -> list[str]:
    blocks = re.findall(r"(?s)```python\n(.*?)```", page.read_text("utf-8"))
    return [program for program in blocks if not any(marker in program for marker in FOREIGN_MARKERS)]


def find_commands(page: Path) -> list[list[str]]:
    """Return the arguments of each command that needs no other service or file."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", page.read_text("utf-8"))
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    argument_lists = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("memagent ")]
    local_lists = [line for line in argument_lists if not any(word.startswith(("s3://", "/shared/")) for word in line)]
    return [line for line in local_lists if line[0] not in SKIPPED_COMMANDS and line[-1] != "..."]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server whose model has the tokenizer and the budgets of the embedded policy."""
    with FakeServer(window=2048, root=str(EMBEDDED_FOLDER)) as fake_server:
        yield fake_server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "no-key")
    text = make_document({0.3: "The key of harbor is 4711."}, words=9000)
    for name in ("filings", "reports", "cases"):
        (tmp_path / name).mkdir()
    (tmp_path / "filings" / "a.txt").write_text("Acme signed it.")
    (tmp_path / "book.txt").write_text(text)
    for name in ("a.txt", "note.txt"):
        (tmp_path / name).write_text("Ada signed it in May. The access code of the quiet falcon is 4711.")
    for name in ("a.pdf", "b.pdf", "contract.pdf"):
        (tmp_path / name).write_bytes(make_pdf(*["It rained. Notice is thirty days."] * 11))
    (tmp_path / "questions.txt").write_text("Who?\nWhen?\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "contracts").mkdir()
    (tmp_path / "contracts" / "a.pdf").write_bytes((tmp_path / "a.pdf").read_bytes())
    (tmp_path / "filing.py").write_text(
        "from pydantic import BaseModel\nclass Filing(BaseModel):\n    company: str = ''\n"
    )
    (tmp_path / "filing.json").write_text('{"type": "object", "properties": {"company": {"type": "string"}}}')
    prompt_folder = tmp_path / "home" / "profiles" / "rl-memoryagent"
    prompt_folder.mkdir(parents=True)
    (prompt_folder / "update.txt").write_text("<q>{prompt}</q> <m>{memory}</m> <s>{chunk}</s> Update it.")
    (prompt_folder / "answer.txt").write_text("<q>{prompt}</q> <m>{memory}</m> Answer in \\boxed{}.")
    (prompt_folder / "empty_memory.txt").write_text("nothing")
    (tmp_path / "filing.html").write_text("<p>The revenue of Acme was 12.5 million dollars.</p>")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if find_programs(page)], ids=lambda page: page.name)
def test_programs_of_a_page_run(page: Path, server: FakeServer, folder: Path) -> None:
    policy = OpenAICompatiblePolicy(base_url=server.base_url)
    with MemAgent(policy) as agent:
        namespace: dict[str, Any] = {
            "agent": agent, "policy": policy, "result": agent.read("Ada signed it.", "Who signed it?"), "tools": [],
            "Path": Path, "Filing": Filing, "model": FakeListChatModel(responses=["yes"]),
            "builder": StateGraph(State), "question": "Who signed it?",
            "retriever": RunnableLambda(lambda _: [Document("Ada signed it.")]),
            "store": InMemoryStore(), "thread_id": "1", "secret": "4711", "create_agent": lambda *_, **__: None,
        }  # fmt: skip
        for program in find_programs(page):
            code = compile(
                program.replace(SERVER_URL, server.base_url), page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            if (coroutine := eval(code, namespace)) is not None:  # the program has a top-level `await`
                asyncio.run(coroutine)


def reply_in_any_format(body: dict[str, Any], number: int) -> str:
    """Reply in JSON if a response format is requested, and else in plain text."""
    return '{"company": "Acme"}' if "response_format" in body else "Notice is thirty days. \\boxed{thirty days}"


@pytest.fixture
def any_model(tmp_path: Path) -> Iterator[FakeServer]:
    """A server whose model has a tokenizer and no prompts."""
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(EMBEDDED_FOLDER / name, tmp_path / "model")
    with FakeServer(reply_in_any_format, window=9000, vllm=True, root=str(tmp_path / "model")) as fake_server:
        yield fake_server


@pytest.mark.parametrize("page", [page for page in PAGES if find_commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_run(
    page: Path, any_model: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", any_model.base_url)
    argument_lists = find_commands(page)
    for run_id in ("RUN_A", "RUN_B", "RUN"):
        if any(run_id in arguments for arguments in argument_lists):
            memagent("read", "note.txt", "-q", "Who signed it?", "--run-id", run_id)
    if any("runs.sqlite" in arguments for arguments in argument_lists):
        memagent("read", "note.txt", "-q", "Who signed it?", "--run-id", "RUN", "--log", "runs.sqlite")
    for arguments in argument_lists:
        pairs = pairwise(["", *arguments])
        replaced = [any_model.base_url if option == "--base-url" else word for option, word in pairs]
        expanded = [
            name for word in replaced for name in (sorted(map(str, folder.glob(word))) if "*" in word else [word])
        ]
        memagent(*expanded)
