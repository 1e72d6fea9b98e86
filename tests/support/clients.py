"""Clients of the OpenAI API as their users run them: in a process each, in their own environments.

`scripts/install_clients.sh` makes the environments in .venv-clients; MEMAGENT_CLIENTS names another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
TIMEOUT_SECONDS = 3600

Messages = Sequence[dict[str, str]]


class ClientsNotInstalledError(Exception):
    """The clients' environments are not installed."""


def _find_environment(name: str) -> Path:
    folder = Path(os.environ.get("MEMAGENT_CLIENTS", ROOT / ".venv-clients")) / name / "bin"
    if not (folder / "python").exists():
        raise ClientsNotInstalledError(f"{folder} does not exist; make clients installs it")
    return folder


def _run_client(command: Sequence[str | Path], text: str, folder: Path, **variables: str) -> str:
    """Return the output of a client that sees neither this machine's settings nor this package."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    process = subprocess.run(
        command, input=text, capture_output=True, text=True, env=env, cwd=folder, timeout=TIMEOUT_SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _make_client(environment: str, name: str) -> Callable[..., list[str]]:
    def run(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
        command = [_find_environment(environment) / "python", PROGRAMS / name, api, key, model]
        output = _run_client([*command, "stream" if streams else "plain"], json.dumps(messages), folder)
        pieces: list[str] = json.loads(output)
        return pieces

    return run


def _run_llm(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
    """Run `llm`, which puts its standard input (the document) before the prompt (the question)."""
    settings = f"- {{model_id: memagent, model_name: {model!r}, api_base: {api!r}, api_key_name: memagent}}\n"
    (folder / "extra-openai-models.yaml").write_text(settings, encoding="utf-8")
    *documents, question = [message["content"] for message in messages]
    options = ["-m", "memagent", "--key", key, "-o", "temperature", "0", *([] if streams else ["--no-stream"])]
    command = [_find_environment("openai-3") / "llm", "prompt", *options, question]
    return [_run_client(command, "\n\n".join(documents), folder, LLM_USER_PATH=str(folder)).removesuffix("\n")]


def _run_curl(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
    request = {"model": model, "messages": list(messages), "temperature": 0, **({"stream": True} if streams else {})}
    command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", f"{api}/chat/completions"]
    command += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json", "--data-binary", "@-"]
    reply = _run_client(command, json.dumps(request), folder)
    if not streams:
        return [json.loads(reply)["choices"][0]["message"]["content"]]
    events = [line.removeprefix("data: ") for line in reply.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


CLIENTS: dict[str, Callable[..., list[str]]] = {
    "openai": _make_client("openai-3", "openai_client.py"),
    "ChatOpenAI": _make_client("openai-3", "chat_openai.py"),
    "llm": _run_llm,
    "LlamaIndex": _make_client("openai-2", "llama_index_client.py"),
    "curl": _run_curl,
}
"""By name, a function that asks for a chat completion and returns the pieces of the answer as they arrived."""
