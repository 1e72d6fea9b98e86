"""A Ray cluster of two nodes for all tests, and a PostgreSQL server for those that want one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres_server import PostgresNotInstalledError, PostgresServer
from support.ray_world import RayWorld


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayWorld]:
    world = RayWorld()
    yield world
    world.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Its folder is not pytest's, which another user cannot enter."""
    folder = Path(tempfile.mkdtemp(prefix="memagent-postgres-"))
    folder.chmod(0o755)
    try:
        server = PostgresServer(folder / "server")
    except PostgresNotInstalledError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)
