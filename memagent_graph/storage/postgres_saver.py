"""A PostgreSQL checkpointer for many reads on many machines. Its errors name the server and a remedy.

A pool of connections serves all reads of a process. If the server closes a connection, another one is opened and the
statement is repeated. All statements here are idempotent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from memagent_graph.errors import CheckpointError
from memagent_graph.storage.state_serializer import (
    CompressedSerializer,
    SeparateText,
    UndecodableStateError,
    require_state,
    reset_size_limits,
)

_Result = TypeVar("_Result")

_MAX_CONNECTIONS: Final = 8
_CONNECT_SECONDS: Final = 30
_MAX_ATTEMPTS: Final = 3
_SETUP_LOCK: Final = 5_730_211_907
"""The key of the advisory lock for creating the tables: an arbitrary number that other programs do not use."""
_MAX_INLINE_CHARACTERS: Final = 200
_UNSTORABLE_IN_JSON: Final = re.compile(r"[\x00\ud800-\udfff]")
"""Characters that PostgreSQL cannot store in JSON."""


class PostgresSaver(AsyncPostgresSaver):
    """Checkpoints on a PostgreSQL server, for any number of machines.

    All methods raise `CheckpointError` if the server cannot be reached or refuses a statement.
    """

    def __init__(self, pool: AsyncConnectionPool[Any], display_url: str) -> None:
        super().__init__(pool, serde=CompressedSerializer())
        self.display_url = display_url
        # The base class has a lock for a single connection. With a pool, reads do not have to wait for each other.
        self.lock = asyncio.Semaphore(_MAX_CONNECTIONS)  # type: ignore[assignment,unused-ignore]

    @classmethod
    async def open(cls, url: str, display_url: str) -> PostgresSaver:
        """Connect, and create the tables if they do not exist.

        Args:
            url: the server and database. Without a password, the settings of libpq are used.
            display_url: the URL for messages, without a password.

        Raises:
            CheckpointError: the server cannot be reached, refuses the user, or does not allow it to create tables.
        """
        options: Mapping[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
        try:
            connect = psycopg.AsyncConnection.connect(url, connect_timeout=_CONNECT_SECONDS, **options)
            async with await connect as connection:
                await _lock_setup(connection)
                await AsyncPostgresSaver(connection).setup()
            pool = AsyncConnectionPool(
                url, min_size=1, max_size=_MAX_CONNECTIONS, kwargs={**options}, timeout=_CONNECT_SECONDS, open=False
            )
            await pool.open(wait=True, timeout=_CONNECT_SECONDS)
        except (psycopg.Error, OSError) as error:
            raise _make_error(display_url, error, None) from error
        return cls(pool, display_url)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.conn.close()

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the newest state of a run, or the state that the config names."""
        get_tuple = super().aget_tuple

        async def read_state() -> CheckpointTuple | None:
            state: CheckpointTuple | None = await get_tuple(config)
            return require_state(state)

        return await self._execute(config, read_state)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """Yield states, newest first."""
        list_states = super().alist

        async def read_states() -> list[CheckpointTuple]:
            return [require_state(state) async for state in list_states(config, **options)]

        for state in await self._execute(config, read_states):
            yield state

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a state. It is on the server when this returns."""
        values = {name: _separate_text(value) for name, value in checkpoint["channel_values"].items()}
        stored_checkpoint, put = checkpoint.copy(), super().aput
        stored_checkpoint["channel_values"] = values
        return await self._execute(config, lambda: put(config, stored_checkpoint, metadata, new_versions))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save the writes of a step before the other steps of its superstep have finished."""
        put_writes = super().aput_writes
        await self._execute(config, lambda: put_writes(config, writes, task_id, task_path))

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete the states of a run."""
        delete_thread = super().adelete_thread
        await self._execute({"configurable": {"thread_id": thread_id}}, lambda: delete_thread(thread_id))

    async def _execute(self, config: RunnableConfig | None, action: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a statement, and repeat it if the connection was lost."""
        attempts_left = _MAX_ATTEMPTS
        while True:
            reset_size_limits()
            try:
                return await action()
            except (psycopg.Error, OSError, UndecodableStateError) as error:
                attempts_left -= 1
                if not attempts_left or not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                    raise _make_error(self.display_url, error, config) from error
            # A restart of the server closes all connections, also those that are idle. The pool swallows cancellations.
            await asyncio.shield(self.conn.check())


def _separate_text(value: Any) -> Any:
    """Return a channel's value as it is saved: short texts stay in the checkpoint, long ones become separate values."""
    if isinstance(value, str) and (len(value) > _MAX_INLINE_CHARACTERS or _UNSTORABLE_IN_JSON.search(value)):
        return SeparateText(value)
    return value


async def _lock_setup(connection: Any) -> None:
    """Wait until no other process creates the tables.

    This polls. `pg_advisory_lock` would wait inside a statement, and the concurrent creation of an index waits for all
    statements of other connections.
    """
    while True:
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s) AS locked", (_SETUP_LOCK,))
        if (await cursor.fetchone())["locked"]:
            return
        await asyncio.sleep(0.1)


def _make_error(display_url: str, error: Exception, config: RunnableConfig | None) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(
        f"the checkpoints at {display_url} cannot be used: {reason or type(error).__name__}",
        hint="Check that the PostgreSQL server runs, the database exists, and the user may make tables there; a "
        "password can be in PGPASSWORD or ~/.pgpass. Then start again: earlier checkpoints are not lost.",
        run_id=str((config or {}).get("configurable", {}).get("thread_id") or "") or None,
    )
