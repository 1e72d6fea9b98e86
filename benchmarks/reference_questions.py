"""Questions about sentences of Python's language reference, made by rule: how many a policy answers from the sentence.

    python -m benchmarks.reference_questions --model smollm2

The rules are those of the training's questions about real prose; these texts were not in its corpus. An answer is right
if at least four of five of its words are the sentence's. Each text is read once for all of its questions.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.natural_questions import settings_of_command_line
from memagent_graph.documents import Document
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.reader import MemAgent
from recipes.language.real_questions import RealQuestion, paraphrased, real_questions

SHORTEST = 3000
"""Characters of a text."""
PER_TEXT = 24
OWN_WORDS = 0.8


def texts(rng: random.Random) -> Iterator[tuple[str, list[RealQuestion]]]:
    """Texts with questions, at most one about a sentence."""
    topics = pydoc_data.topics.topics
    names = sorted(name for name, text in topics.items() if len(text) > SHORTEST)
    rng.shuffle(names)
    for name in names:
        questions = real_questions(topics[name])
        rng.shuffle(questions)
        by_sentence: dict[str, RealQuestion] = {}
        for question in questions:
            by_sentence.setdefault(question.statement, question)
        if by_sentence:
            yield topics[name], list(by_sentence.values())[:PER_TEXT]


def is_right(answer: str, statement: str) -> bool:
    """Whether an answer is said in the sentence's words."""
    said, own = (set(re.findall(r"\w+", text.lower())) for text in (answer, statement))
    return bool(said) and len(said & own) >= OWN_WORDS * len(said)


def main() -> None:
    settings = settings_of_command_line(__doc__)
    rng = random.Random(5)
    total = correct = without = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        MemAgent(settings=settings, store=Path(folder), run_log=False) as reader,
    ):
        for text, made in list(texts(rng)):
            asked = [paraphrased(rng, each.question) for each in made]
            for each, result in zip(made, reader.read(Document.from_text(text), questions=asked), strict=True):
                none = gives_no_answer(result.answer)
                total, without = total + 1, without + none
                correct += not none and is_right(result.answer or "", each.statement)
    print(f"{correct} of {total} right; {without} without an answer")


if __name__ == "__main__":
    main()
