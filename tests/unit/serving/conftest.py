from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_server import FakeServer


@pytest.fixture
def upstream() -> Iterator[FakeServer]:
    with FakeServer(window=1000) as server:
        yield server


@pytest.fixture
def slow_upstream(upstream: FakeServer) -> FakeServer:
    """The policy server with a delay, so that a test can act during a read."""
    upstream.delay = 0.04
    return upstream
