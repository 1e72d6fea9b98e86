"""A byte-level BPE tokenizer.json as a tiktoken encoding, which is several times faster than the `tokenizers` library.

The conversion inverts GPT-2's map from bytes to printable characters and uses ids as merge ranks. It is exact if
merge results have ascending ids and one regular expression splits the text; `differs_from` checks that against the
`tokenizers` library. All other tokenizers run on that library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tiktoken

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""The same after a step that splits off each digit, so that white space ends before one as it does at the end."""


@dataclass(frozen=True, slots=True)
class ByteLevelBPE:
    """The contents of a tokenizer.json in tiktoken's form.

    Attributes:
        ranks: from a token's bytes to its id, which is also its merge rank.
        pattern: the regular expression that splits text into words.
        special_tokens: added tokens, and vocabulary entries that no text encodes to, by their text.
        nfc: whether text is normalized to Unicode's form C first.
    """

    ranks: dict[bytes, int]
    pattern: str
    special_tokens: dict[str, int]
    nfc: bool

    def encoding(self, name: str) -> tiktoken.Encoding:
        """Build the tiktoken encoding. Raises ValueError if tiktoken refuses the pattern."""
        return tiktoken.Encoding(
            name, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.special_tokens
        )


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes, from character to byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table


def convert(specification: dict[str, Any]) -> ByteLevelBPE | None:
    """Read a tokenizer.json, or return None if tiktoken cannot replace it."""
    model = specification.get("model") or {}
    pattern = _pattern(specification.get("pre_tokenizer"))
    nfc = _is_nfc(specification.get("normalizer"))
    if pattern is None or nfc is None or not _is_plain_bpe(model):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    ranks = _ranks(vocabulary, model["merges"], bool(model.get("ignore_merges")))
    if ranks is None:
        return None
    taken = set(ranks.values())
    specials = {text: index for text, index in vocabulary.items() if index not in taken}
    for added in specification.get("added_tokens") or []:
        if added["id"] not in taken:
            specials[added["content"]] = added["id"]
    return ByteLevelBPE(ranks, pattern, specials, nfc)


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    unwanted = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model.get("type", "BPE") == "BPE" and "merges" in model and not any(model.get(k) for k in unwanted)


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The regular expression of a pre-tokenizer, or None if it is not a single one."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else None
    if (
        len(steps) == 2
        and steps[0] == {"type": "Digits", "individual_digits": True}
        and steps[1].get("use_regex", True)
    ):
        return DIGITS_PATTERN
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1].get("use_regex", True):
        return None
    split = steps[0]
    keeps_matches = (split["behavior"], bool(split.get("invert"))) in {("Isolated", False), ("Removed", True)}
    return split["pattern"].get("Regex") if keeps_matches else None


def _is_nfc(normalizer: dict[str, Any] | None) -> bool | None:
    """Whether a normalizer is NFC (True) or nothing (False); None if it is something else."""
    if normalizer is None:
        return False
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    kinds = [step["type"] for step in steps]
    return bool(kinds) if set(kinds) <= {"NFC"} else None


def _ranks(vocabulary: dict[str, int], merges: list[Any], whole_words_first: bool) -> dict[bytes, int] | None:
    table = byte_of_character()
    ranks = {bytes([byte]): vocabulary[character] for character, byte in table.items() if character in vocabulary}
    if len(ranks) != 256:
        return None
    last = -1
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank = vocabulary.get(left + right, -1)
        if rank <= last:
            return None
        last = rank
        ranks[bytes(table[character] for character in left + right)] = rank
    if whole_words_first:
        for token, rank in vocabulary.items():
            if all(character in table for character in token):
                ranks.setdefault(bytes(table[character] for character in token), rank)
    return ranks


def differs_from(
    encode: Callable[[str], list[int]], reference: Callable[[str], list[int]], vocabulary: list[bytes]
) -> str | None:
    """The first sample text that two tokenizers encode differently, or None if they agree on all of them."""
    return next((text for text in adversarial_texts(vocabulary) if encode(text) != reference(text)), None)


_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789٠١٢٣½²Ⅻ",
    " \t\n\r\x0b\x0c\x85\u00a0\u2003\u2028\u3000\u200b\ufeff",
    "'\".,;:!?-_/\\()[]{}<>|@#$%^&*+=~`“”‘’…—",
    "éèüßçñøåžłőįşĐǅʰªº",
    "e\u0301a\u0308\u0327o\u0302\u0323ﬁΩK",
    "日本語中文字漢かなカナ한국어ㄱㄴ각",
    "العربيةעבריתहिन्दीไทยதமிழ்",
    "😀👩‍👩‍👧🏽🇫🇷❤️🧠\U0001d4d0\U0002f80a",
    "\x00\x01\x07\x1b\x7f\ufffd\ufffe\U0010ffff",
)
_WORDS = ("I'm", "WE'LL", "don't", "x'S", "'re", "\r\n", "\n\n  \n", "   ", "1234567", "<|im_end|>", "</s>", "<think>")


def adversarial_texts(vocabulary: list[bytes], count: int = 1500) -> Iterator[str]:
    """Short texts on which tokenizers are most likely to disagree, the same at each call.

    Mixed scripts, combining marks, unusual white space, contractions, control characters, text that looks like special
    tokens, and the tokenizer's own tokens (`vocabulary`) in orders that do not occur in training text.
    """
    source = random.Random(0)
    tokens = [text for token in vocabulary if (text := token.decode("utf-8", "ignore"))] or ["a"]
    yield ""
    for number in range(count):
        parts = []
        for _ in range(source.randint(1, 12)):
            kind = source.random()
            if kind < 0.4 or number % 3 == 0:
                parts.append(source.choice(tokens))
            elif kind < 0.5:
                parts.append(source.choice(_WORDS))
            else:
                parts.append("".join(source.choices(source.choice(_ALPHABETS), k=source.randint(1, 6))))
        yield "".join(parts)
