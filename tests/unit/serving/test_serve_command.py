"""`memagent serve`: its settings from flags, environment and file, its keys, and where it does not start."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_server import FakeServer
from typer.testing import CliRunner

from memagent_graph.addresses import AllowedNames, listen
from memagent_graph.cli import app
from memagent_graph.errors import MemAgentError
from memagent_serve.keys import LOCAL, Keys, Owner
from memagent_serve.serve_command import Serve

ROOT = Path(__file__).parents[3]
KEY, ANOTHER = "a-key-that-is-long-enough", "another-key-that-is-too"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Serve]:
    """What the command was called with, in place of serving."""
    requests: list[Serve] = []
    monkeypatch.setattr(Serve, "run", lambda request: requests.append(request))  # noqa: PLW0108  a method
    return requests


def serve(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_a_flag_goes_before_the_environment(requests: list[Serve], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_WAITING": "9", "PORT": "4321", "SERVER_NAME": "a b", "CANCEL_ON_CLOSE": "true"}.items():
        monkeypatch.setenv(f"MEMAGENT_SERVE_{name}", value)
    assert serve("--port", 5555).exit_code == 0
    (request,) = requests
    settings = request.make_serve_settings()
    assert (settings.max_waiting, request.port) == (9, 5555)
    assert settings.cancel_on_close
    assert settings.names == ("a", "b", "127.0.0.1")
    monkeypatch.setenv("MEMAGENT_SERVE_MAX_READS", "many")
    assert serve().exit_code == 2


def test_no_start_if_no_request_could_be_read() -> None:
    with FakeServer() as server:
        done = serve("--base-url", server.base_url, "--port", 0)
        narrow = serve("--base-url", server.base_url, "--port", 0, "--tokenizer", "embedded", "--answer-tokens", 9000)
    assert (done.exit_code, narrow.exit_code) == (7, 7), (done.stderr, narrow.stderr)
    assert "which tokenizer" in done.stderr and "--tokenizer embedded" in done.stderr
    assert "serving at" not in done.stderr + narrow.stderr


def test_the_services_in_the_docs_and_the_container_file_start_the_server(requests: list[Serve]) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    compose = yaml.safe_load(page.partition("```yaml\n# compose")[2].partition("\n")[2].partition("```")[0])
    unit = page.partition("```ini\n")[2].partition("```")[0]
    container = (ROOT / "Dockerfile").read_text("utf-8")
    (command,) = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    (entry,) = [line.partition(" ")[2] for line in container.splitlines() if line.startswith("ENTRYPOINT ")]
    assert shlex.split(command)[1:] == ["serve"]
    name, *options = [*json.loads(entry)[1:], *shlex.split(compose["services"]["memagent"]["command"])]
    assert name == "serve"
    assert serve(*options).exit_code == 0
    assert requests[0].host == "0.0.0.0"
    assert requests[0].server_name == ["memagent", "localhost"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "there are no keys"),
        ({"host": "192.168.1.7"}, "there are no keys"),
        ({"host": "0.0.0.0", "without_keys": True}, "server_name"),
        ({"host": "::", "without_keys": True}, "server_name"),
        ({"host": "0.0.0.0", "server_name": ["me"]}, "there are no keys"),
    ],
)
def test_no_start_on_an_open_address_without_keys_and_names(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MemAgentError, match=words):
        Serve(**options).make_serve_settings()
    names = Serve(**{**options, "server_name": ["me"], "without_keys": True}).make_serve_settings().names
    assert {"me"} <= set(names) <= {"me", "192.168.1.7"}


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = "{KEY}"\n[bob]\nkey = "{ANOTHER}"\nmax_tokens = 1000\nmax_seconds = 2.5\n')
    monkeypatch.setenv("MEMAGENT_KEYS", "carol:the-key-of-carol-here")
    keys = Serve(keys=file, host="0.0.0.0", server_name=["me"]).make_serve_settings().keys
    assert keys.find_owner(f"Bearer {KEY}") == Owner("alice")
    assert keys.find_owner(f"bearer {ANOTHER}") == Owner("bob", max_tokens=1000, max_seconds=2.5)
    assert keys.find_owner("Bearer the-key-of-carol-here") == Owner("carol")
    assert keys.find_owner("Bearer the-key-of-carol-her") is None
    assert keys.find_owner(None) is None
    assert Keys().find_owner(None) == LOCAL
    assert KEY not in repr(vars(keys)), "keys are kept as digests"


@pytest.mark.parametrize(
    "text",
    [
        'alice = "short"',
        f'"../x" = "{KEY}"',
        f'alice = "{KEY}"\nbob = "{KEY}"',
        f'[alice]\nkey = "{KEY}"\nmax_tokens = -1',
        f'[alice]\nkey = "{KEY}"\nadmin = true',
        "alice = 3",
        "alice",
    ],
)
def test_a_keys_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(MemAgentError) as caught:
        Keys.load(file)
    assert caught.value.hint
    assert KEY not in str(caught.value)
    with pytest.raises(MemAgentError, match="without a name"):
        Keys.load(None, KEY)


def test_no_reply_waits_for_more_to_fill_a_packet() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_names_that_are_answered() -> None:
    names = AllowedNames(["reader.example", "fe80::1"], ["https://chat.example/"])
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8080", "reader.example", "[fe80::1]"):
        assert names.has_host(host), host
    for host in ("", "evil.example", "localhost.evil.example", "localhost@evil", "localhost/x", "[::1", "localhost:x",
                 "[::1].evil", "127.0.0.1#", "localhost?"):  # fmt: skip
        assert not names.has_host(host), host
    assert names.has_origin("https://chat.example")
    assert names.has_origin("http://localhost:3000")
    assert not names.has_origin("null")
    assert not names.has_origin("ftp://localhost")
