"""Tokenizers of the tokenizers library, small and trained on Python's own sources."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STANDARD_LIBRARY = Path(json.__file__).parent
TRAINING_TEXTS = [
    *(path.read_text() for path in STANDARD_LIBRARY.glob("*.py")),
    "naïve café Ärger e\u0301 日本語 " * 20,
]


def train_tokenizer(model, trainer, pre_tokenizer, decoder=None, normalizer=None):
    """Return a tokenizer of the tokenizers library that is trained on `TRAINING_TEXTS`."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(TRAINING_TEXTS, trainer)
    return backend


def make_byte_level(pattern=CL100K, normalizer=None):
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    return train_tokenizer(models.BPE(), trainer, pre_tokenizer, decoders.ByteLevel(), normalizer)


def make_unigram():
    trainer = trainers.UnigramTrainer(
        vocab_size=1000, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return train_tokenizer(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def make_word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    model, normalizer = models.WordPiece(unk_token="[UNK]"), normalizers.BertNormalizer()
    return train_tokenizer(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizer=normalizer)


TOKENIZER_KINDS = {
    "cl100k": make_byte_level,
    "gpt2": lambda: make_byte_level(None),
    "nfc": lambda: make_byte_level(normalizer=normalizers.NFC()),
    "unigram": make_unigram,
    "wordpiece": make_word_piece,
}


class LengthRecorder:
    """Passes calls on to a tokenizer library, and records the lengths of their texts in characters."""

    def __init__(self, library):
        self.library, self.lengths = library, []

    def __getattr__(self, name):
        def call(text, *arguments, **options):
            if isinstance(text, str):
                self.lengths.append(len(text))
            return getattr(self.library, name)(text, *arguments, **options)

        return call


def encode(tokenizer, text):
    """Return the ids of the tokens of a text."""
    tokens = tokenizer.tokenize(text)
    return tokens.ids if hasattr(tokens, "ids") else [token for _, encoding in tokens.pieces for token in encoding.ids]
