"""Runs a command, and kills its session when the command or the process PARENT_PID has ended.

    python session_watchdog.py PARENT_PID COMMAND [ARGUMENT ...]

Without it, a server's worker processes outlive the server, and a test run that is killed with SIGKILL. Start this
script in its own session. The exit status is the command's, or 1 if PARENT_PID ended first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.02
_PARENT_POLL_SECONDS = 0.5
_TRACKER_GRACE_SECONDS = 5.0
_TIMEOUT_SECONDS = 20.0


def kill_session(session_id: int) -> None:
    """SIGKILL every process of a session except the caller; return when they have ended.

    Python's resource tracker gets a few seconds more: it outlives its clients to unlink their shared memory (up to
    400 MB for each vLLM server), and then ends by itself.

    Raises:
        TimeoutError: a process survives.
    """
    started_at = time.monotonic()
    while members := _list_session_members(session_id):
        waited_seconds = time.monotonic() - started_at
        if waited_seconds > _TIMEOUT_SECONDS:
            raise TimeoutError(f"processes {sorted(members)} of session {session_id} survive SIGKILL")
        for pid, command in members.items():
            if "multiprocessing.resource_tracker" not in command or waited_seconds > _TRACKER_GRACE_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _list_session_members(session_id: int) -> dict[int, str]:
    """Return the command lines of a session's live processes by process id, without the caller."""
    members = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended since it was listed
                # The name, in parentheses, may have spaces, so the fields are counted after it.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                state, process_session = fields[0], int(fields[3])
                if process_session == session_id and state != "Z":
                    members[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
    return members


def main(arguments: list[str]) -> int:
    """Run the command `arguments[1:]` for the process `arguments[0]`, and return the exit status."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    status = None
    while status is None and os.getppid() == parent_pid:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout=_PARENT_POLL_SECONDS)
    reason = "the process that started it has ended" if status is None else f"it ended with exit status {status}"
    print(f"watchdog: ending the session of {Path(command[0]).name}: {reason}", file=sys.stderr, flush=True)
    kill_session(os.getsid(0))
    return 1 if status is None else status & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
