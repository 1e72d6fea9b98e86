"""The reader behind the LangGraph API: `langgraph dev` for real, and what its environment variables mean."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from click.testing import CliRunner
from langgraph_cli.cli import cli as langgraph_command
from langgraph_sdk import get_client
from support.fake_server import FakeServer
from support.scripts import extract, make_document

from langchain_memagent import platform
from langchain_memagent.platform import InputError, make_graph
from memagent_graph import load_tokenizer
from memagent_graph.errors import MemAgentError, TokenizerError
from memagent_graph.policies.added import PolicyOrigin, write_origin
from memagent_graph.settings import ReadSettings

CONFIGURATION = Path(__file__).resolve().parents[2] / "integrations" / "langgraph.json"
ROOT = CONFIGURATION.parents[1]
CHUNKS = 60
CHUNK_TOKENS = 40
QUESTION = "What is the key of harbor?"
BUDGETS = {
    "MEMAGENT_CONTEXT_WINDOW": "1000",
    "MEMAGENT_QUESTION_TOKENS": "50",
    "MEMAGENT_MEMORY_TOKENS": "60",
    "MEMAGENT_CHUNK_TOKENS": str(CHUNK_TOKENS),
    "MEMAGENT_ANSWER_TOKENS": "60",
}


PERMITTED = ("os.stat", "os.listdir", "io.BufferedReader.read", "io.TextIOWrapper.read", "threading.Lock.acquire")
"""What `langgraph dev` lets block its event loop."""


def test_settings_have_a_variable_for_every_field() -> None:
    others = {"HOME": "/home/ada", "MEMAGENT_HOME": "/data"}
    assert ReadSettings.from_environment(others) == ReadSettings()
    variables = {
        "MEMAGENT_MODEL": "qwen",
        "MEMAGENT_CHUNK_TOKENS": "5000",
        "MEMAGENT_TEMPERATURE": "0.7",
        "MEMAGENT_LOGPROBS": "false",
        "MEMAGENT_REPLACE_UNDECODABLE": "True",
        "MEMAGENT_BOUNDARY": "sentence",
        "MEMAGENT_SEED": "",
    }
    values = {"model": "qwen", "chunk_tokens": 5000, "temperature": 0.7, "logprobs": False, "boundary": "sentence"}
    assert ReadSettings.from_environment(variables) == ReadSettings(**values, replace_undecodable=True)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("MEMAGENT_CHUNK_TOKENS", "many", "='many': Input should be a valid integer"),
        ("MEMAGENT_TEMPERATURE", "warm", "='warm': Input should be a valid number"),
        ("MEMAGENT_LOGPROBS", "perhaps", "='perhaps': Input should be a valid boolean"),
        ("MEMAGENT_BOUNDARY", "line", "='line': Input should be 'token', 'sentence', 'paragraph' or 'heading'"),
        ("MEMAGENT_CHUNK_TOKEN", "5", " is not a setting.*MEMAGENT_CHUNK_TOKENS"),
    ],
)
def test_settings_that_cannot_be_understood_are_refused_by_name(variable, text, words) -> None:
    with pytest.raises(MemAgentError, match=f"{variable}{words}"):
        ReadSettings.from_environment({variable: text})


async def test_remedies_name_variables(monkeypatch) -> None:
    with FakeServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        with pytest.raises(TokenizerError, match=r"Set it \(MEMAGENT_TOKENIZER\)"):
            await make_graph()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def policy_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def address(policy_server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`langgraph dev` with the package's langgraph.json, in a folder of its own, where it keeps its threads."""
    folder = tmp_path_factory.mktemp("served")
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LANG", "MEMAGENT_", "OPENAI_"))},
        **BUDGETS,
        "OPENAI_BASE_URL": policy_server.base_url,
        "MEMAGENT_TOKENIZER": "embedded",
        "MEMAGENT_HOME": str(folder / "home"),
        "LANGSMITH_TRACING": "false",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGGRAPH_NO_VERSION_CHECK": "true",
    }
    command = [sys.executable, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload"]
    command += ["--config", str(CONFIGURATION), "--port", str(port)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url, patience = f"http://127.0.0.1:{port}", time.monotonic() + 90
        while True:
            assert process.poll() is None and time.monotonic() < patience, log.read_text()[-5000:]
            try:
                if httpx.get(f"{url}/ok").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(log.read_text()[-20_000:])


def text_of(chunks: int) -> str:
    tokenizer = load_tokenizer("embedded")
    planted = {0.3: "The key of harbor is 4711.", 0.5: "The key of harbor is 4711.", 0.7: "The key of harbor is 4711."}
    text = make_document(planted, words=chunks * 30)
    end = tokenizer.tokenize(text).prefix_chars(chunks * CHUNK_TOKENS)
    assert end is not None
    return text[:end]


@pytest.mark.timeout(240)
async def test_langgraph_dev_serves_a_read_of_many_chunks_whose_memory_can_be_edited(address, policy_server) -> None:
    client = get_client(url=address)
    thread = (await client.threads.create())["thread_id"]
    request = {"question": QUESTION, "document": text_of(CHUNKS)}
    out: Any = await client.runs.wait(thread, "memagent", input=request)
    assert out["answer"] == "4711"
    state: Any = await client.threads.get_state(thread)
    assert state["values"]["chunks_read"] == CHUNKS
    assert state["next"] == []
    sections = [extract(body["messages"][0]["content"], "section") for body in policy_server.requests]
    assert len({section for section in sections if section}) == CHUNKS

    history: Any = await client.threads.get_history(thread, limit=60)
    behind = next(entry for entry in history if entry["values"]["chunks_read"] == CHUNKS - 10)
    assert behind["next"] == ["update_memory"]
    edited: Any = await client.threads.update_state(
        thread, {"memory": "the key is 99"}, as_node="update_memory", checkpoint=behind["checkpoint"]
    )
    before = len(policy_server.requests)
    again: Any = await client.runs.wait(thread, "memagent", input=None, checkpoint=edited["checkpoint"])
    assert again["answer"] == "99"
    assert len(policy_server.requests) - before == 10 + 1
    state = await client.threads.get_state(thread)
    assert (state["values"]["chunks_read"], state["values"]["memory"]) == (CHUNKS, "the key is 99")


@pytest.mark.timeout(120)
async def test_studio_finds_the_nodes_the_schemas_and_the_progress(address) -> None:
    client = get_client(url=address)
    [assistant] = await client.assistants.search(graph_id="memagent")
    graph: Any = await client.assistants.get_graph(assistant["assistant_id"])
    assert {"read_chunk", "update_memory", "answer"} <= {node["id"] for node in graph["nodes"]}
    schemas: Any = await client.assistants.get_schemas(assistant["assistant_id"])
    assert {"question", "document"} <= set(schemas["input_schema"]["properties"])
    assert "memory" in schemas["state_schema"]["properties"]
    request = {"question": QUESTION, "document": text_of(10)}
    parts = [part async for part in client.runs.stream(None, "memagent", input=request, stream_mode="custom")]
    kinds = [part.data["type"] for part in parts if part.event == "custom"]
    assert kinds == ["memagent.memory_update"] * 10 + ["memagent.answer"]


@pytest.mark.timeout(60)
async def test_wrong_input_is_refused_with_its_remedy(address) -> None:
    request = {"question": "why " * 100, "document": "text"}
    out: Any = await get_client(url=address).runs.wait(None, "memagent", input=request, raise_error=False)
    assert "its budget is 50" in out["__error__"]["message"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"question": QUESTION}, r'lacks "question" \(text\) or "document"'),
        ({"question": QUESTION, "document": " "}, "holds no text"),
    ],
)
async def test_wrong_input_is_an_error_whose_message_the_platform_shows(make_reader, request_, words) -> None:
    graph = platform.ServedGraph(**vars(make_reader().graph()))
    with pytest.raises(InputError, match=words):
        await graph.ainvoke(request_)


@pytest.mark.timeout(60)
async def test_a_text_is_never_taken_for_a_file_of_the_server(address, policy_server) -> None:
    request = {"question": QUESTION, "document": "/etc/hosts"}
    out: Any = await get_client(url=address).runs.wait(None, "memagent", input=request)
    assert out["chunks_read"] == 1
    assert extract(policy_server.requests[-2]["messages"][0]["content"], "section") == "/etc/hosts"


async def test_without_a_server_and_a_policy_a_run_names_the_remedy_and_a_policy_that_is_added_reads(
    isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`langgraph dev` runs with its detector of blocking calls on, and a run that trips it fails."""
    monkeypatch.setattr(platform, "_build_once", platform._build_once.__wrapped__)  # nothing is kept for other tests
    text = make_document({0.5: "The special magic number for coral trumpet is 4711."}, words=200)
    request = {"question": "What is the special magic number for coral trumpet?", "document": text}
    with blockbuster_ctx(["langchain_memagent", "memagent_graph"]) as detector:
        for function in PERMITTED:
            detector.functions[function].deactivate()
        with pytest.raises(InputError, match=r"no policy is named.*BASE_URL.*MEMAGENT_MODEL.*policy add english"):
            await (await make_graph()).ainvoke(request)
        added = isolated_home / "policies" / "english"
        await asyncio.to_thread(shutil.copytree, ROOT / "memagent_graph" / "embedded", added)
        await asyncio.to_thread(write_origin, PolicyOrigin(base="none", base_sha256="", adapter=None), added)
        out = await (await make_graph()).ainvoke(request)
    assert (out["answer"], out["stop_reason"]) == ("4711", "answered")


def test_the_image_has_what_the_default_policy_and_hub_tokenizers_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    described = json.loads(CONFIGURATION.read_text())
    needed = {re.sub(r">=([\d.]+).*", r"~=\1", requirement) for requirement in (*extras["local"], *extras["hub"])}
    assert needed == {*described["dependencies"]} - {".."}
    assert described["env"] == ".env"
    names = set(re.findall(r"^(\w+)=$", (ROOT / "integrations" / ".env.example").read_text(), re.M))
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "MEMAGENT_HOME"} < names
    assert ReadSettings.from_environment(dict.fromkeys(names, "")) == ReadSettings()


def test_langgraphs_own_tool_builds_the_image_with_them(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    outcome = CliRunner().invoke(langgraph_command, ["dockerfile", "-c", str(CONFIGURATION), str(dockerfile)])
    assert outcome.exit_code == 0, outcome.output
    (installs,) = [line for line in dockerfile.read_text().splitlines() if "torch" in line]
    assert "transformers" in installs
    assert "huggingface-hub" in installs
    assert not re.search(r"[<>]", installs), "the image's shell would take these for redirections"
