"""Opens checkpointers: a SQLite file with compressed states, a PostgreSQL server, or the user's own checkpointer."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from memagent_graph.errors import CheckpointError, RunHeldError, load_extra
from memagent_graph.storage.file_locks import lease
from memagent_graph.storage.private_files import create_private_folder

_LEASE_SUFFIX = "-reading"


async def open_checkpointer(
    checkpoints: BaseCheckpointSaver[Any] | Path | str | None,
) -> BaseCheckpointSaver[Any] | None:
    """Return the checkpointer for the running event loop.

    Args:
        checkpoints: the path of a SQLite file, a PostgreSQL URL (`postgresql://host/database`), or a checkpointer.

    Raises:
        CheckpointError: the file cannot be opened or is not a SQLite database, or the server cannot be used.
        MissingExtraError: the URL needs the extra "postgres", which is not installed.
    """
    if checkpoints is None or isinstance(checkpoints, BaseCheckpointSaver):
        return checkpoints
    if is_postgres_url(checkpoints):
        load_extra("memagent_graph.storage.postgres_saver", "postgres", "checkpoints on a PostgreSQL server")
        from memagent_graph.storage.postgres_saver import PostgresSaver  # noqa: PLC0415

        return await PostgresSaver.open(str(checkpoints), display_checkpoints(checkpoints))
    from memagent_graph.storage.sqlite_saver import SqliteSaver  # noqa: PLC0415  loaded only for checkpoints

    scheme, is_address, _ = str(checkpoints).partition("://")
    if is_address:  # as a path, it would be a folder with the password in its name
        raise CheckpointError(
            f"{scheme}:// is not the address of a server for checkpoints",
            hint="Use postgresql://USER@HOST/DATABASE or the path of a SQLite file with --checkpoints.",
        )
    try:
        return await asyncio.to_thread(SqliteSaver, Path(checkpoints))
    except (OSError, sqlite3.Error, TypeError) as error:
        raise CheckpointError(
            f"{checkpoints} cannot be used for checkpoints: {error}",
            hint="Choose another file with --checkpoints, or pass an open checkpointer.",
        ) from error


async def lease_run(saver: Any, run_id: str) -> AbstractContextManager[None]:
    """Return the lease of a run in this checkpointer. Only one reader at a time may hold it.

    The lease is a file next to the SQLite file. Other checkpointers, such as PostgreSQL's, have none; with them, the
    caller must ensure that only one reader reads a run.
    """
    path = getattr(saver, "path", None)
    if not isinstance(path, Path) or str(path) == ":memory:":
        return nullcontext()
    folder = path.with_name(path.name + _LEASE_SUFFIX)
    if not folder.is_dir():
        with suppress(OSError):  # which the lease reports
            await asyncio.to_thread(create_private_folder, folder)
    return lease(folder, run_id)


def is_being_read(checkpoints: Path, run_id: str) -> bool:
    """Return whether a reader on this machine holds the lease of a run in this SQLite file."""
    folder = checkpoints.with_name(checkpoints.name + _LEASE_SUFFIX)
    try:
        with lease(folder, run_id) if folder.is_dir() else nullcontext():
            return False
    except RunHeldError:
        return True
    except CheckpointError:
        return False


def is_postgres_url(checkpoints: Path | str) -> bool:
    """Return whether `checkpoints` is a PostgreSQL URL and not a file."""
    return isinstance(checkpoints, str) and checkpoints.startswith(("postgresql://", "postgres://"))


def display_checkpoints(checkpoints: Path | str) -> str:
    """Return the path or URL of checkpoints for messages and commands, without a password."""
    if is_postgres_url(checkpoints):
        return re.sub(r"(?<=://)([^:/@]*):.*@", r"\1@", str(checkpoints), flags=re.DOTALL).partition("?")[0]
    return str(checkpoints)
