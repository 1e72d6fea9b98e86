"""A synchronous call that is cancelled returns only after its coroutine has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from memagent_graph.concurrency.background import Cancellation, run_sync
from memagent_graph.errors import PermanentError


def test_a_cancelled_call_waits_for_its_cleanup() -> None:
    cleanups = []

    async def sleep_and_clean_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            cleanups.append(True)

    cancellation = Cancellation()
    threading.Timer(0.2, cancellation.cancel).start()
    with pytest.raises(PermanentError):
        run_sync(sleep_and_clean_up(), cancellation)
    assert cleanups == [True]
