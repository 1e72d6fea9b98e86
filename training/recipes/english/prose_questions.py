"""Questions on real prose: each with its answer, and the sentence of its section that has the answer.

A row identifies its section by source and characters, and the sentence by its position in the section's text with
single spaces, so that the files have no text except questions and answers. The sentence is null if the section seems to
answer the question but does not.

    python -m recipes.english.prose_questions --out train.jsonl                # for the closed loop
    python -m recipes.english.prose_questions --out held_out.jsonl --held-out

writes questions with documents of 4 to 16 chunks. A document consists of consecutive sections of one source, among them
the question's section, so that an answer is surrounded by its author's own text. One question in ten is from another
source, so that the document has no answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes.english.exclusion import Exclusion
from recipes.english.sections import CHARACTERS_PER_TOKEN, MAX_SECTION_TOKENS, ProseSection, load_sections

QUESTIONS_PATH: Final = Path(__file__).with_name("questions.jsonl")
"""Questions on sections of the training sources, most of them in other words than the sections."""
HELD_OUT_QUESTIONS_PATH: Final = Path(__file__).with_name("held_out_questions.jsonl")
NOT_STATED: Final = "not stated"
"""The answer to a question that the text does not answer."""
CHUNK_COUNTS: Final = (4, 16)
"""The minimum and the maximum length of a document, in chunks."""
_UNANSWERED_FRACTION: Final = 0.1
"""The fraction of questions without an answer in the document."""
_SECTION_SEPARATOR: Final = "\n\n"


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


def load_questions(path: Path, sections: Iterable[ProseSection]) -> list[ProseQuestion]:
    """Return the questions of a file that are on these sections, with their sentences."""
    texts = {(section.source, section.start, section.end): " ".join(section.text.split()) for section in sections}
    return [
        ProseQuestion(**row | {"sentence": _extract_sentence(texts[section_key], row)})
        for row in load_rows(path)
        if (section_key := (row["source"], row["start"], row["end"])) in texts
    ]


def _extract_sentence(text: str, row: dict[str, Any]) -> str:
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


def make_loop_rows(
    sections: Sequence[ProseSection], questions: Sequence[ProseQuestion], rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Yield one row per answered question, in random order: question, document and answers."""
    sections_by_source: dict[str, list[ProseSection]] = defaultdict(list)
    for section in sorted(sections, key=lambda section: section.start):
        sections_by_source[section.source].append(section)
    answered_questions = [question for question in questions if question.is_answered]
    for question in rng.sample(answered_questions, len(answered_questions)):
        source_sections = sections_by_source[question.source]
        index = next(index for index, section in enumerate(source_sections) if section.start == question.start)
        chunk_count = rng.randint(*CHUNK_COUNTS)
        question_text, answer = question.question, question.answer
        if rng.random() < _UNANSWERED_FRACTION:
            question_text = rng.choice(
                [other.question for other in answered_questions if other.source != question.source]
            )
            answer = NOT_STATED
        document = _cut_document(
            source_sections, index, int(chunk_count * MAX_SECTION_TOKENS * CHARACTERS_PER_TOKEN), rng
        )
        yield {"question": question_text, "document": document, "answers": [answer]}


def _cut_document(sections: Sequence[ProseSection], index: int, max_characters: int, rng: random.Random) -> str:
    """Return consecutive sections that contain the one at `index`, with at most this many characters."""
    first, end, length = index, index + 1, len(sections[index].text)
    while True:
        neighbours = [
            position
            for position in (first - 1, end)
            if 0 <= position < len(sections)
            and length + len(_SECTION_SEPARATOR) + len(sections[position].text) <= max_characters
        ]
        if not neighbours:
            return _SECTION_SEPARATOR.join(section.text for section in sections[first:end])
        position = rng.choice(neighbours)
        first, end = min(first, position), max(end, position + 1)
        length += len(_SECTION_SEPARATOR) + len(sections[position].text)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held-out", action="store_true", help="questions on sources that are never trained on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="the greatest number of rows (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    options = parser.parse_args()
    sections = load_sections(Exclusion.load(), held_out=options.held_out)
    questions = load_questions(HELD_OUT_QUESTIONS_PATH if options.held_out else QUESTIONS_PATH, sections)
    rows = list(make_loop_rows(sections, questions, random.Random(options.seed)))[: options.count]
    options.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
