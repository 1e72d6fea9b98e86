"""Opening a checkpointer: a LangGraph one that the user brings, or a SQLite file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from memagent_graph.errors import RunError


async def open_saver(checkpoints: BaseCheckpointSaver[Any] | Path | str | None) -> BaseCheckpointSaver[Any] | None:
    """The checkpointer for the running event loop.

    Raises:
        RunError: the file cannot be opened, or is no SQLite database.
    """
    if checkpoints is None or isinstance(checkpoints, BaseCheckpointSaver):
        return checkpoints
    import aiosqlite  # noqa: PLC0415  loading SQLite is left until someone wants checkpoints
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # noqa: PLC0415

    path = Path(checkpoints)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        saver = AsyncSqliteSaver(await aiosqlite.connect(path, timeout=30))
        await saver.setup()
    except (OSError, aiosqlite.Error) as error:
        raise RunError(
            f"{path} cannot be used for checkpoints: {error}", hint="Name another file with --checkpoints."
        ) from error
    return saver
