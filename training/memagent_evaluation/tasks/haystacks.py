"""The text that needles are hidden in: noise, other needles, prose. All of them are endless streams.

Prose is a user's, or what comes with Python: the language reference that `help()` shows, and the library's docstrings.
"""

from __future__ import annotations

import ast
import functools
import itertools
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_MAX_SENTENCE = 600
_MAX_PARAGRAPH = 4000
_FIRST_SENTENCES = 1000
_SUFFIXES = {".txt", ".md"}


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a stream."""

    lines: Callable[[], Iterator[str]]

    def units(self) -> Iterator[str]:
        """Return the lines."""
        return self.lines()

    def piece(self, position: int, text: str) -> str:
        """Return a line with its end."""
        return text + "\n"


@dataclass(frozen=True, slots=True)
class ProseHaystack:
    """Sentences of paragraphs; the white space between them is part of the sentences."""

    paragraphs: Callable[[], Iterator[str]]
    """Without end."""
    skipped: int = 0
    """The index of the first sentence."""

    def units(self) -> Iterator[str]:
        """Return the sentences."""
        sentences = itertools.chain.from_iterable(map(split_sentences, self.paragraphs()))
        return itertools.islice(sentences, self.skipped, None)

    def piece(self, position: int, text: str) -> str:
        """Return a sentence, separated from the next one."""
        return text if text.endswith((" ", "\n", "。", "！", "？", "」", "』")) else text + " "


def noise() -> Lines:
    """Return the noise sentences, one per line."""
    return Lines(lambda: itertools.cycle(NOISE))


def prose(path: Path | None, chance: random.Random) -> Haystack:
    """Return prose from a user's file or folder, or from Python's own texts, beginning at one of its first sentences.

    Python's texts depend on its version, so samples are equal only if the versions are.

    Raises:
        EvaluationError: there is no text at `path`.
    """
    skipped = chance.randrange(_FIRST_SENTENCES)
    if path is None:
        return ProseHaystack(python_prose, skipped)
    files = _text_files(path)
    if next(_paragraphs(files), None) is None:
        raise EvaluationError(
            f"the haystack {path} holds no text", hint="Name a file of prose, or a folder with .txt or .md files."
        )
    return ProseHaystack(
        lambda: itertools.chain.from_iterable(_paragraphs(files) for _ in itertools.repeat(None)), skipped
    )


def split_sentences(paragraph: str) -> Iterator[str]:
    """Yield a paragraph's sentences, each with the white space after it; the last one ends the paragraph.

    Text without a sentence end for hundreds of characters is split at spaces.
    """
    start = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(paragraph)), len(paragraph)]:
        while end - start > _MAX_SENTENCE:
            space = paragraph.rfind(" ", start, start + _MAX_SENTENCE)
            cut = space + 1 if space > start else start + _MAX_SENTENCE
            yield paragraph[start:cut]
            start = cut
        if paragraph[start:end].strip():
            yield paragraph[start:end] + ("\n\n" if end == len(paragraph) else "")
        start = end


def reference_topics() -> Iterator[str]:
    """Paragraphs of the language reference that `help()` shows, about 0.5 MB, always in the same order."""
    for name in sorted(pydoc_data.topics.topics):
        yield from _paragraphs_of(pydoc_data.topics.topics[name])


@functools.lru_cache(maxsize=1)
def library_docstrings() -> tuple[str, ...]:
    """Return the paragraphs of the docstrings in the standard library's source, always in the same order.

    They are about a megabyte, and kept: parsing the library takes seconds.
    """
    return tuple(paragraph for docstring in whole_docstrings() for paragraph in _paragraphs_of(docstring))


def whole_docstrings() -> Iterator[str]:
    """Yield these docstrings, with their line breaks and indentation."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def python_prose() -> Iterator[str]:
    """Paragraphs without end: the topics, the docstrings, and so on from the beginning."""
    while True:
        yield from reference_topics()
        yield from library_docstrings()


def _paragraphs_of(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if len(words) > 80 and words.count(" ") > 10:
            yield words


def _text_files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file()))
    if path.is_file():
        return (path,)
    raise EvaluationError(
        f"there is no haystack {path}", hint="Name a file of prose, or a folder with .txt or .md files."
    )


def _paragraphs(files: tuple[Path, ...]) -> Iterator[str]:
    """Paragraphs of files, read one line at a time: separated by empty lines, with single spaces."""
    for path in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                yield from _join_lines(_bounded_lines(file.readline))
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(
                f"the haystack {path} cannot be read: {error}", hint="Haystacks are UTF-8 text; convert it first."
            ) from error


def _bounded_lines(readline: Callable[[int], str]) -> Iterator[str]:
    return iter(lambda: readline(_MAX_PARAGRAPH), "")


def _join_lines(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    characters = 0
    for line in itertools.chain(lines, [""]):
        words = " ".join(line.split())
        if paragraph and (not words or characters + len(words) > _MAX_PARAGRAPH):
            yield " ".join(paragraph)
            paragraph, characters = [], 0
        if words:
            paragraph.append(words)
            characters += len(words) + 1
