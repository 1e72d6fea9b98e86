"""Documents of all lengths and alphabets are cut without loss, and each chunk has the tokens that it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memagent_graph import Document, DocumentStore, load_tokenizer
from memagent_graph.documents.chunking import Boundary, Chunker

BOUNDARIES: tuple[Boundary, ...] = ("token", "sentence", "paragraph")
WORDS = ("harbour", "naïve", "日本語", "Ω", "🙂", "don't", "a", "3.14", "\n\n", ". ", "\t", "שלום", "e\u0301", "  ")


def test_every_chunk_of_many_documents_is_lossless_and_counted_right(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    tokenizer = load_tokenizer("embedded")
    store = DocumentStore(tmp_path / "documents")
    chunks = characters = 0
    for number in range(size(60, 10_000)):
        generator = random.Random(number)
        text = "x" + " ".join(generator.choices(WORDS, k=int(3000 ** generator.random())))
        ref = store.add(Document.from_text(text))
        wanted = generator.randint(4, 120)
        found = list(Chunker(store, ref, tokenizer, wanted, BOUNDARIES[number % 3]).chunks())
        assert "".join(item.text for item in found) == text, number
        for item in found[:-1]:
            assert item.tokens <= wanted or len(item.text) == 1, number
        chunks, characters = chunks + len(found), characters + len(text)
        store.remove(ref)
    record_property("chunks", chunks)
    record_property("characters", characters)
