"""Tokenizers: exact ids, prefixes in characters, pathological text, and loading by name."""

import json
import pickle
import re
import sys
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adversarial_texts import make_adversarial_texts
from support.made_tokenizers import CL100K, TOKENIZER_KINDS, LengthRecorder, encode
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from memagent_graph.errors import MissingExtraError, TokenizerError, make_install_command
from memagent_graph.tokenizers.byte_level import map_characters_to_bytes
from memagent_graph.tokenizers.loading import HFTokenizer, TiktokenTokenizer, load_tokenizer
from memagent_graph.tokenizers.pieces import MAX_PIECE_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make_tokenizer in TOKENIZER_KINDS.items():
        (root / name).mkdir()
        make_tokenizer().save(str(root / name / "tokenizer.json"))
    return root


@pytest.fixture(scope="module", params=list(TOKENIZER_KINDS))
def tokenizer(request, folder):
    return load_tokenizer(folder / request.param)


def load_specification(folder, kind):
    return json.loads((folder / kind / "tokenizer.json").read_text())


def test_text_of_a_special_token_is_encoded_as_ordinary_text(tokenizer):
    text = "a <|im_end|> b <|endoftext|></s>[SEP]"
    special_tokens = {"<|im_end|>", "<|endoftext|>", "</s>", "[SEP]"} & tokenizer.special_tokens
    assert special_tokens
    ids = encode(tokenizer, text)
    assert all(len(encode(tokenizer, token)) > 1 for token in special_tokens)
    assert len(ids) == tokenizer.count(text) > len(text.split())


@settings(max_examples=40)
@given(text=st.text(max_size=60))
def test_any_text_can_be_encoded_and_has_monotonic_prefixes(text, tokenizer):
    ids = encode(tokenizer, text)
    assert tokenizer.count(text) == len(ids)
    tokenized = tokenizer.tokenize(text)
    assert len(tokenized) == len(ids)
    assert tokenized.prefix_chars(len(ids)) == len(text)
    lengths = [length for n in range(len(ids) + 1) if (length := tokenized.prefix_chars(n)) is not None]
    assert lengths == sorted(lengths)
    assert all(0 <= length <= len(text) for length in lengths)
    valid_text = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert ids == encode(tokenizer, valid_text)


def make_library_tokenizer(specification):
    """Return a tokenizer that leaves all work to the tokenizers library."""
    tokenizer = HFTokenizer(specification, name="library")
    tokenizer._fast = None
    return tokenizer


@pytest.mark.parametrize("kind", ["cl100k", "gpt2", "nfc"])
def test_byte_level_bpe_by_tiktoken_has_the_ids_and_prefixes_of_the_library(kind, folder):
    tokenizer, library = load_tokenizer(folder / kind), make_library_tokenizer(load_specification(folder, kind))
    vocabulary = [tokenizer._fast._encoding.decode_single_token_bytes(token) for token in range(300, 2000)]
    unknown_prefixes = 0
    for index, text in enumerate(make_adversarial_texts(vocabulary, count=1500)):
        ids = encode(tokenizer, text)
        assert ids == encode(library, text)
        tokenized, by_offsets = tokenizer.tokenize(text), library.tokenize(text)
        for n in range(len(ids) + 1) if index % 5 == 0 else ():
            length = tokenized.prefix_chars(n)
            assert by_offsets.prefix_chars(n) == length
            unknown_prefixes += length is None
            assert length is None or kind == "nfc" or library._backend.decode(ids[:n]) == text[:length]
    assert unknown_prefixes > 100


def make_specification(*merges, ignore_merges=False):
    """Return a tokenizer with GPT-2's split into words, whose vocabulary is all bytes and these merges."""
    vocab = {character: index for index, character in enumerate(map_characters_to_bytes())}
    for merge in merges:
        vocab.setdefault("".join(merge), len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[*merges], ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return json.loads(backend.to_str())


TWO_WAYS_TO_A_TOKEN = (("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"))
UNREACHABLE_TOKEN = (("b", "c"), ("a", "b"), ("ab", "c"))


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("merges", [TWO_WAYS_TO_A_TOKEN, UNREACHABLE_TOKEN, (("1", "0"), ("0", "0"), ("10", "0"))])
def test_merges_that_tiktoken_would_apply_differently_are_left_to_the_library(merges, ignore_merges):
    specification = make_specification(*merges, ignore_merges=ignore_merges)
    tokenizer, library = HFTokenizer(specification, name="own"), make_library_tokenizer(specification)
    for text in ("abc", "xabc abcd", "bcabc", "100", "2100 1000"):
        assert encode(tokenizer, text) == encode(library, text)
        assert tokenizer.tokenize(text).prefix_chars(1) == library.tokenize(text).prefix_chars(1)


def test_prefixes_of_text_that_is_normalized_count_its_original_characters(folder):
    tokenizer = load_tokenizer(folder / "nfc")
    decode = tokenizer._backend.decode
    text = "e\u0301 cafe\u0301 A\u030a\u0323 한국어 \u1112\u1161\u11ab plain q\u0307\u0323 end"
    ids = encode(tokenizer, text)
    tokenized = tokenizer.tokenize(text)
    lengths = [tokenized.prefix_chars(n) for n in range(len(ids) + 1)]
    for n, length in enumerate(lengths):
        if length is not None:
            assert decode(ids[:n]) == decode(encode(tokenizer, text[:length]))
    assert sum(length is not None for length in lengths) > len(text.split())


@pytest.mark.parametrize("unit", ["a", "\n", "語", "\ud800", "e\u0301"])
def test_a_long_run_of_one_character_takes_bounded_time(unit, tokenizer, monkeypatch):
    """The library's patterns may take quadratic time, so it gets pieces of bounded length, and few of them."""
    text = (unit * 100_000)[: 100_000 // len(unit.encode("utf-8", "replace"))]
    copy = pickle.loads(pickle.dumps(tokenizer))  # without the caches of earlier tests
    is_fast = hasattr(copy.tokenize(text), "ids")
    owner, library = (copy._fast, "_encoding") if is_fast else (copy, "_backend")
    recorder = LengthRecorder(getattr(owner, library))
    monkeypatch.setattr(owner, library, recorder)
    ids = encode(copy, text)
    max_chars = MAX_PIECE_BYTES // 4
    assert max(recorder.lengths) <= max_chars
    # A piece on which a pattern gives up is halved, so each character is scanned only a few times.
    assert len(text) // 2 <= sum(recorder.lengths) <= 4 * len(text)
    assert len(recorder.lengths) <= 8 * (len(text) // max_chars + 1)
    assert copy.tokenize(text).prefix_chars(len(ids)) == len(text)


def test_a_fingerprint_depends_on_the_tokenizer_and_not_on_its_file(folder, tmp_path):
    fingerprints = {kind: load_tokenizer(folder / kind).fingerprint for kind in TOKENIZER_KINDS}
    assert len(set(fingerprints.values())) == len(TOKENIZER_KINDS)
    for kind in TOKENIZER_KINDS:
        # The same tokenizer as written by another program: other format of merges, indentation, truncation.
        specification = load_specification(folder, kind)
        if merges := specification["model"].get("merges"):
            merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
            specification["model"]["merges"] = merges
        specification["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(specification, indent=4))
        for copy in (load_tokenizer(path), pickle.loads(pickle.dumps(load_tokenizer(folder / kind)))):
            assert copy.fingerprint == fingerprints[kind]
            assert copy.count("one two three four five six seven eight") > 5


def test_a_tiktoken_encoding_that_cannot_be_fetched_names_the_remedy(monkeypatch):
    import requests
    import tiktoken

    def fail(name):
        raise requests.exceptions.ConnectionError("no network\nat all")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    for name in ("cl100k_base", "gpt-4o"):
        with pytest.raises(TokenizerError, match=r"TIKTOKEN_CACHE_DIR.*tokenizer embedded"):
            load_tokenizer(name)


def test_a_text_on_which_tiktoken_panics_is_halved():
    results = [type("PanicException", (BaseException,), {}), [1], [2]]
    assert TiktokenTokenizer(MagicMock(**{"encode_ordinary.side_effect": results})).encode("abc") == [1, 2]


def test_a_tiktoken_encoding_is_found_by_model_name(monkeypatch):
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    names = []

    def get_encoding(name):
        names.append(name)
        return tiktoken.Encoding(name, pat_str=CL100K, mergeable_ranks=ranks, special_tokens={"<|x|>": 256})

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    tokenizer = load_tokenizer("gpt-4o-mini")
    assert names == ["o200k_base"]
    assert tokenizer.name == "o200k_base"
    assert tokenizer.special_tokens == {"<|x|>"}
    assert encode(tokenizer, "ab<|x|>") == list(b"ab<|x|>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer.json"),
        ("{", "not a readable"),
        ("[]", "no model"),
        ('{"model": {"type": "X"}}', "cannot be used"),
    ],
)
def test_a_bad_file_or_folder_is_an_error_with_a_remedy(content, message, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message) as error:
        load_tokenizer(tmp_path)
    assert error.value.hint


def test_a_hub_id_is_loaded_from_the_local_cache_without_a_network(cached):
    tokenizer = load_tokenizer(cached)
    assert tokenizer.name == cached
    assert tokenizer.fingerprint == load_tokenizer("embedded").fingerprint
    with pytest.raises(TokenizerError, match=r"cannot be reached.*HF_HUB_OFFLINE"):
        load_tokenizer("some/other")
    with pytest.raises(TokenizerError, match="there is no tokenizer"):
        load_tokenizer("folder/tokenizer.json")  # the path of a file, not a hub id
    with pytest.raises(TokenizerError, match="there is no tokenizer"):
        load_tokenizer("~no-such-user/model")


def test_a_missing_hub_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=re.escape(make_install_command("hub"))):
        load_tokenizer("some/model")
