"""Tokenizers: exact ids, prefixes in characters, pathological text, and what can be named."""

import json
import pickle
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adversarial_texts import adversarial_texts
from support.made_tokenizers import CL100K, KINDS, Fed
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from memagent_graph.errors import MissingExtraError, TokenizerError, make_install_command
from memagent_graph.tokenizers.byte_level import map_characters_to_bytes
from memagent_graph.tokenizers.loading import HFTokenizer, load_tokenizer
from memagent_graph.tokenizers.pieces import MAX_PIECE_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make in KINDS.items():
        (root / name).mkdir()
        make().save(str(root / name / "tokenizer.json"))
    return root


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request, folder):
    return load_tokenizer(folder / request.param)


def specification(folder, kind):
    return json.loads((folder / kind / "tokenizer.json").read_text())


def test_text_that_looks_special_is_ordinary_text(tokenizer):
    text = "a <|im_end|> b <|endoftext|></s>[SEP]"
    controls = {"<|im_end|>", "<|endoftext|>", "</s>", "[SEP]"} & tokenizer.special_tokens
    assert controls
    ids = tokenizer.encode(text)
    singles = {tuple(tokenizer.encode(control)) for control in controls}
    assert all(len(single) > 1 for single in singles)
    assert len(ids) == tokenizer.count(text) > len(text.split())


@settings(max_examples=40)
@given(text=st.text(max_size=60))
def test_any_text_encodes_and_its_prefixes_are_true(text, tokenizer):
    ids = tokenizer.encode(text)
    assert tokenizer.count(text) == len(ids)
    tokenized = tokenizer.tokenize(text)
    assert len(tokenized) == len(ids)
    assert tokenized.prefix_chars(len(ids)) == len(text)
    lengths = [tokenized.prefix_chars(n) for n in range(len(ids) + 1)]
    known = [length for length in lengths if length is not None]
    assert known == sorted(known)
    assert all(0 <= length <= len(text) for length in known)
    clean = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert ids == tokenizer.encode(clean)


def by_library(spec):
    """A tokenizer of the same file that leaves all work to the tokenizers library."""
    tokenizer = HFTokenizer(spec, name="library")
    tokenizer._fast = None
    return tokenizer


@pytest.mark.parametrize("kind", ["cl100k", "gpt2", "nfc"])
def test_byte_level_bpe_by_tiktoken_has_the_ids_and_prefixes_of_the_library(kind, folder):
    tokenizer, library = load_tokenizer(folder / kind), by_library(specification(folder, kind))
    vocabulary = [tokenizer._fast._encoding.decode_single_token_bytes(token) for token in range(300, 2000)]
    inside = 0
    for number, text in enumerate(adversarial_texts(vocabulary, count=1500)):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids)
        tokenized, by_offsets = tokenizer.tokenize(text), library.tokenize(text)
        for n in range(len(ids) + 1) if number % 5 == 0 else ():
            length = tokenized.prefix_chars(n)
            assert by_offsets.prefix_chars(n) == length
            inside += length is None
            assert length is None or kind == "nfc" or tokenizer.decode(ids[:n]) == text[:length]
    assert inside > 100


def merges_of(*merges, ignore_merges=False):
    """GPT-2's words, and a vocabulary of bytes and these merges."""
    vocab = {character: number for number, character in enumerate(map_characters_to_bytes())}
    for merge in merges:
        vocab.setdefault("".join(merge), len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[*merges], ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return json.loads(backend.to_str())


A_TOKEN_IN_TWO_WAYS = (("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"))
A_TOKEN_OUT_OF_REACH = (("b", "c"), ("a", "b"), ("ab", "c"))


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("merges", [A_TOKEN_IN_TWO_WAYS, A_TOKEN_OUT_OF_REACH, (("1", "0"), ("0", "0"), ("10", "0"))])
def test_the_library_does_what_tiktoken_would_do_otherwise(merges, ignore_merges):
    spec = merges_of(*merges, ignore_merges=ignore_merges)
    tokenizer, library = HFTokenizer(spec, name="own"), by_library(spec)
    for text in ("abc", "xabc abcd", "bcabc", "100", "2100 1000"):
        assert tokenizer.encode(text) == library.encode(text)
        assert tokenizer.tokenize(text).prefix_chars(1) == library.tokenize(text).prefix_chars(1)


def test_prefixes_of_text_that_a_normal_form_changes_are_in_its_own_characters(folder):
    tokenizer = load_tokenizer(folder / "nfc")
    text = "e\u0301 cafe\u0301 A\u030a\u0323 한국어 \u1112\u1161\u11ab plain q\u0307\u0323 end"
    ids = tokenizer.encode(text)
    tokenized = tokenizer.tokenize(text)
    lengths = [tokenized.prefix_chars(n) for n in range(len(ids) + 1)]
    for n, length in enumerate(lengths):
        if length is not None:
            assert tokenizer.decode(ids[:n]) == tokenizer.decode(tokenizer.encode(text[:length]))
    assert sum(length is not None for length in lengths) > len(text.split())


@pytest.mark.parametrize("unit", ["a", "\n", "語", "\ud800", "e\u0301"])
def test_much_of_one_character_neither_crashes_nor_crawls(unit, tokenizer, monkeypatch):
    """No text that the library's patterns could take for ever over is given to it: pieces are bounded, and few."""
    text = (unit * 100_000)[: 100_000 // len(unit.encode("utf-8", "replace"))]
    fresh = pickle.loads(pickle.dumps(tokenizer))  # it has encoded nothing yet
    owner, library = (fresh, "_backend") if fresh._choose_fast(text) is None else (fresh._fast, "_encoding")
    fed = Fed(getattr(owner, library))
    monkeypatch.setattr(owner, library, fed)
    ids = fresh.encode(text)
    largest = MAX_PIECE_BYTES // 4
    assert max(fed.lengths) <= largest
    # Where a pattern gives up on a piece, its halves are tried: no character is looked at more than a few times.
    assert len(text) // 2 <= sum(fed.lengths) <= 4 * len(text)
    assert len(fed.lengths) <= 8 * (len(text) // largest + 1)
    assert fresh.tokenize(text).prefix_chars(len(ids)) == len(text)


def test_fingerprints_tell_tokenizers_apart_and_not_routes(folder, tmp_path):
    prints = {kind: load_tokenizer(folder / kind).fingerprint for kind in KINDS}
    assert len(set(prints.values())) == len(KINDS)
    for kind in KINDS:
        # The same tokenizer as another program writes it: merges in another form, other blanks, truncation set.
        other = specification(folder, kind)
        merges = other["model"].get("merges")
        if merges:
            other["model"]["merges"] = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
        other["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(other, indent=4))
        for again in (load_tokenizer(path), pickle.loads(pickle.dumps(load_tokenizer(folder / kind)))):
            assert again.fingerprint == prints[kind]
            assert again.count("one two three four five six seven eight") > 5


def test_decode_names_an_unknown_id(folder):
    tokenizer = load_tokenizer(folder / "cl100k")
    with pytest.raises(TokenizerError, match="has no token"):
        tokenizer.decode([10**6])
    special = specification(folder, "cl100k")["added_tokens"][2]
    assert tokenizer.decode([special["id"]]) == "<|im_end|>"


# Names


def test_a_tiktoken_encoding_that_cannot_be_fetched_names_the_remedy(monkeypatch):
    import requests
    import tiktoken

    def offline(name):
        raise requests.exceptions.ConnectionError("no network\nat all")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    for name in ("cl100k_base", "gpt-4o"):
        with pytest.raises(TokenizerError, match=r"TIKTOKEN_CACHE_DIR.*tokenizer embedded"):
            load_tokenizer(name)


def test_a_tiktoken_encoding_is_found_by_model_name(monkeypatch):
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    names = []

    def get(name):
        names.append(name)
        return tiktoken.Encoding(name, pat_str=CL100K, mergeable_ranks=ranks, special_tokens={"<|x|>": 256})

    monkeypatch.setattr(tiktoken, "get_encoding", get)
    tokenizer = load_tokenizer("gpt-4o-mini")
    assert names == ["o200k_base"]
    assert tokenizer.name == "o200k_base"
    assert tokenizer.special_tokens == {"<|x|>"}
    assert tokenizer.encode("ab<|x|>") == list(b"ab<|x|>")


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
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint


def test_a_hub_id_is_loaded_from_the_local_cache_without_a_network(cached):
    tokenizer = load_tokenizer(cached)
    assert tokenizer.name == cached
    assert tokenizer.fingerprint == load_tokenizer("embedded").fingerprint
    with pytest.raises(TokenizerError, match=r"cannot be reached.*HF_HUB_OFFLINE"):
        load_tokenizer("some/other")
    with pytest.raises(TokenizerError, match="there is no tokenizer"):
        load_tokenizer("folder/tokenizer.json")  # a file's name


def test_a_missing_hub_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=re.escape(make_install_command("hub"))):
        load_tokenizer("some/model")
