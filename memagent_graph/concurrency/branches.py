"""Branches of one read at work side by side: how many at once, and what the failure of one does to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Branches:
    """The branches of one superstep. LangGraph ends all tasks of a superstep with the first that fails; here one that
    fails waits until the others have finished, so that what they read is kept.
    """

    def __init__(self) -> None:
        self._open = 0
        self._slots: asyncio.Semaphore | None = None
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def one(self, concurrency: int) -> AsyncIterator[None]:
        """One branch's work, begun once fewer than `concurrency` others are at work."""
        self._slots = self._slots or asyncio.Semaphore(concurrency)
        self._open += 1
        self._idle.clear()
        failure: Exception | None = None
        try:
            async with self._slots:
                yield
        except Exception as error:  # noqa: BLE001  whatever it is, it waits for the others
            failure = error
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        if failure is not None:
            await asyncio.sleep(0)  # the superstep's other branches have begun by then
            await self._idle.wait()
            raise failure
