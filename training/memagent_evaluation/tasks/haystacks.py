"""Makes haystacks, endless texts to hide needles in: noise, lines that resemble needles, or prose.

Prose comes from the user's files, or from Python itself: the language reference that `help()` shows, and the standard
library's docstrings.
"""

from __future__ import annotations

import ast
import itertools
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

from memagent_evaluation.tasks.placements import Haystack
from memagent_graph.errors import EvaluationError

NOISE = (
    "The kettle is on the stove.",
    "Rain falls on the roof.",
    "A bus goes by.",
    "The clock in the hall is slow again.",
    "Nobody minds.",
)
"""Sentences without information, repeated in this order."""

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*\s+(?=[^a-z\s])|[。！？]+[」』”’）]*")
_MAX_SENTENCE_CHARACTERS = 600
_MAX_PARAGRAPH_CHARACTERS = 4000
_MAX_SKIPPED_SENTENCES = 1000
_SUFFIXES = {".txt", ".md"}


def make_line_haystack(lines: Callable[[], Iterator[str]]) -> Haystack:
    """Return a haystack of endless lines."""
    return Haystack(lines, lambda _, line: line + "\n")


def make_sentence_haystack(paragraphs: Callable[[], Iterator[str]], skipped: int = 0) -> Haystack:
    """Return a haystack of the sentences of endless paragraphs, from which the first `skipped` are left out.

    The white space after a sentence belongs to it; one without any gets a space.
    """

    def iter_sentences() -> Iterator[str]:
        return itertools.islice(itertools.chain.from_iterable(map(split_sentences, paragraphs())), skipped, None)

    def format_sentence(_: int, text: str) -> str:
        return text if text.endswith((" ", "\n", "。", "！", "？", "」", "』")) else text + " "

    return Haystack(iter_sentences, format_sentence)


def make_noise_haystack() -> Haystack:
    """Return a haystack of the noise sentences, one per line."""
    return make_line_haystack(lambda: itertools.cycle(NOISE))


def make_prose_haystack(path: Path | None, rng: random.Random) -> Haystack:
    """Return prose from a file or folder, or from Python's documentation, from one of the first thousand sentences on.

    Python's documentation depends on its version, so samples are equal only with equal versions.

    Raises:
        EvaluationError: there is no text at `path`.
    """
    skipped = rng.randrange(_MAX_SKIPPED_SENTENCES)
    if path is None:
        return make_sentence_haystack(iter_python_prose, skipped)
    files = _list_text_files(path)
    if next(_iter_paragraphs(files), None) is None:
        raise EvaluationError(
            f"the haystack {path} holds no text", hint="Give a file of prose, or a folder with .txt or .md files."
        )
    return make_sentence_haystack(
        lambda: itertools.chain.from_iterable(_iter_paragraphs(files) for _ in itertools.repeat(None)), skipped
    )


def split_sentences(paragraph: str) -> Iterator[str]:
    """Yield the sentences of a paragraph, each with the white space after it; the last one ends with an empty line.

    A sentence of more than 600 characters is split at spaces.
    """
    start = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(paragraph)), len(paragraph)]:
        while end - start > _MAX_SENTENCE_CHARACTERS:
            space = paragraph.rfind(" ", start, start + _MAX_SENTENCE_CHARACTERS)
            cut = space + 1 if space > start else start + _MAX_SENTENCE_CHARACTERS
            yield paragraph[start:cut]
            start = cut
        if paragraph[start:end].strip():
            yield paragraph[start:end] + ("\n\n" if end == len(paragraph) else "")
        start = end


def iter_reference_paragraphs() -> Iterator[str]:
    """Yield the paragraphs of the language reference that `help()` shows (about 0.5 MB), always in the same order."""
    for name in sorted(pydoc_data.topics.topics):
        yield from _split_paragraphs(pydoc_data.topics.topics[name])


@lru_cache(maxsize=1)
def load_docstring_paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of the standard library's docstrings, always in the same order.

    They have about a megabyte and are cached, because parsing the library takes seconds.
    """
    return tuple(paragraph for docstring in iter_docstrings() for paragraph in _split_paragraphs(docstring))


def iter_docstrings() -> Iterator[str]:
    """Yield the standard library's docstrings unchanged, with line breaks and indentation."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def iter_python_prose() -> Iterator[str]:
    """Yield the reference's paragraphs, then the docstrings', and start again, without end."""
    while True:
        yield from iter_reference_paragraphs()
        yield from load_docstring_paragraphs()


def _split_paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        collapsed = " ".join(paragraph.split())
        if len(collapsed) > 80 and collapsed.count(" ") > 10:
            yield collapsed


def _list_text_files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file()))
    if path.is_file():
        return (path,)
    raise EvaluationError(
        f"there is no haystack {path}", hint="Give a file of prose, or a folder with .txt or .md files."
    )


def _iter_paragraphs(files: tuple[Path, ...]) -> Iterator[str]:
    """Yield the paragraphs of files, which empty lines separate, with collapsed white space."""
    for path in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                yield from _join_lines(iter(partial(file.readline, _MAX_PARAGRAPH_CHARACTERS), ""))
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(
                f"the haystack {path} cannot be read: {error}", hint="Haystacks are UTF-8 text; convert it first."
            ) from error


def _join_lines(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    characters = 0
    for line in itertools.chain(lines, [""]):
        text = " ".join(line.split())
        if paragraph and (not text or characters + len(text) > _MAX_PARAGRAPH_CHARACTERS):
            yield " ".join(paragraph)
            paragraph, characters = [], 0
        if text:
            paragraph.append(text)
            characters += len(text) + 1
