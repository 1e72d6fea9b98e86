"""A Ray cluster of two nodes for all tests, and a PostgreSQL server for those that want one."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
    try:
        with PostgresServer() as server:
            yield server
    except PostgresNotInstalledError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
