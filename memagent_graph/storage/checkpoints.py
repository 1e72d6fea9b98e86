"""Opens a checkpointer: a SQLite file with compressed states, a PostgreSQL server, or a checkpointer of the user."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from memagent_graph.errors import CheckpointError, MissingExtraError, RunHeldError
from memagent_graph.storage.database import TIMEOUT_SECONDS, open_database
from memagent_graph.storage.file_locks import lease
from memagent_graph.storage.state_serializer import CompressedSerializer

if TYPE_CHECKING:
    import aiosqlite

_POSTGRES = ("postgresql://", "postgres://")
_SCHEMA = (
    "CREATE TABLE checkpoints ( thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '', checkpoint_id TEXT "
    "NOT NULL, parent_checkpoint_id TEXT, type TEXT, checkpoint BLOB, metadata BLOB, "
    "PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id) )",
    "CREATE TABLE writes ( thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '', checkpoint_id TEXT "
    "NOT NULL, task_id TEXT NOT NULL, task_path TEXT NOT NULL DEFAULT '', idx INTEGER NOT NULL, channel TEXT NOT NULL, "
    "type TEXT, value BLOB, PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) )",
)
"""The tables of LangGraph, so that files of its saver can be used."""


async def open_saver(checkpoints: BaseCheckpointSaver[Any] | Path | str | None) -> BaseCheckpointSaver[Any] | None:
    """Return the checkpointer for the running event loop.

    Args:
        checkpoints: the path of a SQLite file, a PostgreSQL URL (`postgresql://host/database`), or a checkpointer.

    Raises:
        CheckpointError: the file cannot be opened, or is not a SQLite database; or the server cannot be used.
        MissingExtraError: the extra "postgres" is needed for the URL.
    """
    if checkpoints is None or isinstance(checkpoints, BaseCheckpointSaver):
        return checkpoints
    if is_server(checkpoints):
        try:
            from memagent_graph.storage.postgres_saver import PostgresSaver  # noqa: PLC0415
        except ImportError:
            raise MissingExtraError("postgres", "checkpoints on a PostgreSQL server") from None
        return await PostgresSaver.open(str(checkpoints), display_checkpoints(checkpoints), CompressedSerializer())
    import aiosqlite  # noqa: PLC0415  SQLite is loaded only for checkpoints

    from memagent_graph.storage.sqlite_saver import SqliteSaver  # noqa: PLC0415

    path = Path(checkpoints)
    try:
        # LangGraph's saver does not check the tables, and fails if another process changes the journal mode meanwhile.
        (await asyncio.to_thread(open_database, path, _SCHEMA)).close()
        connection = aiosqlite.connect(path, timeout=TIMEOUT_SECONDS)
        # A process must not wait at its end for a file that was not closed. The states are on disk.
        connection._thread.daemon = True
        saver = SqliteSaver(await connection, path, CompressedSerializer())
        weakref.finalize(saver, _stop, connection).atexit = False
        await saver.conn.execute("PRAGMA trusted_schema = OFF")
        await saver.setup()
    except (OSError, aiosqlite.Error) as error:
        raise CheckpointError(
            f"{path} cannot be used for checkpoints: {error}", hint="Choose another file with --checkpoints."
        ) from error
    return saver


def hold_run(saver: Any, run_id: str) -> AbstractContextManager[None]:
    """Return the lease of a run in this checkpointer. Only one reader at a time may hold it.

    The lease is a file next to the SQLite file. Other checkpointers, such as PostgreSQL's, have no lease. The caller
    must prevent that two readers read the same run.
    """
    path = getattr(saver, "path", None)
    if not isinstance(path, Path) or str(path) == ":memory:":
        return nullcontext()
    return lease(path.with_name(path.name + "-reading"), run_id)


def is_being_read(checkpoints: Path, run_id: str) -> bool:
    """Return whether a reader on this machine holds the lease of a run in this SQLite file."""
    folder = checkpoints.with_name(checkpoints.name + "-reading")
    try:
        with lease(folder, run_id) if folder.is_dir() else nullcontext():
            return False
    except RunHeldError:
        return True
    except CheckpointError:
        return False


def _stop(connection: aiosqlite.Connection) -> None:
    """End the thread of a connection that was not closed.

    aiosqlite does so, too, but it reports to the event loop. If the loop is closed, the thread ends with a traceback.
    In a thread without an event loop it reports nothing.
    """
    if connection._thread.is_alive():
        threading.Thread(target=connection.stop, daemon=True).start()


def is_server(checkpoints: Path | str) -> bool:
    """Return whether this is a PostgreSQL URL, not a file."""
    return isinstance(checkpoints, str) and checkpoints.startswith(_POSTGRES)


def display_checkpoints(checkpoints: Path | str) -> str:
    """Return the path or URL of checkpoints for messages and commands, without a password."""
    if is_server(checkpoints):
        return re.sub(r"(?<=://)([^:/@]*):.*@", r"\1@", str(checkpoints), flags=re.DOTALL).partition("?")[0]
    return str(checkpoints)
