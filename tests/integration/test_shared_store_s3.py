"""Document texts in an object store, with a real client against a local server that speaks S3.

Needs the packages s3fs and moto[server]; without them it is skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import document_with

from memagent_graph.documents import Document, SharedDocumentStore
from memagent_graph.errors import DocumentError

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

TEXT = document_with({0.5: "The key of harbor is 4711."}, words=60_000)


@pytest.fixture
def endpoint() -> Iterator[dict[str, str]]:
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    s3fs.S3FileSystem(**options).mkdir("texts-of-many")
    yield options
    server.stop()


def test_texts_are_shared_through_a_bucket(endpoint, tmp_path: Path) -> None:
    def machine(name: str) -> SharedDocumentStore:
        return SharedDocumentStore("s3://texts-of-many/store", tmp_path / name, options=endpoint)

    ref = machine("a").add(Document.from_text(TEXT))
    there = machine("b")
    assert there.read(ref, 0, len(TEXT)) == TEXT
    stream = there.add(iter([TEXT[:1000], TEXT[1000:]]))
    there.pull(stream, len(TEXT) + 1)
    assert machine("c").resolve(stream)["key"] == ref["key"]

    filesystem = s3fs.S3FileSystem(**endpoint)
    path = f"texts-of-many/store/texts/{hashlib.sha256(TEXT.encode()).hexdigest()}.txt"
    filesystem.pipe_file(path, b"x" * len(TEXT))
    with pytest.raises(DocumentError, match="is damaged"):
        machine("d").read(ref, 0, 10)
    machine("b").remove(ref)
    assert not filesystem.exists(path)
    with pytest.raises(DocumentError, match="not in the document store s3://texts-of-many/store"):
        machine("d").read(ref, 0, 10)
    with pytest.raises(DocumentError, match="cannot be written"):
        SharedDocumentStore("s3://no-such-bucket/store", tmp_path / "e", options=endpoint).add(TEXT)
