"""Clients of the OpenAI API, with only their URL changed, send short and long requests to `memagent serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clients import CLIENTS
from support.fake_server import FakeServer
from support.scripts import SMALL_OPTIONS, make_document, read_perfectly
from support.serving import ServingProcess

KEY = "a-key-of-the-client-tests"
LONG_TEXT = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 12."}, words=3000)
HELLO = [{"role": "user", "content": "Say hello, with an umlaut: ü"}]
LONG_REQUEST = [{"role": "user", "content": LONG_TEXT}, {"role": "user", "content": "What is the key of harbor?"}]


def reply(body: dict[str, Any], number: int) -> str:
    text = body["messages"][-1]["content"]
    return read_perfectly(text) if "<problem>" in text else f"You said: {text}"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer(reply, window=1000) as server:
        yield server


@pytest.fixture(scope="module")
def server(upstream: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    home = tmp_path_factory.mktemp("home")
    environment = {"MEMAGENT_KEYS": f"tests:{KEY}"}
    with ServingProcess(upstream.base_url, home, *SMALL_OPTIONS, "--retries", "0", environment=environment) as process:
        yield process


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    return CLIENTS[request.param]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streaming"])
def test_a_short_request_is_relayed_unchanged(
    client: Callable[..., list[str]], streams: bool, server: ServingProcess, upstream: FakeServer, tmp_path: Path
) -> None:
    earlier_requests = len(upstream.bodies)
    direct_pieces = client(upstream.base_url, KEY, "fake", HELLO, tmp_path, streams=streams)
    pieces = client(server.api, KEY, "fake", HELLO, tmp_path, streams=streams)
    assert pieces == direct_pieces
    assert "".join(pieces).startswith("You said: ")
    direct_body, body = upstream.bodies[earlier_requests:]
    assert body == direct_body


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streaming"])
def test_a_request_longer_than_the_window_is_answered(
    client: Callable[..., list[str]], streams: bool, server: ServingProcess, upstream: FakeServer, tmp_path: Path
) -> None:
    earlier_requests = len(upstream.bodies)
    assert "".join(client(server.api, KEY, "fake", LONG_REQUEST, tmp_path, streams=streams)) == "4711"
    assert all(len(body) < 5000 for body in upstream.bodies[earlier_requests:]), "every prompt fits the window"
