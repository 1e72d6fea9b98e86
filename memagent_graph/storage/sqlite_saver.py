"""LangGraph's SQLite checkpointer with errors that say which file, which run, and what to do."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from memagent_graph.errors import CheckpointError


class SqliteSaver(AsyncSqliteSaver):
    """Checkpoints in one file.

    Every method raises `CheckpointError` if the file is damaged, stays locked, or cannot be written.
    """

    def __init__(self, connection: aiosqlite.Connection, path: Path, serde: SerializerProtocol) -> None:
        super().__init__(connection, serde=serde)
        self.path = path

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The newest state of a run, or the one in the config."""
        with self._told(config):
            return await super().aget_tuple(config)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """States, newest first."""
        with self._told(config):
            async for each in super().alist(config, **options):
                yield each

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a state."""
        with self._told(config):
            return await super().aput(config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a step wrote before the other steps of its superstep are done."""
        with self._told(config):
            await super().aput_writes(config, writes, task_id, task_path)

    @contextmanager
    def _told(self, config: RunnableConfig | None) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, zlib.error) as error:
            raise CheckpointError(
                f"the checkpoints in {self.path} cannot be used: {error}",
                hint="Make room on the disk, end the program that uses the file, or, if it is damaged, remove it "
                "and read again. Earlier checkpoints are not lost.",
                run_id=str((config or {}).get("configurable", {}).get("thread_id") or "") or None,
            ) from error
