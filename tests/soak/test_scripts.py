"""Random documents in many scripts are cut without loss, and no character that a reader sees is split.

Where characters end is what the package regex says of the whole text; the chunker asks ICU, about a few characters
around a place.
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
"""A sign that joins two consonants, after no consonant: whether it joins what follows depends on Unicode's version."""
MIXED = ("harbour ", "naïve ", "日本語", "Ω\n\n", "🙂 ", "don't ", "3.14\t", ". ", "שלום ", "e\u0301")
TEXTS = {**SENTENCES, "mixed": MIXED}
BOUNDARIES: tuple[Boundary, ...] = ("token", "sentence", "paragraph", "heading")
JOINTS = ("", " ", "\n", "\n\n", "\r\n", *["👩\u200d👩\u200d👧", "🇦🇧🇨🇩", "ẹ́", "\u200d", "\xad", "한각", "क्ष्म्य"])


def random_text(chance: random.Random, script: str) -> str:
    """Sentences of a script and, in between, its characters in any order and some that join to others."""
    sentences = TEXTS[script]
    characters = sorted(set("".join(sentences)))
    parts = []
    for _ in range(int(200 ** chance.random())):
        parts += chance.choice(sentences), chance.choice(JOINTS)
        if chance.random() < 0.3:
            parts.append("".join(chance.choices(characters, k=chance.randrange(30))))
    return "".join(parts)


def test_no_chunk_of_random_documents_in_many_scripts_splits_a_character(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    tokenizer, store = load_tokenizer("embedded"), DocumentStore(tmp_path)
    chunks = splits = 0
    for number, script in zip(range(size(60, 10_000)), itertools.cycle(TEXTS), strict=False):
        chance = random.Random(number)
        text, tokens = random_text(chance, script), chance.choice([3, 20, 64, 100, 300])
        ref = store.add(Document.from_text(text))
        ends = {match.end() for match in regex.finditer(r"\X", text)}
        disputed = {match.end() for match in _LONE_VIRAMA.finditer(text)}
        ends.update(match.end() for match in re.finditer("\r(?=\n)", text))  # two characters for readers of files
        chunker = Chunker(store, ref, tokenizer, tokens, BOUNDARIES[number // 20 % 4])
        cut = list(chunker.chunks())
        assert len(cut) == 1 or list(chunker.chunks(cut[0].next)) == cut[1:], number
        assert "".join(chunk.text for chunk in cut) == text, number
        for chunk in cut:
            assert text[chunk.start_char : chunk.end_char] == chunk.text, number
            assert text.encode()[chunk.start_byte : chunk.end_byte].decode() == chunk.text, number
            assert chunk.tokens <= tokens + 3, number
            assert chunk.splits == (chunk.end_char not in ends) or chunk.end_char in disputed, number
            assert not chunk.splits or tokens < 64, number
        chunks, splits = chunks + len(cut), splits + sum(chunk.splits for chunk in cut)
        store.remove(ref)
    record_property("chunks", chunks)
    record_property("chunks_that_split_a_long_character", splits)
