"""Servers that machines share: PostgreSQL, and a local object store with the S3 API.

They run in a separate environment (`make test-services`), because the S3 client needs older packages. Tests of a
missing server are skipped; if CI is set, they fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.postgres_server import PostgresServer, run_postgres


@pytest.fixture(scope="session")
def running_postgres() -> Iterator[PostgresServer]:
    yield from run_postgres()


@pytest.fixture
def postgres(running_postgres: PostgresServer) -> PostgresServer:
    """The server, with an empty database."""
    running_postgres.execute("DROP DATABASE IF EXISTS memagent WITH (FORCE)", database="postgres")
    running_postgres.execute("CREATE DATABASE memagent", database="postgres")
    return running_postgres


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an object store with an empty `bucket`; processes started by the test use the same store."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()  # earlier clients have the address of another server
    filesystem = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    filesystem.mkdir("bucket")
    yield filesystem
    server.stop()
