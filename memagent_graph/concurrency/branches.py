"""Parallel branches of one read: how many run at once, and what happens to the others if one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Branches:
    """The branches of one superstep. LangGraph ends all tasks of a superstep when the first one fails; here a failing
    one waits until the running ones have finished, so that their work is kept, and no other one begins.
    """

    def __init__(self) -> None:
        self._at_work = 0
        self._slots: asyncio.Semaphore | None = None
        self._idle = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def one(self, concurrency: int) -> AsyncIterator[None]:
        """One branch's work, which begins when fewer than `concurrency` others are running.

        Raises:
            Exception: what it raised, or what another branch raised before this one began.
        """
        self._slots = self._slots or asyncio.Semaphore(concurrency)
        async with self._slots:
            if self._failure is None:
                self._at_work += 1
                self._idle.clear()
                try:
                    yield
                    return
                except Exception as error:  # noqa: BLE001  any error waits for the others
                    self._failure = self._failure or error
                finally:
                    self._at_work -= 1
                    if not self._at_work:
                        self._idle.set()
        await self._idle.wait()
        raise self._failure
