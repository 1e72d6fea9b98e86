"""A PostgreSQL server of its own, in a folder of its own, from the system's packages."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


class PostgresNotInstalledError(Exception):
    """There is no server on this machine."""


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parents[1].name))
    if found:
        return found[-1].parent
    on_path = shutil.which("postgres")
    if on_path and shutil.which("initdb"):
        return Path(on_path).parent
    raise PostgresNotInstalledError("there is no PostgreSQL server; Debian: apt-get install postgresql")


class PostgresServer:
    """It listens on 127.0.0.1 alone, and anyone may connect. PostgreSQL refuses to run as root."""

    def __init__(self, folder: Path) -> None:
        programs, data = _programs(), folder / "data"
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        options: dict[str, Any] = {"cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "reader", "--auth=trust", "-E", "UTF8", "--no-sync"],
            check=True,
            **options,
        )
        settings = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(folder), "-F"]
        self._process = subprocess.Popen([programs / "postgres", "-D", data, *settings], **options)
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end and self._process.poll() is None, "the server does not start"
                time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"postgresql://reader:a-secret@127.0.0.1:{self.port}/postgres"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
