from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_server import FakeServer


@pytest.fixture
def upstream() -> Iterator[FakeServer]:
    with FakeServer(window=1000) as server:
        yield server


@pytest.fixture
def slow(upstream: FakeServer) -> FakeServer:
    """A read takes so long that a test can do something in between."""
    upstream.delay = 0.04
    return upstream
