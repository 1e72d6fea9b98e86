"""Files that were damaged at random are read or refused with our own error, never with one of a library's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.document_files import docx, pdf

from memagent_graph import Document, DocumentStore
from memagent_graph.errors import DocumentError

WHOLE = {
    "paper.pdf": pdf("The first page.", "The second one.", "And the last."),
    "letter.docx": docx("Dear reader,", "this is a letter."),
    "page.html": b"<!doctype html><html><head><title>T</title></head><body><h1>One</h1><p>Two <b>three</b></p></body>",
}


def mutated(data: bytes, generator: random.Random) -> bytes:
    """With bytes changed, a part removed, or a part twice."""
    damaged = bytearray(data)
    for _ in range(generator.choice((1, 3, 30))):
        start = generator.randrange(len(damaged))
        end = min(len(damaged), start + generator.choice((1, 8, 64)))
        kind = generator.randrange(3)
        if kind == 0:
            damaged[start:end] = generator.randbytes(end - start)
        elif kind == 1 and len(damaged) > 200:
            del damaged[start:end]
        else:
            damaged[start:start] = damaged[start:end]
    return bytes(damaged)


def test_damaged_files_are_read_or_refused_with_an_error_of_ours(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    store = DocumentStore(tmp_path / "documents")
    read = refused = 0
    for number in range(size(4, 100)):
        for name, data in WHOLE.items():
            damaged = mutated(data, random.Random(f"{name}/{number}"))
            try:
                ref = store.add(Document.from_bytes(damaged, name=name))
            except DocumentError as error:
                assert name in str(error)
                refused += 1
            else:
                assert store.read(ref, 0, ref["size"])
                read += 1
    record_property("read", read)
    record_property("refused", refused)
    assert read
    assert refused
