"""Texts on which tokenizers are most likely to disagree."""

from __future__ import annotations

import random
from collections.abc import Iterator

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


def make_adversarial_texts(vocabulary: list[bytes], count: int = 1500) -> Iterator[str]:
    """Yield short texts on which tokenizers are most likely to disagree, the same in each call.

    They mix scripts, combining marks, unusual white space, contractions, control characters, text that looks like
    special tokens, and the tokenizer's own tokens (`vocabulary`) in unusual orders.
    """
    rng = random.Random(0)
    tokens = [text for token in vocabulary if (text := token.decode("utf-8", "ignore"))] or ["a"]
    yield ""
    for index in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.4 or index % 3 == 0:
                parts.append(rng.choice(tokens))
            elif kind < 0.5:
                parts.append(rng.choice(_WORDS))
            else:
                parts.append("".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 6))))
        yield "".join(parts)
