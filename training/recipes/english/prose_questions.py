"""Reads questions on real prose: each with its answer, and the sentence of its section that has the answer.

A row identifies its section by source and characters, and the sentence by its position in the section's text with
single spaces, so that the files have no text except questions and answers. The sentence is null if the section seems to
answer the question but does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes.english.sections import ProseSection

ROWS: Final = Path(__file__).with_name("questions.jsonl")
"""Questions on sections of the training sources, most of them in other words than the sections."""
HELD_OUT_ROWS: Final = Path(__file__).with_name("held_out_questions.jsonl")


@dataclass(frozen=True, slots=True)
class ProseQuestion:
    """A question on a section, with its answer and the sentence that holds it."""

    source: str
    start: int
    end: int
    """The end of the section, in characters of the source's text."""
    kind: str
    question: str
    answer: str
    sentence: str
    """Empty if the section does not answer."""

    @property
    def is_answered(self) -> bool:
        """Whether the section answers the question."""
        return bool(self.sentence)


def read_rows(path: Path, sections: Iterable[ProseSection]) -> list[ProseQuestion]:
    """Return the questions of a file that are on these sections, with their sentences."""
    texts = {(section.source, section.start, section.end): _normalise_spaces(section.text) for section in sections}
    return [
        ProseQuestion(**row | {"sentence": _choose_sentence(texts[section_key], row)})
        for row in load_rows(path)
        if (section_key := (row["source"], row["start"], row["end"])) in texts
    ]


def _choose_sentence(text: str, row: dict[str, Any]) -> str:
    """Return the sentence of a row, which begins and ends with whole words.

    Raises:
        ValueError: there is no sentence at the row's position in this text.
    """
    if row["sentence"] is None:
        return ""
    start, end = row["sentence"]
    if not (0 <= start < end <= len(text)) or text[start - 1 : start].strip() or text[end : end + 1].strip():
        raise ValueError(f"the sentence of {row['question']!r} is not at {start} to {end} of its section")
    return text[start:end]


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, as in its JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _normalise_spaces(text: str) -> str:
    return " ".join(text.split())
