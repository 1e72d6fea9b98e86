"""A Ray cluster of two nodes for all tests, and a PostgreSQL server for tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.postgres_server import PostgresServer, run_postgres
from support.ray_world import RayWorld


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayWorld]:
    world = RayWorld()
    yield world
    world.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    yield from run_postgres()
