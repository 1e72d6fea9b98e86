"""Real English prose that comes with Python: the language reference, and the library's docstrings."""

from __future__ import annotations

import ast
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def reference_topics() -> Iterator[str]:
    """Paragraphs of the language reference that `help()` shows, about 0.5 MB, always in the same order."""
    for name in sorted(pydoc_data.topics.topics):
        yield from _paragraphs(pydoc_data.topics.topics[name])


def library_docstrings() -> Iterator[str]:
    """Paragraphs of the docstrings in the standard library's source, several MB, always in the same order."""
    for docstring in whole_docstrings():
        yield from _paragraphs(docstring)


def whole_docstrings() -> Iterator[str]:
    """These docstrings, with their line breaks and indentation."""
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


def prose() -> Iterator[str]:
    """Paragraphs without end: the topics, the docstrings, and so on from the beginning."""
    while True:
        yield from reference_topics()
        yield from library_docstrings()


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if len(words) > 80 and words.count(" ") > 10:
            yield words
