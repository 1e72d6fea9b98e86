"""Chunks: exact, lossless, with true spans, the same from any cursor, and first out before a stream has ended."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_tokenizers import TOKENIZER_KINDS, LengthRecorder
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from memagent_graph.documents import Document, DocumentStore
from memagent_graph.documents.chunking import Chunker
from memagent_graph.tokenizers.loading import HFTokenizer, load_tokenizer
from memagent_graph.tokenizers.pieces import MAX_PIECE_BYTES, PIECE_BYTES, cut_pieces, find_safe_cut
from memagent_graph.words import is_character_end

TOKENIZER = load_tokenizer("embedded")
SENTENCES = "the reader writes naïve Ärger and 日本語 with 😀 or 12345 to x's end. A new sentence, isn't it?\n\n"
WORDS = SENTENCES.split(" ")


def prose(characters: int, seed: int = 0) -> str:
    source = random.Random(seed)
    words = source.choices(WORDS, k=characters // 4)
    return " ".join(words)[:characters]


BOUNDARIES = st.sampled_from(["token", "sentence", "paragraph", "heading"])
MIXED = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.sampled_from(
            [
                "word and word ",
                "日本語漢字",
                "😀👩‍👩‍👧",
                "\n\n",
                "e\u0301 ",
                "    ",
                "\x00",
                "नमस्ते ",
                "a" * 40,
                "\n\n# 1\n\n",
            ]
        ),
    ),
    min_size=1,
    max_size=60,
).map("".join)


PROSE = st.integers(0, 10**6).map(lambda seed: prose(300, seed))


def chunker(store, text, chunk_tokens, boundary="token", tokenizer=TOKENIZER):
    return Chunker(store, store.add(Document.from_text(text)), tokenizer, chunk_tokens, boundary)


def cut(store, text, chunk_tokens, boundary="token", tokenizer=TOKENIZER):
    """The chunks of a text, in which nothing is lost, spans are true, and which are alike from every cursor."""
    reader = chunker(store, text, chunk_tokens, boundary, tokenizer)
    chunks, data = list(reader.chunks()), text.encode()
    assert "".join(chunk.text for chunk in chunks) == text
    char = byte = 0
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.start_char, chunk.start_byte) == (index, char, byte)
        assert text[chunk.start_char : chunk.end_char] == chunk.text
        assert data[chunk.start_byte : chunk.end_byte].decode() == chunk.text
        assert chunk.tokens <= chunk_tokens + 3
        assert chunk.last == (index == len(chunks) - 1)
        char, byte = chunk.end_char, chunk.end_byte
    for chunk, following in [*itertools.pairwise(chunks)][:: 1 + len(chunks) // 40]:
        assert next(chunker(store, text, chunk_tokens, boundary, tokenizer).chunks(chunk.next)) == following
    assert reader.next_chunk(chunks[-1].next) is None
    return chunks


WORD_PIECE = HFTokenizer(json.loads(TOKENIZER_KINDS["wordpiece"]().to_str()), name="word piece")


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORD_PIECE], ids=["embedded", "one that drops and changes text"])
@settings(max_examples=60)
@given(text=MIXED.filter(str.strip), chunk_tokens=st.integers(1, 60), boundary=BOUNDARIES)
def test_any_text_is_cut_without_loss_and_alike_from_every_cursor(
    tokenizer, text, chunk_tokens, boundary, tmp_path_factory
):
    store = DocumentStore(tmp_path_factory.mktemp("store"))
    chunks = cut(store, text, chunk_tokens, boundary, tokenizer)
    assert sum(chunk.tokens for chunk in chunks) == tokenizer.count(text)


@pytest.mark.parametrize("chunk_tokens", [7, 1000, 5000, 40_000])
def test_chunks_over_many_pieces_have_exactly_the_tokens_of_the_whole_text(chunk_tokens, store):
    text = prose(200_000)
    assert len(text.encode()) > 10 * PIECE_BYTES
    chunks = cut(store, text, chunk_tokens)
    ids = TOKENIZER._backend.encode(text, add_special_tokens=False).ids
    at = 0
    for chunk in chunks:
        assert TOKENIZER.decode(ids[at : at + chunk.tokens]) == chunk.text
        assert chunk_tokens - 3 <= chunk.tokens <= chunk_tokens or chunk.last
        at += chunk.tokens
    assert at == len(ids)
    middle = len(chunks) // 2
    assert list(chunker(store, text, chunk_tokens).chunks(chunks[middle].next)) == chunks[middle + 1 :]


def test_another_chunk_size_goes_on_from_the_same_cursor(store):
    text = prose(90_000)
    first = next(chunker(store, text, 5000).chunks())
    rest = "".join(chunk.text for chunk in chunker(store, text, 1234).chunks(first.next))
    assert first.text + rest == text


@pytest.mark.parametrize("text", ["a  b", " a", "a. b", "a 1", "\n", "a\n", "a\n\n", "a\n 1", "日本語"])
def test_no_cut_is_safe_without_a_letter_on_either_side(text):
    assert find_safe_cut(text, 0) is None


@settings(max_examples=60)
@given(text=st.text("ab. \n\r\t1'é", max_size=40) | st.tuples(MIXED, PROSE, MIXED).map("".join))
def test_a_safe_cut_changes_no_token(text):
    for lowest in range(0, len(text), 1 + len(text) // 40):
        cut = find_safe_cut(text[: lowest + 60], lowest)
        if cut is not None:
            assert lowest <= cut
            assert TOKENIZER.encode(text[:cut]) + TOKENIZER.encode(text[cut:]) == TOKENIZER.encode(text)


@pytest.mark.parametrize("unit", ["a", "\n", "語", "e\u0301", "ab "])
def test_much_text_without_borders_is_cut_without_loss(unit, store):
    text = (unit * 300_000)[: 300_000 // len(unit.encode())] + "."
    chunks = cut(store, text, 5000)
    assert all(4997 <= chunk.tokens <= 5000 for chunk in chunks[:-1])
    assert "".join(cut_pieces(text)) == text
    assert max(len(piece) for piece in cut_pieces(text)) <= MAX_PIECE_BYTES


def test_sentence_ends_are_preferred_when_near_and_only_then(store):
    text = "This is one short sentence of prose. " * 3000
    chunks = cut(store, text, 500, "sentence")
    assert all(chunk.text.endswith("prose.") for chunk in chunks[:-1])
    assert all(chunk.tokens > 500 * 0.85 - 1 for chunk in chunks[:-1])
    endless = "words without any end " * 3000
    assert all(chunk.tokens == 500 for chunk in cut(store, endless, 500, "sentence")[:-1])


def test_paragraph_ends_are_preferred_to_sentence_ends(store):
    text = "A line. And more of it.\n\nNext paragraph starts. It goes on. And on. And on.\n\n" * 800
    chunks = cut(store, text, 400, "paragraph")
    assert all(chunk.text.endswith("\n\n") for chunk in chunks[:-1])


def test_headings_are_preferred_when_near_and_otherwise_paragraph_ends(store):
    words = "The quick brown fox jumps over the lazy dog and is not seen. "
    text = "\n\n".join(f"## 4.{number} Part\n\n{words * (5 + number % 3)}" for number in range(1, 41))
    chunks = cut(store, text, 250, "heading")
    assert all(chunk.text.startswith("## 4.") for chunk in chunks[1:])
    assert sum(chunk.text.startswith("## 4.") for chunk in cut(store, text, 250, "paragraph")) < len(chunks) - 1
    text = "\n\n".join([words] * 100)
    assert cut(store, text, 100, "heading") == cut(store, text, 100, "paragraph")


@pytest.mark.parametrize(("documents", "readers"), [(1, 5), (12, 1)])
def test_a_piece_is_tokenised_once_however_many_reads_are_under_way(documents, readers, store, monkeypatch):
    tokenizer = HFTokenizer(TOKENIZER._specification, name="counting")
    library = LengthRecorder(tokenizer._fast._encoding)
    monkeypatch.setattr(tokenizer._fast, "_encoding", library)
    monkeypatch.setattr(HFTokenizer, "fingerprint", f"counting {documents}")
    texts = [prose(40_000, seed=seed) for seed in range(documents)]
    reads = [chunker(store, text, 700, tokenizer=tokenizer).chunks() for text in texts * readers]
    assert sum(len(chunks) for chunks in zip(*reads, strict=False)) > 10 * documents * readers
    assert sum(library.lengths) == sum(map(len, texts))


def test_chunks_of_no_tokens_are_refused(store):
    with pytest.raises(ValueError, match="at least 1"):
        chunker(store, "text", 0)


def bytes_with(*tokens: bytes) -> HFTokenizer:
    """A byte-level tokenizer that has some tokens of several bytes, made in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocabulary, merges = {name: byte for byte, name in names.items()}, []
    for token in tokens:
        for end in range(2, len(token) + 1):
            pair = "".join(names[byte] for byte in token[: end - 1]), names[token[end - 1]]
            if pair not in merges:
                merges.append(pair)
                vocabulary["".join(pair)] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return HFTokenizer(json.loads(backend.to_str()), name="bytes")


def unigram_of_bytes() -> HFTokenizer:
    """A Unigram tokenizer that takes unknown characters apart into bytes."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁", -2.0), ("a", -2.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    return HFTokenizer(json.loads(backend.to_str()), name="unigram")


@pytest.mark.parametrize("tokenizer", [bytes_with(b"\x92\xe1\x9e"), unigram_of_bytes()], ids=["token", "unigram"])
@pytest.mark.parametrize(("chunk_tokens", "characters"), [(1, 300), (7, 600), (300, 3000)])
def test_no_chunk_grows_where_no_token_ends_a_character(tokenizer, chunk_tokens, characters, store):
    text = "a" + "\u1792" * characters + "a"
    chunks = cut(store, text, chunk_tokens, tokenizer=tokenizer)
    assert not any(chunk.splits for chunk in chunks), "each is a character of its own"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, bytes_with(b"\x92\xe1\x9e")], ids=["embedded", "token"])
def test_a_character_is_split_only_if_it_is_longer_than_64_tokens_or_a_chunk(tokenizer, store):
    short, long = "e" + "\u0301" * 20, "o" + "\u0301" * 200
    text = (short + "x") * 50 + long + (short + " ") * 20
    chunks = cut(store, text, 70, tokenizer=tokenizer)
    assert all(chunk.tokens <= 70 for chunk in chunks)
    place = text.index(long)
    split = [chunk.end_char for chunk in chunks if not is_character_end(text, chunk.end_char)]
    assert split and all(place < end < place + len(long) for end in split)
    assert split == [chunk.end_char for chunk in chunks if chunk.splits]


def test_text_without_any_token_is_still_read(store):
    assert cut(store, "the reader " + "\u200b" * 50_000, 5, tokenizer=WORD_PIECE)


def test_sentences_are_whole_in_short_chunks_with_a_long_tail(store):
    sentences = [f"{'The grey heron waits ' * (1 + number % 4)}by pond number {number}." for number in range(60)]
    reference = store.add(Document.from_text(" ".join(sentences)))
    for percent in (50, None):
        reader = Chunker(store, reference, TOKENIZER, 80, "sentence", tail_percent=percent)
        chunks = [chunk.text for chunk in reader.chunks()]
        assert "".join(chunks) == " ".join(sentences)
        assert all(any(sentence in chunk for chunk in chunks) for sentence in sentences) == (percent == 50)
