"""Random documents in many scripts are cut without loss, and no visible character is split.

The expected ends of characters come from the package regex and the whole text; the chunker asks ICU, with only a few
characters around a position.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex
from support.languages import SENTENCES

from memagent_graph import Document, DocumentStore, load_tokenizer
from memagent_graph.documents.chunking import Boundary, Chunker

_LONE_VIRAMA = regex.compile(
    r"(?<!\p{InSC=Consonant}\p{InSC=Nukta}?)[\p{InSC=Virama}\p{InSC=Invisible_Stacker}][\p{M}\u200d]*"
)
"""A joining sign after no consonant: whether it joins the next one depends on the version of Unicode."""
MIXED = ("harbour ", "naïve ", "日本語", "Ω\n\n", "🙂 ", "don't ", "3.14\t", ". ", "שלום ", "e\u0301")
TEXTS = {**SENTENCES, "mixed": MIXED}
BOUNDARIES: tuple[Boundary, ...] = ("token", "sentence", "paragraph", "heading")
SEPARATORS = ("", " ", "\n", "\n\n", "\r\n", *["👩\u200d👩\u200d👧", "🇦🇧🇨🇩", "ẹ́", "\u200d", "\xad", "한각", "क्ष्म्य"])


def make_random_text(rng: random.Random, script: str) -> str:
    """Return sentences of a script, with its characters in random order and joining characters in between."""
    sentences = TEXTS[script]
    characters = sorted(set("".join(sentences)))
    parts = []
    for _ in range(int(200 ** rng.random())):
        parts += rng.choice(sentences), rng.choice(SEPARATORS)
        if rng.random() < 0.3:
            parts.append("".join(rng.choices(characters, k=rng.randrange(30))))
    return "".join(parts)


def test_chunks_of_random_documents_split_no_character_in_any_script(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    tokenizer, store = load_tokenizer("embedded"), DocumentStore(tmp_path)
    chunk_count = split_count = 0
    for number, script in zip(range(size(60, 10_000)), itertools.cycle(TEXTS), strict=False):
        rng = random.Random(number)
        text, tokens = make_random_text(rng, script), rng.choice([3, 20, 64, 100, 300])
        ref = store.add(Document.from_text(text))
        ends = {match.end() for match in regex.finditer(r"\X", text)}
        disputed_ends = {match.end() for match in _LONE_VIRAMA.finditer(text)}
        ends.update(match.end() for match in re.finditer("\r(?=\n)", text))  # a file is read as two characters
        chunker = Chunker(store, ref, tokenizer, tokens, BOUNDARIES[number // 20 % 4])
        chunks = list(chunker.chunks())
        assert len(chunks) == 1 or list(chunker.chunks(chunks[0].next)) == chunks[1:], number
        assert "".join(chunk.text for chunk in chunks) == text, number
        for chunk in chunks:
            assert text[chunk.start_char : chunk.end_char] == chunk.text, number
            assert text.encode()[chunk.start_byte : chunk.end_byte].decode() == chunk.text, number
            assert chunk.tokens <= tokens + 3, number
            assert chunk.splits == (chunk.end_char not in ends) or chunk.end_char in disputed_ends, number
            assert not chunk.splits or tokens < 64, number
        chunk_count, split_count = chunk_count + len(chunks), split_count + sum(chunk.splits for chunk in chunks)
        store.remove(ref)
    record_property("chunks", chunk_count)
    record_property("chunks_that_split_a_long_character", split_count)
