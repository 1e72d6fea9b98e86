"""Tokenizers: exact token ids, and the position of tokens in the text."""

from __future__ import annotations

from memagent_graph.tokenizers.loading import EMBEDDED, TextTokens, Tokenizer, load_tokenizer

__all__ = ["EMBEDDED", "TextTokens", "Tokenizer", "load_tokenizer"]
