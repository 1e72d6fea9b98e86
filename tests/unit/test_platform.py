"""The reader behind the LangGraph API: a real `langgraph dev`, and its environment variables."""

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
CHUNK_COUNT = 60
CHUNK_TOKENS = 40
QUESTION = "What is the key of harbor?"
BUDGET_VARIABLES = {
    "MEMAGENT_CONTEXT_WINDOW": "1000",
    "MEMAGENT_QUESTION_TOKENS": "50",
    "MEMAGENT_MEMORY_TOKENS": "60",
    "MEMAGENT_CHUNK_TOKENS": str(CHUNK_TOKENS),
    "MEMAGENT_ANSWER_TOKENS": "60",
}


def test_settings_have_a_variable_for_every_field() -> None:
    unrelated_variables = {"HOME": "/home/ada", "MEMAGENT_HOME": "/data"}
    assert ReadSettings.from_environment(unrelated_variables) == ReadSettings()
    variables = {
        "MEMAGENT_MODEL": "qwen",
        "MEMAGENT_CHUNK_TOKENS": "5000",
        "MEMAGENT_TEMPERATURE": "0.7",
        "MEMAGENT_LOGPROBS": "false",
        "MEMAGENT_REPLACE_UNDECODABLE": "True",
        "MEMAGENT_BOUNDARY": "sentence",
        "MEMAGENT_SEED": "",
    }
    values = {"model": "qwen", "chunk_tokens": "5000", "temperature": 0.7, "logprobs": False, "boundary": "sentence"}
    assert ReadSettings.from_environment(variables) == ReadSettings(**values, replace_undecodable=True)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MEMAGENT_CHUNK_TOKENS", "many", "='many': Input should be a valid integer"),
        ("MEMAGENT_TEMPERATURE", "warm", "='warm': Input should be a valid number"),
        ("MEMAGENT_LOGPROBS", "perhaps", "='perhaps': Input should be a valid boolean"),
        ("MEMAGENT_CONCURRENCY", "0", "='0': concurrency must be at least 1, got 0"),
        ("MEMAGENT_BOUNDARY", "line", "='line': Input should be 'token', 'sentence', 'paragraph' or 'heading'"),
        ("MEMAGENT_CHUNK_TOKEN", "5", " is not a setting.*MEMAGENT_CHUNK_TOKENS"),
    ],
)
def test_invalid_variables_are_refused_by_name(variable, text, message) -> None:
    with pytest.raises(MemAgentError, match=f"{variable}{message}"):
        ReadSettings.from_environment({variable: text})


async def test_hints_name_environment_variables(monkeypatch) -> None:
    with FakeServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        with pytest.raises(TokenizerError, match=r"Set it \(MEMAGENT_TOKENIZER\)"):
            await make_graph()


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def policy_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def server_url(policy_server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `langgraph dev` with the langgraph.json of the package; its threads are in a folder of its own."""
    server_folder = tmp_path_factory.mktemp("served")
    port = find_free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LANG", "MEMAGENT_", "OPENAI_"))},
        **BUDGET_VARIABLES,
        "OPENAI_BASE_URL": policy_server.base_url,
        "MEMAGENT_TOKENIZER": "embedded",
        "MEMAGENT_HOME": str(server_folder / "home"),
        "LANGSMITH_TRACING": "false",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGGRAPH_NO_VERSION_CHECK": "true",
    }
    command = [sys.executable, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload"]
    command += ["--config", str(CONFIGURATION), "--port", str(port)]
    log_path = server_folder / "log"
    with log_path.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=server_folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 90
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, log_path.read_text()[-5000:]
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
        print(log_path.read_text()[-20_000:])


def make_text(chunk_count: int) -> str:
    tokenizer = load_tokenizer("embedded")
    facts = {0.3: "The key of harbor is 4711.", 0.5: "The key of harbor is 4711.", 0.7: "The key of harbor is 4711."}
    text = make_document(facts, words=chunk_count * 30)
    end = tokenizer.tokenize(text).prefix_chars(chunk_count * CHUNK_TOKENS)
    assert end is not None
    return text[:end]


@pytest.mark.timeout(240)
async def test_a_long_read_is_served_and_its_memory_can_be_edited(server_url, policy_server) -> None:
    client = get_client(url=server_url)
    thread = (await client.threads.create())["thread_id"]
    request = {"question": QUESTION, "document": make_text(CHUNK_COUNT)}
    output: Any = await client.runs.wait(thread, "memagent", input=request)
    assert output["answer"] == "4711"
    state: Any = await client.threads.get_state(thread)
    assert state["values"]["chunks_read"] == CHUNK_COUNT
    assert state["next"] == []
    sections = [extract(body["messages"][0]["content"], "section") for body in policy_server.requests]
    assert len({section for section in sections if section}) == CHUNK_COUNT

    history: Any = await client.threads.get_history(thread, limit=60)
    snapshot = next(entry for entry in history if entry["values"]["chunks_read"] == CHUNK_COUNT - 10)
    assert snapshot["next"] == ["update_memory"]
    edited_config: Any = await client.threads.update_state(
        thread, {"memory": "the key is 99"}, as_node="update_memory", checkpoint=snapshot["checkpoint"]
    )
    request_count = len(policy_server.requests)
    edited_output: Any = await client.runs.wait(thread, "memagent", input=None, checkpoint=edited_config["checkpoint"])
    assert edited_output["answer"] == "99"
    assert len(policy_server.requests) - request_count == 10 + 1
    state = await client.threads.get_state(thread)
    assert (state["values"]["chunks_read"], state["values"]["memory"]) == (CHUNK_COUNT, "the key is 99")


@pytest.mark.timeout(120)
async def test_the_api_gives_nodes_schemas_and_progress(server_url) -> None:
    client = get_client(url=server_url)
    [assistant] = await client.assistants.search(graph_id="memagent")
    graph: Any = await client.assistants.get_graph(assistant["assistant_id"])
    assert {"read_chunk", "update_memory", "answer"} <= {node["id"] for node in graph["nodes"]}
    schemas: Any = await client.assistants.get_schemas(assistant["assistant_id"])
    assert {"question", "document"} <= set(schemas["input_schema"]["properties"])
    assert "memory" in schemas["state_schema"]["properties"]
    request = {"question": QUESTION, "document": make_text(10)}
    events = [event async for event in client.runs.stream(None, "memagent", input=request, stream_mode="custom")]
    event_types = [event.data["type"] for event in events if event.event == "custom"]
    assert event_types == ["memagent.memory_update"] * 10 + ["memagent.answer"]


@pytest.mark.timeout(60)
async def test_the_error_of_a_too_long_question_is_served(server_url) -> None:
    request = {"question": "why " * 100, "document": "text"}
    output: Any = await get_client(url=server_url).runs.wait(None, "memagent", input=request, raise_error=False)
    assert "its budget is 50" in output["__error__"]["message"]


@pytest.mark.parametrize(
    ("graph_input", "message"),
    [
        ({"question": QUESTION}, r'lacks "question" \(text\) or "document"'),
        ({"question": QUESTION, "document": " "}, "holds no text"),
    ],
)
async def test_invalid_input_is_an_input_error(make_reader, graph_input, message) -> None:
    with pytest.raises(InputError, match=message):
        await platform.ServedGraph(**vars(make_reader().graph())).ainvoke(graph_input)


@pytest.mark.timeout(60)
async def test_a_text_is_never_opened_as_a_file_of_the_server(server_url, policy_server) -> None:
    request = {"question": QUESTION, "document": "/etc/hosts"}
    output: Any = await get_client(url=server_url).runs.wait(None, "memagent", input=request)
    assert output["chunks_read"] == 1
    assert extract(policy_server.requests[-2]["messages"][0]["content"], "section") == "/etc/hosts"


async def test_a_run_without_a_policy_is_an_error_and_an_added_policy_is_used(
    isolated_home: Path, monkeypatch: pytest.MonkeyPatch, langgraph_dev: None
) -> None:
    monkeypatch.setattr(platform, "_build_once", platform._build_once.__wrapped__)  # without its cache
    text = make_document({0.5: "The special magic number for coral trumpet is 4711."}, words=200)
    request = {"question": "What is the special magic number for coral trumpet?", "document": text}
    with pytest.raises(InputError, match=r"no policy is named.*BASE_URL.*MEMAGENT_MODEL.*policy add english"):
        await (await make_graph()).ainvoke(request)
    policy_folder = isolated_home / "policies" / "english"
    await asyncio.to_thread(shutil.copytree, ROOT / "memagent_graph" / "embedded", policy_folder)
    await asyncio.to_thread(write_origin, PolicyOrigin(base="none", base_sha256="", adapter=None), policy_folder)
    output = await (await make_graph()).ainvoke(request)
    assert (output["answer"], output["stop_reason"]) == ("4711", "answered")


def test_the_image_has_the_requirements_of_local_policies_and_hub_tokenizers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    configuration = json.loads(CONFIGURATION.read_text())
    requirements = {re.sub(r">=([\d.]+).*", r"~=\1", requirement) for requirement in (*extras["local"], *extras["hub"])}
    assert requirements == {*configuration["dependencies"]} - {".."}
    assert configuration["env"] == ".env"
    variables = set(re.findall(r"^(\w+)=$", (ROOT / "integrations" / ".env.example").read_text(), re.M))
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "MEMAGENT_HOME"} < variables
    assert ReadSettings.from_environment(dict.fromkeys(variables, "")) == ReadSettings()


def test_the_dockerfile_installs_the_requirements(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    result = CliRunner().invoke(langgraph_command, ["dockerfile", "-c", str(CONFIGURATION), str(dockerfile)])
    assert result.exit_code == 0, result.output
    (install_line,) = [line for line in dockerfile.read_text().splitlines() if "torch" in line]
    assert "transformers" in install_line
    assert "huggingface-hub" in install_line
    assert not re.search(r"[<>]", install_line), "the shell of the image would read these as redirections"
