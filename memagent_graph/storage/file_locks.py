"""A lock on an open file. The operating system holds it until the file is closed, however its process ends."""

from __future__ import annotations

import logging
from typing import IO

log = logging.getLogger(__name__)

try:
    import fcntl

    def locked(file: IO[bytes]) -> bool:
        """Lock a file, unless another owner has it; returns whether this one has it now. Does not wait.

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

    _FAR_BYTE = 1 << 30
    """What is locked there cannot be read by others, and they must be able to read what is in the file."""

    def locked(file: IO[bytes]) -> bool:
        """Lock a file, unless another owner has it; returns whether this one has it now. Does not wait."""
        try:
            file.seek(_FAR_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        finally:
            file.seek(0)
        return True
