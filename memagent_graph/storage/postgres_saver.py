"""LangGraph's PostgreSQL checkpointer, opened by a URL: for runs that another machine has to be able to continue.

There is no lease: two readers can read one run at the same time, and the caller has to prevent it. If it happens all
the same, as after a machine was taken for lost, the newest state counts, and chunks are read twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from memagent_graph.errors import CheckpointError

_CONNECTIONS: Final = 8
_SECONDS: Final = 30.0
_SETUP_LOCK: Final = 0x6D656D6167656E74
"""The advisory lock under which tables are created: several processes may be the first ones."""
_SETUP_PAUSE: Final = 0.1


class PostgresSaver(AsyncPostgresSaver):  # type: ignore[misc,unused-ignore]
    """Checkpoints in one database. Every method raises `CheckpointError` if it cannot be used.

    Args:
        pool: connections, which are open; `conn` of this object is to be closed.
        url: the database, for messages.
        serde: turns states into bytes.
    """

    def __init__(self, pool: Any, url: str, serde: SerializerProtocol) -> None:
        super().__init__(pool, serde=serde)
        self.url = url
        self.lock = asyncio.Semaphore(_CONNECTIONS)  # the pool has as many connections, and each has one user

    async def aget_tuple(self, config: Any) -> Any:
        """The newest state of a run, or the one in the config."""
        with failures_told(self.url, config):
            return await super().aget_tuple(config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[Any]:
        """States, newest first."""
        with failures_told(self.url, config):
            async for each in super().alist(config, **options):
                yield each

    async def aput(self, config: Any, *rest: Any) -> Any:
        """Save a state."""
        with failures_told(self.url, config):
            return await super().aput(config, *rest)

    async def aput_writes(self, config: Any, *rest: Any, **options: Any) -> None:
        """Save what a step wrote before the other steps of its superstep are done."""
        with failures_told(self.url, config):
            await super().aput_writes(config, *rest, **options)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a run's states."""
        with failures_told(self.url, {"configurable": {"thread_id": thread_id}}):
            await super().adelete_thread(thread_id)


async def open_postgres(url: str, serde: SerializerProtocol) -> PostgresSaver:
    """A checkpointer whose tables exist.

    Raises:
        CheckpointError: the database cannot be reached, or refuses.
    """
    pool = AsyncConnectionPool(
        url,
        kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        min_size=1,
        max_size=_CONNECTIONS,
        timeout=_SECONDS,
        open=False,
    )
    with failures_told(url):
        # One plain connection first: it says at once what is wrong, where the pool tries again until its time-out.
        async with await psycopg.AsyncConnection.connect(
            url, autocommit=True, row_factory=dict_row, connect_timeout=int(_SECONDS)
        ) as connection:
            await _set_up(connection)
        try:
            await pool.open(wait=True, timeout=_SECONDS)
        except BaseException:
            await pool.close()
            raise
    return PostgresSaver(pool, url, serde)


async def _set_up(connection: Any) -> None:
    """Create the tables, one process at a time.

    The lock is tried, not waited for: one of the migrations builds an index concurrently, and that waits for every
    statement that is under way, also for one that waits for a lock.
    """
    while True:
        found = await connection.execute("SELECT pg_try_advisory_lock(%s) AS taken", (_SETUP_LOCK,))
        if (await found.fetchone())["taken"]:
            break
        await asyncio.sleep(_SETUP_PAUSE)
    try:
        await AsyncPostgresSaver(connection).setup()
    finally:
        await connection.execute("SELECT pg_advisory_unlock(%s)", (_SETUP_LOCK,))


@contextmanager
def failures_told(url: str, config: Any = None) -> Iterator[None]:
    """What the client raises, as a `CheckpointError`."""
    try:
        yield
    except (psycopg.Error, PoolTimeout, OSError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        shown = re.sub(r"//[^/@]*@", "//", url).partition("?")[0]
        raise CheckpointError(
            f"the checkpoints in {shown} cannot be used: {words[0]}",
            hint="Check the URL, the user's rights, and whether the server runs; then start again: nothing that was "
            "saved is lost.",
            run_id=str(((config or {}).get("configurable") or {}).get("thread_id") or "") or None,
        ) from None  # the client's words may repeat the password
