"""`memagent serve`: settings from options, environment and files, keys, and settings with which it does not start."""

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
KEY, OTHER_KEY = "a-key-that-is-long-enough", "another-key-that-is-too"


@pytest.fixture
def serve_calls(monkeypatch: pytest.MonkeyPatch) -> list[Serve]:
    """The calls of the command, recorded instead of serving."""
    serve_calls: list[Serve] = []
    monkeypatch.setattr(Serve, "run", lambda request: serve_calls.append(request))  # noqa: PLW0108  a method
    return serve_calls


def invoke_serve(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_options_override_the_environment(serve_calls: list[Serve], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_WAITING": "9", "PORT": "4321", "SERVER_NAME": "a b", "CANCEL_ON_CLOSE": "true"}.items():
        monkeypatch.setenv(f"MEMAGENT_SERVE_{name}", value)
    assert invoke_serve("--port", 5555).exit_code == 0
    (request,) = serve_calls
    settings = request.make_serve_settings()
    assert (settings.max_waiting, request.port) == (9, 5555)
    assert settings.cancel_on_close
    assert settings.names == ("a", "b", "127.0.0.1")
    monkeypatch.setenv("MEMAGENT_SERVE_MAX_READS", "many")
    assert invoke_serve().exit_code == 2


def test_server_does_not_start_if_no_request_could_be_read() -> None:
    with FakeServer() as server:
        options = ("--base-url", server.base_url, "--port", 0)
        without_tokenizer = invoke_serve(*options)
        without_room = invoke_serve(*options, "--tokenizer", "embedded", "--answer-tokens", 9000)
    assert (without_tokenizer.exit_code, without_room.exit_code) == (7, 7)
    assert "which tokenizer" in without_tokenizer.stderr and "--tokenizer embedded" in without_tokenizer.stderr
    assert "serving at" not in without_tokenizer.stderr + without_room.stderr


def test_commands_in_the_docs_and_the_container_file_start_the_server(serve_calls: list[Serve]) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    compose = yaml.safe_load(page.partition("```yaml\n# compose")[2].partition("\n")[2].partition("```")[0])
    systemd_unit = page.partition("```ini\n")[2].partition("```")[0]
    container_file = (ROOT / "Dockerfile").read_text("utf-8")
    (command,) = [line.partition("=")[2] for line in systemd_unit.splitlines() if line.startswith("ExecStart=")]
    (entry_point,) = [line.partition(" ")[2] for line in container_file.splitlines() if line.startswith("ENTRYPOINT ")]
    assert shlex.split(command)[1:] == ["serve"]
    subcommand, *options = [*json.loads(entry_point)[1:], *shlex.split(compose["services"]["memagent"]["command"])]
    assert subcommand == "serve"
    assert invoke_serve(*options).exit_code == 0
    assert serve_calls[0].host == "0.0.0.0"
    assert serve_calls[0].server_name == ["memagent", "localhost"]


@pytest.mark.parametrize(("options", "message"), [
    ({"host": "0.0.0.0"}, "there are no keys"), ({"host": "192.168.1.7"}, "there are no keys"),
    ({"host": "0.0.0.0", "without_keys": True}, "server_name"), ({"host": "::", "without_keys": True}, "server_name"),
    ({"host": "0.0.0.0", "server_name": ["me"]}, "there are no keys"), ({"server_name": ["a.b:80"]}, "and a port"),
])  # fmt: skip
def test_public_address_without_keys_and_names_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MemAgentError, match=message):
        Serve(**options).make_serve_settings()
    names = Serve(**{**options, "server_name": ["me"], "without_keys": True}).make_serve_settings().names
    assert {"me"} <= set(names) <= {"me", "192.168.1.7", "127.0.0.1"}


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys_path = tmp_path / "keys.toml"
    keys_path.write_text(f'alice = "{KEY}"\n[bob]\nkey = "{OTHER_KEY}"\nmax_tokens=1000\nmax_seconds=2.5', "utf-8-sig")
    monkeypatch.setenv("MEMAGENT_KEYS", "carol:the-key-of-carol-here")
    keys = Serve(keys=keys_path, host="0.0.0.0", server_name=["me"]).make_serve_settings().keys
    assert keys.find_owner(f"Bearer {KEY}") == Owner("alice")
    assert keys.find_owner(f"bearer {OTHER_KEY}") == Owner("bob", max_tokens=1000, max_seconds=2.5)
    assert keys.find_owner("Bearer the-key-of-carol-here") == Owner("carol")
    assert keys.find_owner("Bearer the-key-of-carol-her") is None
    assert keys.find_owner(None) is None
    assert Keys().find_owner(None) == LOCAL
    assert KEY not in repr(vars(keys)), "keys are kept as digests"


@pytest.mark.parametrize("text", [
    "# alice", 'alice = "short"', f'"../x" = "{KEY}"', f'alice = "{KEY}"\nbob = "{KEY}"', "alice = 3", "alice",
    f'[alice]\nkey = "{KEY}"\nmax_tokens = -1', f'[alice]\nkey = "{KEY}"\nadmin = true',
])  # fmt: skip
def test_invalid_keys_file_is_refused_without_showing_keys(tmp_path: Path, text: str) -> None:
    keys_path = tmp_path / "keys.toml"
    keys_path.write_text(text)
    with pytest.raises(MemAgentError) as error:
        Keys.load(keys_path)
    assert error.value.hint
    assert KEY not in str(error.value)
    with pytest.raises(MemAgentError, match="without a name"):
        Keys.load(None, KEY)


def test_sockets_have_tcp_nodelay() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_allowed_host_names_and_origins() -> None:
    names = AllowedNames(["reader.example", "fe80::1"], ["https://chat.example/"])
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8080", "reader.example", "[fe80::1]"):
        assert names.allows_host(host), host
    for host in ("", "evil.example", "localhost.evil.example", "localhost@evil", "localhost/x", "[::1", "localhost:x",
                 "[::1].evil", "127.0.0.1#", "localhost?"):  # fmt: skip
        assert not names.allows_host(host), host
    assert names.allows_origin("https://chat.example")
    assert names.allows_origin("http://localhost:3000")
    assert not names.allows_origin("null")
    assert not names.allows_origin("ftp://localhost")
