"""Locks on open files. The operating system holds them until the file is closed or the process ends.

A lease is the lock of a run, which only one reader at a time may hold. On a network file system without locks, readers
on other machines do not see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from memagent_graph.errors import CheckpointError, RunHeldError
from memagent_graph.storage.private_files import create_private_folder

log = logging.getLogger(__name__)

try:
    import fcntl

    def try_to_lock(file: IO[bytes]) -> bool:
        """Lock a file without waiting. Return False if another owner holds the lock.

        On a file system without locks, it logs a warning and returns True.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("this file system has no locks (%s): nothing keeps two processes apart", error)
        return True

except ImportError:  # Windows
    import msvcrt

    _LOCK_POSITION = 1 << 30
    """The position of the locked byte: behind the contents, because other processes cannot read locked bytes."""

    def try_to_lock(file: IO[bytes]) -> bool:
        """Lock a file without waiting. Return False if another owner holds the lock."""
        try:
            file.seek(_LOCK_POSITION)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        finally:
            file.seek(0)
        return True


@contextlib.contextmanager
def lease(folder: Path, run_id: str) -> Iterator[None]:
    """Hold the lease of a run, so that no other reader in any process reads it at the same time.

    Args:
        folder: the folder of the locks, the same for all readers of the run.
        run_id: the run.

    Raises:
        RunHeldError: another reader holds the lease. The message names its process.
        CheckpointError: the folder cannot be written to.
    """
    path = folder / hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(_open_lock_file(path, run_id))
            if not try_to_lock(file):
                raise _make_held_error(file, run_id)
            if _is_linked(path, file):
                break
            file.close()  # the previous owner removed the file after we opened it
        with contextlib.suppress(OSError):  # without the process id, on a full disk, the lease is still held
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # if the system cannot remove open files, the lock file stays
                os.remove(path)  # noqa: PTH107  `langgraph dev` refuses os.unlink in its event loop


def _open_lock_file(path: Path, run_id: str) -> IO[bytes]:
    try:
        create_private_folder(path.parent)
        return os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b", buffering=0)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} cannot be written, where it is noted which runs are being read: {error}",
            hint="Make it writable or free disk space there, or keep checkpoints elsewhere, with --checkpoints.",
            run_id=run_id,
        ) from error


def _make_held_error(file: IO[bytes], run_id: str) -> RunHeldError:
    try:
        pid = file.read(32).decode("ascii", "replace").strip()
    except OSError:
        pid = ""
    is_own = pid == str(os.getpid())
    holder = "this process" if is_own else f"process {pid}" if pid else "another process"
    stream_hint = " (a stream that is left early: `async with aclosing(agent.astream(...))`)" if is_own else ""
    return RunHeldError(
        f"the run is being read by {holder} already",
        hint=f"Wait for it, or end it{stream_hint}; then resume again, and nothing that it has read is read twice.",
        run_id=run_id,
    )


def _is_linked(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
