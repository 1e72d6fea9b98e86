"""A SQLite checkpointer for many reads at once. Its errors name the file, the run and a remedy.

A read waits for its checkpoints, and a commit takes much longer than writing a row. So LangGraph's saver runs in the
thread of a `DatabaseWriter`, and all changes that arrive during a commit are committed together in the next one.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import langgraph.checkpoint.sqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from memagent_graph.errors import CheckpointError
from memagent_graph.storage.database import open_database
from memagent_graph.storage.database_writer import DatabaseWriter
from memagent_graph.storage.state_serializer import (
    CompressedSerializer,
    UndecodableStateError,
    require_state,
    reset_size_limits,
)

T = TypeVar("T")

_SCHEMA: Final = (
    "CREATE TABLE checkpoints ( thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '', checkpoint_id TEXT "
    "NOT NULL, parent_checkpoint_id TEXT, type TEXT, checkpoint BLOB, metadata BLOB, "
    "PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id) )",
    "CREATE TABLE writes ( thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '', checkpoint_id TEXT "
    "NOT NULL, task_id TEXT NOT NULL, task_path TEXT NOT NULL DEFAULT '', idx INTEGER NOT NULL, channel TEXT NOT NULL, "
    "type TEXT, value BLOB, PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) )",
)
"""The tables of LangGraph's own saver, whose files can be used."""
_DELETE_WRITES: Final = (
    "DELETE FROM writes WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? AND idx >= 0"
)


class SqliteSaver(langgraph.checkpoint.sqlite.SqliteSaver):
    """Checkpoints in one file, for asynchronous graphs.

    All methods raise `CheckpointError` if the file is damaged, stays locked, or cannot be written.

    Args:
        path: the file.

    Raises:
        OSError, sqlite3.Error: the file cannot be opened, is not a database, or has other tables.
    """

    def __init__(self, path: Path) -> None:
        connection = open_database(path, _SCHEMA)  # raises for a file that cannot be used
        connection.close()
        super().__init__(connection, serde=CompressedSerializer())
        self.is_setup = True
        self.path = path
        self._writer = DatabaseWriter(path, partial(open_database, path, _SCHEMA), self)

    @contextmanager
    def cursor(self, transaction: bool = True) -> Iterator[sqlite3.Cursor]:
        """Yield a cursor. The writer begins and commits transactions."""
        with closing(self.conn.cursor()) as cursor:
            yield cursor

    async def aclose(self) -> None:
        """Close the file. The saver can be used again."""
        self._writer.close()  # in this thread, because none can be started at the end of the process

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the newest state of a run, or the state that the config names."""
        return await self._execute(config, lambda: require_state(self.get_tuple(config)))

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """Yield states, newest first."""
        states = await self._execute(config, lambda: list(map(require_state, self.list(config, **options))))
        for state in states:
            yield state

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a state. It is in the file when this returns.

        The writes of earlier steps are in the state too, and are deleted, which saves 40 % of the file. LangGraph needs
        writes only for the newest state of a run, or if a state has a `DeltaChannel`.
        """
        ids = config["configurable"]

        def save_state() -> RunnableConfig:
            new_config = self.put(config, checkpoint, metadata, new_versions)
            if (parent_id := ids.get("checkpoint_id")) is not None and not _has_delta_channels(checkpoint, metadata):
                self.conn.execute(_DELETE_WRITES, (str(ids["thread_id"]), ids["checkpoint_ns"], parent_id))
            return new_config

        return await self._execute(config, save_state)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save the writes of a step before the other steps of its superstep have finished."""
        await self._execute(config, lambda: self.put_writes(config, writes, task_id, task_path))

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete the states of a run."""
        await self._execute({"configurable": {"thread_id": thread_id}}, lambda: self.delete_thread(thread_id))

    async def _execute(self, config: RunnableConfig | None, action: Callable[[], T]) -> T:
        """Run an action in the writer's thread, in one transaction with the actions of other reads."""

        def job(connection: sqlite3.Connection) -> T:
            self.conn = connection
            reset_size_limits()
            return action()

        try:
            return await asyncio.wrap_future(self._writer.submit(job))
        except (sqlite3.Error, OSError, UndecodableStateError) as error:
            raise CheckpointError(
                f"the checkpoints in {self.path} cannot be used: {error}",
                hint="Make room on the disk, end the program that uses the file, or, if it is damaged, remove it "
                "and read again. Earlier checkpoints are not lost.",
                run_id=str((config or {}).get("configurable", {}).get("thread_id") or "") or None,
            ) from error


def _has_delta_channels(checkpoint: Checkpoint, metadata: CheckpointMetadata) -> bool:
    """Return whether a state has channels that are rebuilt from earlier writes."""
    return "counters_since_delta_snapshot" in metadata or any(
        isinstance(value, _DeltaSnapshot) for value in checkpoint["channel_values"].values()
    )
