"""Runs a command and ends its whole session when it ends, or when the process that started it has ended.

    python session_watchdog.py PARENT_PID COMMAND [ARGUMENT ...]

A server's worker processes outlive the server and a test run that is killed with SIGKILL, and then nothing stops them.
Start this script in its own session. The exit status is the command's, or 1 after the loss of PARENT_PID.
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
    """SIGKILL every process of a session but the caller; return once they are gone.

    Python's resource tracker gets a moment more: it outlives its clients to unlink their shared memory (up to 400 MB
    for each vLLM server), and then ends by itself.

    Raises:
        TimeoutError: a process survives.
    """
    begin = time.monotonic()
    while members := _list_session_members(session_id):
        waited = time.monotonic() - begin
        if waited > _TIMEOUT_SECONDS:
            raise TimeoutError(f"processes {sorted(members)} of session {session_id} survive SIGKILL")
        for pid, command in members.items():
            if "multiprocessing.resource_tracker" not in command or waited > _TRACKER_GRACE_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _list_session_members(session: int) -> dict[int, str]:
    """Return command lines of a session's live processes, by process id, without the caller's own."""
    members = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended since it was listed
                # The name, in parentheses, may have spaces: fields are counted after it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                state, process_session = fields[0], int(fields[3])
                if process_session == session and state != "Z":
                    members[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
    return members


def main(arguments: list[str]) -> int:
    """Supervise the command `arguments[1:]` on behalf of the process `arguments[0]`."""
    parent, command = int(arguments[0]), arguments[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    status = None
    while status is None and os.getppid() == parent:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout=_PARENT_POLL_SECONDS)
    reason = "the process that started it has ended" if status is None else f"it ended with exit status {status}"
    print(f"watchdog: ending the session of {Path(command[0]).name}: {reason}", file=sys.stderr, flush=True)
    kill_session(os.getsid(0))
    return 1 if status is None else status & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
