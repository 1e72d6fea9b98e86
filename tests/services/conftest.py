"""Servers that other machines share: PostgreSQL, and a local one that speaks S3.

They run in an environment of their own (`make test-services`), as the client of S3 needs older packages than we do.
Where a server is missing, its tests are skipped, or fail where CI is set.
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
    """A client of a store with an empty `bucket`; processes that are started now use the store, too."""
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
    s3fs.S3FileSystem.clear_instance_cache()  # earlier clients in this process have another server's address
    filesystem = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    filesystem.mkdir("bucket")
    yield filesystem
    server.stop()
