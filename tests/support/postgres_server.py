"""A private PostgreSQL server from the system's packages, with a password, that can be killed and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import pytest

PASSWORD = "secret/of@ours"


class PostgresNotInstalledError(Exception):
    """There is no PostgreSQL server on this machine (Debian: apt-get install postgresql)."""


class PostgresServer:
    """A server with an empty database `memagent` and a user of that name."""

    def __enter__(self) -> Self:
        self._program_folder = _find_program_folder()
        self._folder = Path(tempfile.mkdtemp(prefix="memagent-postgres-"))
        self._user_options: Mapping[str, Any] = _make_user_options()
        if self._user_options:
            os.chown(self._folder, self._user_options["user"], self._user_options["group"])
        password_file = self._folder / "password"
        password_file.write_text(PASSWORD)
        password_file.chmod(0o644)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        options = ("-U", "memagent", "-A", "scram-sha-256", f"--pwfile={password_file}", "-E", "UTF8")
        self._run("initdb", "-D", self._data_folder, *options)
        self.start()
        self.execute("CREATE DATABASE memagent", database="postgres")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown
            self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data_folder(self) -> str:
        return str(self._folder / "data")

    @property
    def url(self) -> str:
        """The URL with the password."""
        return f"postgresql://memagent:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/memagent"

    @property
    def url_without_password(self) -> str:
        return f"postgresql://memagent@127.0.0.1:{self.port}/memagent"

    def start(self) -> None:
        options = ("-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-k", str(self._folder))
        self._process = subprocess.Popen(
            [self._program_folder / "postgres", "-D", self._data_folder, *options],
            stderr=(self._folder / "log").open("ab"), cwd=self._folder, **self._user_options,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute("SELECT 1", database="postgres")
            except Exception:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.1)
            else:
                return

    def restart(self) -> None:
        """Stop the server at once, with all connections, and start it again."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)
        self.start()

    def execute(self, statement: str, *, database: str = "memagent") -> list[tuple[Any, ...]]:
        """Execute a statement, and return its rows."""
        import psycopg

        url = self.url.rpartition("/")[0] + f"/{database}"
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload,unused-ignore]
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        process = subprocess.run(
            [self._program_folder / program, *arguments], capture_output=True, text=True, cwd=self._folder, check=False,
            **self._user_options,
        )  # fmt: skip
        if process.returncode:
            raise RuntimeError(process.stderr)


def _find_program_folder() -> Path:
    """Return the folder with initdb and postgres, which Debian keeps out of the PATH."""
    initdb = shutil.which("initdb")
    folders = [Path(initdb).parent] if initdb else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not folders:
        raise PostgresNotInstalledError(PostgresNotInstalledError.__doc__)
    return folders[0]


def _make_user_options() -> dict[str, Any]:
    """Return the options of Popen for another user if this one is root, as whom PostgreSQL refuses to run."""
    if os.geteuid():
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    return {}


def run_postgres() -> Iterator[PostgresServer]:
    """Run the server for a fixture; without PostgreSQL, skip the tests, or fail if the variable CI is set."""
    try:
        with PostgresServer() as server:
            yield server
    except PostgresNotInstalledError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
