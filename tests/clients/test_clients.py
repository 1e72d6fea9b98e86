"""Clients of the OpenAI API, unchanged but for the URL, in front of a light policy server: short and long requests."""

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
LONG = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 12."}, words=3000)
HELLO = [{"role": "user", "content": "Say hello, with an umlaut: ü"}]
ASKED = [{"role": "user", "content": LONG}, {"role": "user", "content": "What is the key of harbor?"}]


def say(body: dict[str, Any], number: int) -> str:
    text = body["messages"][-1]["content"]
    return read_perfectly(text) if "<problem>" in text else f"You said: {text}"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer(say, window=1000) as server:
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
def test_a_short_request_is_the_same_as_without_the_server(
    client: Callable[..., list[str]], streams: bool, server: ServingProcess, upstream: FakeServer, tmp_path: Path
) -> None:
    sent = len(upstream.bodies)
    direct = client(upstream.base_url, KEY, "fake", HELLO, tmp_path, streams=streams)
    here = client(server.api, KEY, "fake", HELLO, tmp_path, streams=streams)
    assert here == direct
    assert "".join(here).startswith("You said: ")
    one, other = upstream.bodies[sent:]
    assert one == other, "the body is not the client's"


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streaming"])
def test_a_request_longer_than_the_window_is_answered(
    client: Callable[..., list[str]], streams: bool, server: ServingProcess, upstream: FakeServer, tmp_path: Path
) -> None:
    sent = len(upstream.bodies)
    assert "".join(client(server.api, KEY, "fake", ASKED, tmp_path, streams=streams)) == "4711"
    assert all(len(body) < 5000 for body in upstream.bodies[sent:]), "a prompt was longer than the window"
