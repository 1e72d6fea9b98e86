"""Chunks lose no text, have exact spans and token counts, and are the same from any cursor."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_tokenizers import TOKENIZER_KINDS, LengthRecorder, encode
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from memagent_graph.documents import Document, DocumentStore
from memagent_graph.documents.chunking import Chunker
from memagent_graph.tokenizers.loading import HFTokenizer, load_tokenizer
from memagent_graph.tokenizers.pieces import MAX_PIECE_BYTES, PIECE_BYTES, cut_pieces, find_safe_cut
from memagent_graph.words import is_character_end

TOKENIZER = load_tokenizer("embedded")
SENTENCE_TEXT = "the reader writes naïve Ärger and 日本語 with 😀 or 12345 to x's end. A new sentence, isn't it?\n\n"
WORDS = SENTENCE_TEXT.split(" ")


def make_prose(length: int, seed: int = 0) -> str:
    words = random.Random(seed).choices(WORDS, k=length // 4)
    return " ".join(words)[:length]


BOUNDARIES = st.sampled_from(["token", "sentence", "paragraph", "heading"])
FRAGMENTS = [
    "word and word ", "日本語漢字", "😀👩‍👩‍👧", "\n\n", "e\u0301 ", "    ", "\0", "नमस्ते ", "a" * 40, "\n\n# 1\n\n",
]  # fmt: skip
MIXED_TEXTS = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.sampled_from(FRAGMENTS)),
    min_size=1,
    max_size=60,
).map("".join)


PROSE_TEXTS = st.integers(0, 10**6).map(lambda seed: make_prose(300, seed))


def make_chunker(store, text, chunk_tokens, boundary="token", tokenizer=TOKENIZER):
    return Chunker(store, store.add(Document.from_text(text)), tokenizer, chunk_tokens, boundary)


def cut_chunks(store, text, chunk_tokens, boundary="token", tokenizer=TOKENIZER):
    """Cut a text into chunks; check that no text is lost, spans are exact, and chunks from any cursor are the same."""
    reader = make_chunker(store, text, chunk_tokens, boundary, tokenizer)
    chunks, encoded_text = list(reader.chunks()), text.encode()
    assert "".join(chunk.text for chunk in chunks) == text
    char = byte = 0
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.start_char, chunk.start_byte) == (index, char, byte)
        assert text[chunk.start_char : chunk.end_char] == chunk.text
        assert encoded_text[chunk.start_byte : chunk.end_byte].decode() == chunk.text
        assert chunk.tokens <= chunk_tokens + 3
        assert chunk.last == (index == len(chunks) - 1)
        char, byte = chunk.end_char, chunk.end_byte
    for chunk, next_chunk in [*itertools.pairwise(chunks)][:: 1 + len(chunks) // 40]:
        assert next(make_chunker(store, text, chunk_tokens, boundary, tokenizer).chunks(chunk.next)) == next_chunk
    assert reader.next_chunk(chunks[-1].next) is None
    return chunks


WORD_PIECE = HFTokenizer(json.loads(TOKENIZER_KINDS["wordpiece"]().to_str()), name="word piece")


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORD_PIECE], ids=["embedded", "one that drops characters"])
@settings(max_examples=60)
@given(text=MIXED_TEXTS.filter(str.strip), chunk_tokens=st.integers(1, 60), boundary=BOUNDARIES)
def test_any_text_is_cut_without_loss_and_equally_from_every_cursor(
    tokenizer, text, chunk_tokens, boundary, tmp_path_factory
):
    store = DocumentStore(tmp_path_factory.mktemp("store"))
    chunks = cut_chunks(store, text, chunk_tokens, boundary, tokenizer)
    assert sum(chunk.tokens for chunk in chunks) == tokenizer.count(text)


@pytest.mark.parametrize("chunk_tokens", [7, 1000, 5000, 40_000])
def test_chunks_of_many_pieces_have_the_tokens_of_the_full_text(chunk_tokens, store):
    text = make_prose(200_000)
    assert len(text.encode()) > 10 * PIECE_BYTES
    chunks = cut_chunks(store, text, chunk_tokens)
    ids = TOKENIZER._backend.encode(text, add_special_tokens=False).ids
    token_offset = 0
    for chunk in chunks:
        assert TOKENIZER._backend.decode(ids[token_offset : token_offset + chunk.tokens]) == chunk.text
        assert chunk_tokens - 3 <= chunk.tokens <= chunk_tokens or chunk.last
        token_offset += chunk.tokens
    assert token_offset == len(ids)
    middle_index = len(chunks) // 2
    assert list(make_chunker(store, text, chunk_tokens).chunks(chunks[middle_index].next)) == chunks[middle_index + 1 :]


def test_reading_continues_from_a_cursor_with_another_chunk_size(store):
    text = make_prose(90_000)
    first_chunk = next(make_chunker(store, text, 5000).chunks())
    rest_text = "".join(chunk.text for chunk in make_chunker(store, text, 1234).chunks(first_chunk.next))
    assert first_chunk.text + rest_text == text


@pytest.mark.parametrize("text", ["a  b", " a", "a. b", "a 1", "\n", "a\n", "a\n\n", "a\n 1", "日本語"])
def test_no_cut_is_safe_without_a_letter_on_either_side(text):
    assert find_safe_cut(text, 0) is None


@settings(max_examples=60)
@given(text=st.text("ab. \n\r\t1'é", max_size=40) | st.tuples(MIXED_TEXTS, PROSE_TEXTS, MIXED_TEXTS).map("".join))
def test_a_safe_cut_changes_no_token(text):
    for start in range(0, len(text), 1 + len(text) // 40):
        cut = find_safe_cut(text[: start + 60], start)
        if cut is not None:
            assert start <= cut
            assert encode(TOKENIZER, text[:cut]) + encode(TOKENIZER, text[cut:]) == encode(TOKENIZER, text)


@pytest.mark.parametrize("unit", ["a", "\n", "語", "e\u0301", "ab "])
def test_long_text_without_word_boundaries_is_cut_without_loss(unit, store):
    text = (unit * 300_000)[: 300_000 // len(unit.encode())] + "."
    assert all(4997 <= chunk.tokens <= 5000 for chunk in cut_chunks(store, text, 5000)[:-1])
    assert "".join(cut_pieces(text)) == text
    assert max(len(piece) for piece in cut_pieces(text)) <= MAX_PIECE_BYTES


def test_chunks_end_with_a_sentence_only_if_its_end_is_near(store):
    chunks = cut_chunks(store, "This is one short sentence of prose. " * 3000, 500, "sentence")
    assert all(chunk.text.endswith("prose.") for chunk in chunks[:-1])
    assert all(chunk.tokens > 500 * 0.85 - 1 for chunk in chunks[:-1])
    endless = "words without any end " * 3000
    assert all(chunk.tokens == 500 for chunk in cut_chunks(store, endless, 500, "sentence")[:-1])


def test_paragraph_ends_are_preferred_to_sentence_ends(store):
    text = "A line. And more of it.\n\nNext paragraph starts. It goes on. And on. And on.\n\n" * 800
    chunks = cut_chunks(store, text, 400, "paragraph")
    assert all(chunk.text.endswith("\n\n") for chunk in chunks[:-1])


def test_headings_are_preferred_when_near_and_otherwise_paragraph_ends(store):
    paragraph = "The quick brown fox jumps over the lazy dog and is not seen. "
    text = "\n\n".join(f"## 4.{number} Part\n\n{paragraph * (5 + number % 3)}" for number in range(1, 41))
    chunks = cut_chunks(store, text, 250, "heading")
    assert all(chunk.text.startswith("## 4.") for chunk in chunks[1:])
    paragraph_chunks = cut_chunks(store, text, 250, "paragraph")
    assert sum(chunk.text.startswith("## 4.") for chunk in paragraph_chunks) < len(chunks) - 1
    text = "\n\n".join([paragraph] * 100)
    assert cut_chunks(store, text, 100, "heading") == cut_chunks(store, text, 100, "paragraph")


@pytest.mark.parametrize(("document_count", "reader_count"), [(1, 5), (12, 1)])
def test_a_piece_is_tokenised_once_for_all_concurrent_reads(document_count, reader_count, store, monkeypatch):
    tokenizer = HFTokenizer(TOKENIZER._specification, name="counting")
    encoding = LengthRecorder(tokenizer._fast._encoding)
    monkeypatch.setattr(tokenizer._fast, "_encoding", encoding)
    monkeypatch.setattr(HFTokenizer, "fingerprint", f"counting {document_count}")
    texts = [make_prose(40_000, seed=seed) for seed in range(document_count)]
    iterators = [make_chunker(store, text, 700, tokenizer=tokenizer).chunks() for text in texts * reader_count]
    assert sum(len(chunks) for chunks in zip(*iterators, strict=False)) > 10 * document_count * reader_count
    assert sum(encoding.lengths) == sum(map(len, texts))


def test_chunks_of_no_tokens_are_refused(store):
    with pytest.raises(ValueError, match="at least 1"):
        make_chunker(store, "text", 0)


def make_byte_tokenizer(*extra_tokens: bytes) -> HFTokenizer:
    """Return a byte-level tokenizer with some tokens of several bytes, merged in order."""
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    symbols = {byte: chr(byte) for byte in printable_bytes}
    symbols |= {byte: chr(256 + number) for number, byte in enumerate(other_bytes)}
    vocabulary, merges = {name: byte for byte, name in symbols.items()}, []
    for token in extra_tokens:
        for end in range(2, len(token) + 1):
            pair = "".join(symbols[byte] for byte in token[: end - 1]), symbols[token[end - 1]]
            if pair not in merges:
                merges.append(pair)
                vocabulary["".join(pair)] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return HFTokenizer(json.loads(backend.to_str()), name="bytes")


MERGED_BYTES = make_byte_tokenizer(b"\x92\xe1\x9e")


def make_unigram_tokenizer() -> HFTokenizer:
    """Return a Unigram tokenizer that splits unknown characters into bytes."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁", -2.0), ("a", -2.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    return HFTokenizer(json.loads(backend.to_str()), name="unigram")


@pytest.mark.parametrize("tokenizer", [MERGED_BYTES, make_unigram_tokenizer()], ids=["token", "unigram"])
@pytest.mark.parametrize(("chunk_tokens", "length"), [(1, 300), (7, 600), (300, 3000)])
def test_chunks_keep_their_size_where_tokens_end_inside_characters(tokenizer, chunk_tokens, length, store):
    text = "a" + "\u1792" * length + "a"
    chunks = cut_chunks(store, text, chunk_tokens, tokenizer=tokenizer)
    assert not any(chunk.splits for chunk in chunks), "every code point is a character"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MERGED_BYTES], ids=["embedded", "token"])
def test_a_character_is_split_only_if_it_is_longer_than_64_tokens_or_a_chunk(tokenizer, store):
    short_character, long_character = "e" + "\u0301" * 20, "o" + "\u0301" * 200
    text = (short_character + "x") * 50 + long_character + (short_character + " ") * 20
    chunks = cut_chunks(store, text, 70, tokenizer=tokenizer)
    assert all(chunk.tokens <= 70 for chunk in chunks)
    long_start = text.index(long_character)
    split_ends = [chunk.end_char for chunk in chunks if not is_character_end(text, chunk.end_char)]
    assert split_ends and all(long_start < end < long_start + len(long_character) for end in split_ends)
    assert split_ends == [chunk.end_char for chunk in chunks if chunk.splits]


def test_text_without_any_token_is_still_read(store):
    assert cut_chunks(store, "the reader " + "\u200b" * 50_000, 5, tokenizer=WORD_PIECE)


def test_a_tail_percent_of_50_keeps_sentences_whole_in_short_chunks(store):
    sentences = [f"{'The grey heron waits ' * (1 + number % 4)}by pond number {number}." for number in range(60)]
    reference = store.add(Document.from_text(" ".join(sentences)))
    for tail_percent in (50, None):
        reader = Chunker(store, reference, TOKENIZER, 80, "sentence", tail_percent=tail_percent)
        chunks = [chunk.text for chunk in reader.chunks()]
        assert "".join(chunks) == " ".join(sentences)
        assert all(any(sentence in chunk for chunk in chunks) for sentence in sentences) == (tail_percent == 50)
