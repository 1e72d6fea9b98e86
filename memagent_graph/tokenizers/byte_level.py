"""Converts a byte-level BPE tokenizer.json to tiktoken: the ids of the `tokenizers` library, eight times as fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import tiktoken

_GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_COMMON_PATTERNS: Final = frozenset({_GPT2_PATTERN, _QWEN_PATTERN, _QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")})
"""Regular expressions that split text in the same way in both libraries, for all characters of Unicode."""
_NORMALIZERS: Final = (None, {"type": "NFC"})


def make_encoding(specification: dict[str, Any]) -> tiktoken.Encoding | None:
    """Return an encoding with the ids of a tokenizer.json, for texts that its normalizer does not change.

    tiktoken merges two parts whenever the result is a token, and the token with the lowest id first. So the ids are
    those of the file if its merges are in the order of their ids, each token is the result of one merge, and the merges
    build every token from its bytes, or it is always matched as a whole word. If not, the result is None; also for
    another kind of file, and for a damaged one, for which the `tokenizers` library has the error.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        return _make_tiktoken_encoding(specification)
    return None


def _make_tiktoken_encoding(specification: dict[str, Any]) -> tiktoken.Encoding | None:
    model = specification["model"]
    pattern = _find_pattern(specification.get("pre_tokenizer") or {})
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if (
        pattern is None
        or model.get("type") != "BPE"
        or any(model.get(option) for option in options)
        or (specification.get("decoder") or {}).get("type") != "ByteLevel"
        or specification.get("normalizer") not in _NORMALIZERS
    ):
        return None
    bytes_by_character = map_characters_to_bytes()
    vocabulary: dict[str, int] = model["vocab"]
    ids = {text: vocabulary[text] for text in bytes_by_character}
    tokens_by_pair: dict[tuple[int, int], int] = {}
    last_token = -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        token = vocabulary[left + right]
        if token <= last_token:
            return None
        ids[left + right] = tokens_by_pair[ids[left], ids[right]] = last_token = token
    unmerged_ids = {text: token for text, token in vocabulary.items() if text not in ids}
    matches_whole_words = model.get("ignore_merges") or False
    if matches_whole_words and unmerged_ids:
        return None
    unreachable_ids = {*_find_unreachable_tokens(tokens_by_pair)}
    # A number of up to three digits is a whole word, and only tokens of three or more bytes can be unreachable.
    digit_ids = {token for text, token in ids.items() if text.isascii() and text.isdigit()}
    if not unreachable_ids <= (digit_ids if matches_whole_words and pattern != _GPT2_PATTERN else set()):
        return None
    table = str.maketrans({character: chr(byte) for character, byte in bytes_by_character.items()})
    added_ids = {token["content"]: token["id"] for token in specification.get("added_tokens") or ()}
    return tiktoken.Encoding(
        "byte-level BPE",
        pat_str=pattern,
        mergeable_ranks={text.translate(table).encode("latin-1"): token for text, token in ids.items()},
        special_tokens=unmerged_ids | added_ids,
    )


def _find_pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the regular expression that splits texts into words, or None if tiktoken may split them differently."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _COMMON_PATTERNS:
            return pattern
    return None


def map_characters_to_bytes() -> dict[str, int]:
    """Return the byte that each of GPT-2's 256 printable characters represents in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def _find_unreachable_tokens(tokens_by_pair: dict[tuple[int, int], int]) -> Iterator[int]:
    """Yield the tokens that the merges never produce from their own bytes.

    That is so if an earlier merge joins the end of the left part with the beginning of the right part. Both parts are
    split here, the later one first, to see which parts met at the boundary and whether an earlier merge joins them.
    """
    pairs_by_token = {token: pair for pair, token in tokens_by_pair.items()}
    for pair, token in tokens_by_pair.items():
        (left, right), limit = pair, token
        while tokens_by_pair.get((left, right), limit) >= limit:
            if left in pairs_by_token and (left > right or right not in pairs_by_token):
                limit, left = left, pairs_by_token[left][1]
            elif right in pairs_by_token:
                limit, right = right, pairs_by_token[right][0]
            else:
                break
        else:
            yield token
