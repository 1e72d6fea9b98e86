"""Branches of one read at work side by side: how many at once, and what the failure of one does to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Branches:
    """The branches of one superstep. LangGraph ends all tasks of a superstep with the first that fails; here one that
    fails waits until those at work have finished, so that what they read is kept, and no other one begins.
    """

    def __init__(self) -> None:
        self._at_work = 0
        self._slots: asyncio.Semaphore | None = None
        self._idle = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def one(self, concurrency: int) -> AsyncIterator[None]:
        """One branch's work, begun once fewer than `concurrency` others are at work.

        Raises:
            Exception: what it raised, or another branch did before this one began.
        """
        self._slots = self._slots or asyncio.Semaphore(concurrency)
        async with self._slots:
            if self._failure is None:
                self._at_work += 1
                self._idle.clear()
                try:
                    yield
                    return
                except Exception as error:  # noqa: BLE001  whatever it is, it waits for the others
                    self._failure = self._failure or error
                finally:
                    self._at_work -= 1
                    if not self._at_work:
                        self._idle.set()
        await self._idle.wait()
        raise self._failure
