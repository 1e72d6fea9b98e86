"""Clients of the OpenAI API as their users run them: each in a process, in the environment that it is installed in.

`scripts/install_clients.sh` makes the environments. MEMAGENT_CLIENTS names their folder where it is another one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
SECONDS = 3600

Messages = Sequence[dict[str, str]]


class ClientsNotInstalledError(Exception):
    """The environments are not there."""


def _environment(name: str) -> Path:
    folder = Path(os.environ.get("MEMAGENT_CLIENTS", ROOT / ".venv-clients")) / name / "bin"
    if not (folder / "python").exists():
        raise ClientsNotInstalledError(f"{folder} is not there; make clients installs it")
    return folder


def _run(command: Sequence[str | Path], text: str, folder: Path, **variables: str) -> str:
    """Return the output of a client, which sees neither this machine's settings nor this package."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    process = subprocess.run(
        command, input=text, capture_output=True, text=True, env=environment, cwd=folder, timeout=SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _program(environment: str, name: str) -> Callable[..., list[str]]:
    def run(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
        command = [_environment(environment) / "python", PROGRAMS / name, api, key, model]
        pieces: list[str] = json.loads(_run([*command, "stream" if streams else "plain"], json.dumps(messages), folder))
        return pieces

    return run


def _llm(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
    """`llm` puts what is on its input before the prompt: a document, and the question about it."""
    settings = f"- {{model_id: memagent, model_name: {model!r}, api_base: {api!r}, api_key_name: memagent}}\n"
    (folder / "extra-openai-models.yaml").write_text(settings, encoding="utf-8")
    *documents, question = [message["content"] for message in messages]
    command = [_environment("openai-3") / "llm", "prompt", "-m", "memagent", "--key", key, "-o", "temperature", "0"]
    command += [] if streams else ["--no-stream"]
    return [_run([*command, question], "\n\n".join(documents), folder, LLM_USER_PATH=str(folder)).removesuffix("\n")]


def _curl(api: str, key: str, model: str, messages: Messages, folder: Path, *, streams: bool) -> list[str]:
    request = {"model": model, "messages": list(messages), "temperature": 0, **({"stream": True} if streams else {})}
    command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", f"{api}/chat/completions"]
    command += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json", "--data-binary", "@-"]
    reply = _run(command, json.dumps(request), folder)
    if not streams:
        return [json.loads(reply)["choices"][0]["message"]["content"]]
    events = [line.removeprefix("data: ") for line in reply.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


CLIENTS: dict[str, Callable[..., list[str]]] = {
    "openai": _program("openai-3", "openai_client.py"),
    "ChatOpenAI": _program("openai-3", "chat_openai.py"),
    "llm": _llm,
    "LlamaIndex": _program("openai-2", "llama_index_client.py"),
    "curl": _curl,
}
"""By name: asks for a chat completion, and returns the pieces that the answer came in."""
