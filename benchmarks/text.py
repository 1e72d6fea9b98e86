"""Generate the texts that benchmarks read, from prose that comes with Python."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice

from memagent_evaluation.tasks.haystacks import iter_python_prose
from memagent_graph.tokenizers import load_tokenizer


def make_prose(tokens: int) -> str:
    """Return a text of about `tokens` tokens of the embedded tokenizer."""
    return next(generate_documents(tokens, 1))


def generate_documents(tokens: int, count: int) -> Iterator[str]:
    """Yield `count` texts of about `tokens` tokens of the embedded tokenizer, with different beginnings."""
    paragraphs, paragraph_tokens = _load_paragraphs()
    next_paragraph = 0
    for _ in range(count):
        document_paragraphs, token_count = [], 0
        while token_count < tokens:
            document_paragraphs.append(paragraphs[next_paragraph % len(paragraphs)])
            token_count += paragraph_tokens[next_paragraph % len(paragraphs)]
            next_paragraph += 1
        yield "\n\n".join(document_paragraphs)


@cache
def _load_paragraphs() -> tuple[list[str], list[int]]:
    """Return paragraphs, and the tokens of each with the blank line after it."""
    tokenizer = load_tokenizer("embedded")
    paragraphs = list(islice(iter_python_prose(), 6000))
    return paragraphs, [tokenizer.count(paragraph) + 2 for paragraph in paragraphs]
