"""Ten documents that are on any machine with Python, and a policy that reads them and writes as it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from support.scripts import extract, read_perfectly

TOPICS = ("truth", "numbers", "assert", "with", "exprlists", "lambda", "while", "typesmapping", "import", "yield")


def write_topics(folder: Path) -> list[Path]:
    """Ten topics of Python's language reference, as files in a folder."""
    folder.mkdir()
    paths = [folder / f"{topic}.txt" for topic in TOPICS]
    for path in paths:
        path.write_text(topics[path.stem], encoding="utf-8")
    return paths


def split_sentences(text: str) -> list[str]:
    """Return the sentences that end with a full stop, each in one line."""
    return [" ".join(part.split()) for part in re.split(r"(?<=[.])\s+(?=[A-Z])|\n\n+", text) if part.strip()]


def write_report(prompt: str) -> str:
    """A policy for reports: it notes the first sentence with a word of the question, and answers with it.

    It copies a quote into each section, adds a sentence that nothing supports, and sees contradictions everywhere.
    """
    end = prompt.rstrip()
    if end.endswith("Questions:"):
        return "1. What is said about if?\n2. What is said about not?"
    if end.endswith("Headings:"):
        return "On conditions [1]\nOn exceptions [2]"
    if end.endswith("CONTRADICT or COMPATIBLE:"):
        return "CONTRADICT"
    if end.endswith("Sentences:"):
        return _section(extract(prompt, "quotes"))
    memory = extract(prompt, "memory").replace("(empty)", "").replace("nothing yet", "").strip()
    if "<section>" not in prompt:
        return f"\\boxed{{{memory or 'unknown'}}}"
    if memory:
        return memory
    word = _find_key(extract(prompt, "problem"))
    sentences = split_sentences(extract(prompt, "section"))[1:-1]  # the first and the last may be cut
    return next(
        (sentence for sentence in sentences if f" {word} " in sentence.lower() and len(sentence) < 300), "nothing yet"
    )


def read_keys(prompt: str) -> str:
    """A perfect reader of keys, which says so where there is none."""
    return read_perfectly(prompt).replace("\\boxed{yet}", "\\boxed{unknown}")


def read_keys_and_write_report(prompt: str) -> str:
    """Both: reads keys, and writes the report."""
    return write_report(prompt) if "<quotes>" in prompt or "<answers>" in prompt else read_keys(prompt)


def _find_key(question: str) -> str:
    return question.rstrip("?").split()[-1].lower()


def _section(quotes: str) -> str:
    lines = [f"{text} [q{number}]" for number, text in re.findall(r'\[q(\d+)\] .*?: "(.*)"', quotes)]
    return "\n".join([*lines[:3], "In 1812 all of this was decided by Goethe in Weimar. [q1]"])


def list_sections(prompts: Sequence[str]) -> list[tuple[str, str]]:
    """The question and the section of each memory update, in order."""
    return [(extract(prompt, "problem"), extract(prompt, "section")) for prompt in prompts if "<section>" in prompt]
