"""Ten documents that come with Python, and scripts for policies that read them and write reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from support.scripts import extract, read_perfectly

TOPICS = ("truth", "numbers", "assert", "with", "exprlists", "lambda", "while", "typesmapping", "import", "yield")


def write_topics(folder: Path) -> list[Path]:
    """Write ten topics of Python's language reference as files to a new folder, and return their paths."""
    folder.mkdir()
    paths = [folder / f"{topic}.txt" for topic in TOPICS]
    for path in paths:
        path.write_text(topics[path.stem], encoding="utf-8")
    return paths


def split_sentences(text: str) -> list[str]:
    """Split a text after full stops and at empty lines; each sentence becomes one line."""
    return [" ".join(piece.split()) for piece in re.split(r"(?<=[.])\s+(?=[A-Z])|\n\n+", text) if piece.strip()]


def write_report(prompt: str) -> str:
    """Reply for a report: keep the first sentence with the last word of the question, and answer with it.

    Each section of the report gets quotes and one unsupported sentence; all pairs of answers contradict each other.
    """
    end = prompt.rstrip()
    if end.endswith("Questions:"):
        return "1. What is said about if?\n2. What is said about not?"
    if end.endswith("Headings:"):
        return "On conditions [1]\nOn exceptions [2]"
    if end.endswith("CONTRADICT or COMPATIBLE:"):
        return "CONTRADICT"
    if end.endswith("Sentences:"):
        return _write_section(extract(prompt, "quotes"))
    memory = extract(prompt, "memory").replace("(empty)", "").replace("nothing yet", "").strip()
    if "<section>" not in prompt:
        return f"\\boxed{{{memory or 'unknown'}}}"
    if memory:
        return memory
    keyword = _find_keyword(extract(prompt, "problem"))
    sentences = split_sentences(extract(prompt, "section"))[1:-1]  # the first and the last may be cut
    return next(
        (sentence for sentence in sentences if f" {keyword} " in sentence.lower() and len(sentence) < 300),
        "nothing yet",
    )


def read_keys(prompt: str) -> str:
    """Read keys perfectly, and answer "unknown" where there is none."""
    return read_perfectly(prompt).replace("\\boxed{yet}", "\\boxed{unknown}")


def read_keys_and_write_report(prompt: str) -> str:
    """Read keys perfectly, and write the report."""
    return write_report(prompt) if "<quotes>" in prompt or "<answers>" in prompt else read_keys(prompt)


def _find_keyword(question: str) -> str:
    return question.rstrip("?").split()[-1].lower()


def _write_section(quotes: str) -> str:
    lines = [f"{text} [q{number}]" for number, text in re.findall(r'\[q(\d+)\] .*?: "(.*)"', quotes)]
    return "\n".join([*lines[:3], "In 1812 all of this was decided by Goethe in Weimar. [q1]"])


def list_sections(prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the question and the section of each memory update, in order."""
    return [(extract(prompt, "problem"), extract(prompt, "section")) for prompt in prompts if "<section>" in prompt]
