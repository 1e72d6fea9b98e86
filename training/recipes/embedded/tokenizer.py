"""Trains the embedded policy's small byte-level BPE, in which each group of one to three digits is a single token.

Ids are ranks: the 256 bytes, then the results of merges in order, then the special tokens. Therefore the file converts
exactly to a tiktoken encoding. The merges of digits are fixed and come first; the others are learned on texts
without digits.

    python -m recipes.embedded.tokenizer --corpus corpus/train.txt --out memagent_graph/embedded
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from memagent_graph.tokenizers.byte_level import make_encoding, map_characters_to_bytes

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
VOCABULARY_SIZE = 5120
"""The number of tokens, including special tokens."""
TAG_TEXT = (
    "\n<section> x </section>\n<memory> none </memory>\n<problem> x? </problem>\nAnswer in \\boxed{}. \\boxed{ none}"
    "\nWhat is the number of What's Which Find Tell me Give mentioned in the provided text?"
)
"""The tags and frequent words of prompts, which are repeated in the training text so that they become single tokens."""

CHAT_TEMPLATE = (
    "{%- set carried = namespace(text='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set carried.text = message['content'] + '\n' -%}"
    "{%- elif message['role'] == 'user' -%}{{- '<|user|>' + carried.text + message['content'] + '<|end|>' -}}"
    "{%- set carried.text = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' + message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_digit_merges() -> list[tuple[str, str]]:
    """Return merges that make all two-digit and then all three-digit strings."""
    digits = "0123456789"
    pairs = [(a, b) for a in digits for b in digits]
    return pairs + [(a + b, c) for a, b in pairs for c in digits]


def learn_merges(texts: Iterator[str], count: int) -> list[tuple[str, str]]:
    """Return the first `count` merges that BPE learns on the texts with digits removed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = make_pre_tokenizer()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((re.sub(r"\d+", " ", text) for text in texts), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def make_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits by `SPLIT_PATTERN`, and then into bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train on the texts, and return the tokenizer with its vocabulary in rank order."""
    merges = make_digit_merges()
    merges += learn_merges(texts, VOCABULARY_SIZE - 256 - len(merges) - len(SPECIAL_TOKENS))
    characters = map_characters_to_bytes()
    tokens = sorted(characters, key=characters.__getitem__) + [left + right for left, right in merges]
    vocabulary = {token: rank for rank, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("two merges give the same token")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = make_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_window: int = 1024) -> None:
    """Write tokenizer.json and tokenizer_config.json for transformers and vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_window,
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_encoding(folder: Path) -> tiktoken.Encoding:
    """Return the tokenizer of a folder as a tiktoken encoding, which encodes a prompt several times faster."""
    encoding = make_encoding(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    if encoding is None:
        raise SystemExit("tiktoken cannot give the ids of the tokenizer")
    return encoding


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8_000_000, help="characters of the corpus that are used")
    arguments = parser.parse_args()
    text = arguments.corpus.read_text(encoding="utf-8")[: arguments.limit]
    text_pieces = (text[start : start + 100_000] for start in range(0, len(text), 100_000))
    texts = (piece for source in (text_pieces, iter([TAG_TEXT * 20_000])) for piece in source)
    tokenizer = build_tokenizer(texts)
    save_tokenizer(tokenizer, arguments.out)
    encoding = load_encoding(arguments.out)
    sample = text[:200_000]
    if encoding.encode_ordinary(sample) != tokenizer.encode(sample).ids:
        raise SystemExit("the tiktoken conversion disagrees with the tokenizer")
    characters_per_token = len(sample) / len(encoding.encode_ordinary(sample))
    print(f"{tokenizer.get_vocab_size()} tokens, {characters_per_token:.2f} characters per token")


if __name__ == "__main__":
    main()
