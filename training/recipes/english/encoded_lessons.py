"""The conversations of a training run as one file of token ids, so that the run itself needs torch alone.

    python -m recipes.english.encoded_lessons --base FOLDER --readings 24000 --seed 0 --out lessons.npz

A reading's conversations form trees: the tokens with which they begin are stored, and later computed, only once.
Reading number i depends on the seed and on i alone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy

from memagent_evaluation.english_facts import AdditionalFacts
from recipes.english.encoded_trees import CATEGORIES, EncodedTrees
from recipes.english.exclusion import Exclusion
from recipes.english.lessons import Lesson, LessonMaker
from recipes.english.prose_questions import HELD_OUT_ROWS, ROWS, read_rows
from recipes.english.sections import load_sections

RELATIONS: Final = Path(__file__).with_name("training_facts.toml")
END: Final = "<|im_end|>"
_AT_ONCE: Final = 50


def make_lessons(*, held_out: bool, change_weight: int = 24) -> LessonMaker:
    """Return the maker of a split's readings; all prose and questions are checked against the exclusion file."""
    exclusion = Exclusion.load()
    sections = load_sections(exclusion, held_out=held_out)
    questions = read_rows(HELD_OUT_ROWS if held_out else ROWS, sections)
    exclusion.require_clear(text for row in questions for text in (row.question, row.sentence))
    additional = None if held_out else AdditionalFacts.read(RELATIONS)
    return LessonMaker(sections, questions, held_out=held_out, additional=additional, change_weight=change_weight)


def encode(tokenizer: Any, readings: Sequence[Sequence[Lesson]]) -> EncodedTrees:
    """Return the conversations of some readings; those of a reading that have the same role form a tree."""
    ids: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    number, by_role = 0, attrgetter("role")
    for reading in readings:
        for _, lessons in groupby(sorted(reading, key=by_role), key=by_role):
            rows = [(lesson, *_encode_lesson(tokenizer, lesson)) for lesson in lessons]
            prompts = [prompt for _, prompt, _ in rows]
            alike = sum(1 for _ in takewhile(lambda at: len(set(at)) == 1, zip(*prompts, strict=False)))
            shared = min(alike, *(len(prompt) - 1 for prompt in prompts))
            ids += rows[0][1][:shared]
            segments.append((number, shared, 0, 0))
            for lesson, prompt, reply in rows:
                ids += prompt[shared:] + reply
                category = CATEGORIES.index(f"{lesson.role} {'writes' if lesson.writes else 'keeps'}")
                segments.append((number, len(prompt) - shared, len(reply), category))
            number += 1
    return EncodedTrees(numpy.array(ids, numpy.uint32), numpy.array(segments, numpy.int32))


def _encode_lesson(tokenizer: Any, lesson: Lesson) -> tuple[list[int], list[int]]:
    prompt, reply = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (lesson.text, lesson.reply + END)
    )
    return prompt, reply


@cache
def _load_tools(base: Path, held_out: bool, change_weight: int) -> tuple[LessonMaker, Any]:
    from transformers import AutoTokenizer  # noqa: PLC0415  slow to import

    return make_lessons(held_out=held_out, change_weight=change_weight), AutoTokenizer.from_pretrained(base)


def _encode_some(base: Path, held_out: bool, change_weight: int, seed: int, numbers: range) -> EncodedTrees:
    maker, tokenizer = _load_tools(base, held_out, change_weight)
    return encode(tokenizer, [maker.reading(random.Random(f"{seed}/{number}")) for number in numbers])


def join_trees(parts: Iterator[EncodedTrees]) -> EncodedTrees:
    """Return the trees of several parts, renumbered, as one object."""
    all_parts = list(parts)
    first = 0
    for part in all_parts:
        part.segments_S4[:, 0] += first
        first = int(part.segments_S4[-1, 0]) + 1
    return EncodedTrees(
        numpy.concatenate([part.ids_N for part in all_parts]),
        numpy.concatenate([part.segments_S4 for part in all_parts]),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--base", type=Path, required=True, help="folder of the base in transformers' format, with its tokenizer"
    )
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--readings", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", action="store_true", help="use the prose, people and wordings that are kept for the check"
    )
    parser.add_argument(
        "--change-weight", type=int, default=24, help="weight of values that change; other planted facts have 94"
    )
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    numbers = [
        range(start, min(start + _AT_ONCE, arguments.readings)) for start in range(0, arguments.readings, _AT_ONCE)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        work = partial(_encode_some, arguments.base, arguments.held_out, arguments.change_weight, arguments.seed)
        trees = join_trees(iter(pool.map(work, numbers)))
    trees.save(arguments.out)
    print(f"{len(trees.ids_N):,} tokens, {(trees.segments_S4[:, 2] > 0).sum():,} conversations in {arguments.out}")


if __name__ == "__main__":
    main()
