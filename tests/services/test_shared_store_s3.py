"""Document texts in an object store, with a real client against a local server that speaks S3."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.scripts import document_with

from memagent_graph.documents import Document, SharedDocumentStore
from memagent_graph.errors import DocumentError

TEXT = document_with({0.5: "The key of harbor is 4711."}, words=60_000)


def test_texts_are_shared_through_a_bucket(bucket, tmp_path: Path) -> None:
    def machine(name: str) -> SharedDocumentStore:
        return SharedDocumentStore("s3://bucket/store", tmp_path / name)

    ref = machine("a").add(Document.from_text(TEXT))
    there = machine("b")
    assert there.read(ref, 0, len(TEXT)) == TEXT

    path = f"bucket/store/texts/{hashlib.sha256(TEXT.encode()).hexdigest()}.txt"
    bucket.pipe_file(path, b"x" * len(TEXT))
    with pytest.raises(DocumentError, match="is damaged"):
        machine("d").read(ref, 0, 10)
    machine("b").remove(ref)
    assert not bucket.exists(path)
    with pytest.raises(DocumentError, match="not in the document store s3://bucket/store"):
        machine("d").read(ref, 0, 10)
    with pytest.raises(DocumentError, match="cannot be written"):
        SharedDocumentStore("s3://no-such-bucket/store", tmp_path / "e").add(TEXT)
