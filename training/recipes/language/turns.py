"""One prompt of a role and the reply to learn, and questions in several phrasings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from memagent_graph.prompts import Prompts

NOT_STATED: Final = "not stated"
"""The answer if nothing in the text answers."""
NOTHING: Final = "(nothing)"
"""The text that the strategy `recall` shows if nothing was looked up."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LessonTurn:
    """One prompt of a role, filled in, and the reply to learn."""

    role: str
    question: str
    fields: dict[str, str]
    reply: str
    writes: bool = False
    """Whether the reply adds the section's content to memory, or answers from memory."""

    def content(self, prompts: Prompts) -> str:
        """Return the prompt's text."""
        return prompts.messages(self.role, self.question, **self.fields)[0]["content"]


_FRAMES: Final = {
    "{q}": 62,
    "According to the text, {l}": 5,
    "In this document, {l}": 4,
    "{n}": 4,
    "Tell me: {l}": 4,
    "{lower}": 3,
    "Question: {q}": 3,
    "I would like to know: {l}": 3,
    "{q} Answer briefly.": 3,
    "Please answer: {q}": 3,
    "Can you find out {n}?": 3,
}


def asked(rng: random.Random, question: str) -> str:
    """Return the question in one of several phrasings."""
    frame = rng.choices(list(_FRAMES), list(_FRAMES.values()))[0]
    plain = question.rstrip("?.")
    begins = question[:1].lower() + question[1:]
    return frame.format(
        q=question, l=begins, n=plain if frame == "{n}" else plain[:1].lower() + plain[1:], lower=begins.lower()
    )


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Return the items in another order."""
    return rng.sample(list(items), len(items))
