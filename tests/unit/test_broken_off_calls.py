"""A synchronous call that is broken off returns once what it ran has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from memagent_graph.concurrency.background import Cancellation, run_sync
from memagent_graph.errors import PermanentError


def test_a_call_that_is_broken_off_waits_for_its_cleanup() -> None:
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            ended.append(True)

    cancellation = Cancellation()
    threading.Timer(0.2, cancellation.cancel).start()
    with pytest.raises(PermanentError):
        run_sync(slow(), cancellation)
    assert ended == [True]
