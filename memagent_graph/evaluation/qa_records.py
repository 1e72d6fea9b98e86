"""What question-answering data looks like once it is loaded, whichever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A titled piece of an article."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class QARecord:
    """A question, and the paragraphs that answer it among some that do not."""

    id: str
    """Its name in the data set, unique there."""
    question: str
    answers: tuple[str, ...]
    """Wordings of the one answer."""
    gold: tuple[Paragraph, ...]
    """Together they answer the question."""
    distractors: tuple[Paragraph, ...] = ()
    """They belong to the question and do not answer it; none where the data set has none."""
