"""Writes the conversations of a training run as one file of token ids, so that the run itself needs only torch.

    python -m recipes.english.encoded_lessons --base FOLDER --readings 24000 --seed 0 --out lessons.npz

A reading's conversations form trees: tokens with which several of them begin are stored, and later computed, only once.
The reading with index i depends only on the seed and on i.
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
from recipes.english.prose_questions import HELD_OUT_QUESTIONS_PATH, QUESTIONS_PATH, load_questions
from recipes.english.sections import load_sections

TRAINING_FACTS: Final = Path(__file__).with_name("training_facts.toml")
END: Final = "<|im_end|>"
_READINGS_PER_TASK: Final = 50


def make_lesson_maker(*, held_out: bool, change_weight: int = 24) -> LessonMaker:
    """Return the maker of a split's readings, after a check of all prose and questions against the exclusion file."""
    exclusion = Exclusion.load()
    sections = load_sections(exclusion, held_out=held_out)
    questions = load_questions(HELD_OUT_QUESTIONS_PATH if held_out else QUESTIONS_PATH, sections)
    exclusion.require_clear(text for row in questions for text in (row.question, row.sentence))
    additional = None if held_out else AdditionalFacts.read(TRAINING_FACTS)
    return LessonMaker(sections, questions, held_out=held_out, additional=additional, change_weight=change_weight)


def encode(tokenizer: Any, readings: Sequence[Sequence[Lesson]]) -> EncodedTrees:
    """Return the conversations of some readings as token ids; a reading's conversations of one role form a tree."""
    token_ids: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    tree_index, by_role = 0, attrgetter("role")
    for reading in readings:
        for _, lessons in groupby(sorted(reading, key=by_role), key=by_role):
            rows = [(lesson, *_encode_lesson(tokenizer, lesson)) for lesson in lessons]
            prompts = [prompt for _, prompt, _ in rows]
            common_length = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
            shared_length = min(common_length, *(len(prompt) - 1 for prompt in prompts))
            token_ids += rows[0][1][:shared_length]
            segments.append((tree_index, shared_length, 0, 0))
            for lesson, prompt, reply in rows:
                token_ids += prompt[shared_length:] + reply
                category = CATEGORIES.index(f"{lesson.role} {'writes' if lesson.adds_content else 'keeps'}")
                segments.append((tree_index, len(prompt) - shared_length, len(reply), category))
            tree_index += 1
    return EncodedTrees(numpy.array(token_ids, numpy.uint32), numpy.array(segments, numpy.int32))


def _encode_lesson(tokenizer: Any, lesson: Lesson) -> tuple[list[int], list[int]]:
    prompt, reply = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (lesson.text, lesson.reply + END)
    )
    return prompt, reply


@cache
def _load_tools(base: Path, held_out: bool, change_weight: int) -> tuple[LessonMaker, Any]:
    from transformers import AutoTokenizer  # noqa: PLC0415  slow to import

    return make_lesson_maker(held_out=held_out, change_weight=change_weight), AutoTokenizer.from_pretrained(base)


def _encode_readings(base: Path, held_out: bool, change_weight: int, seed: int, indices: range) -> EncodedTrees:
    maker, tokenizer = _load_tools(base, held_out, change_weight)
    return encode(tokenizer, [maker.make_reading(random.Random(f"{seed}/{index}")) for index in indices])


def join_trees(encoded_parts: Iterator[EncodedTrees]) -> EncodedTrees:
    """Return several objects' trees as one object, with new tree indices."""
    all_parts = list(encoded_parts)
    first_tree = 0
    for trees in all_parts:
        trees.segments_S4[:, 0] += first_tree
        first_tree = int(trees.segments_S4[-1, 0]) + 1
    return EncodedTrees(
        numpy.concatenate([trees.ids_N for trees in all_parts]),
        numpy.concatenate([trees.segments_S4 for trees in all_parts]),
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
    index_ranges = [
        range(start, min(start + _READINGS_PER_TASK, arguments.readings))
        for start in range(0, arguments.readings, _READINGS_PER_TASK)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        encode_range = partial(
            _encode_readings, arguments.base, arguments.held_out, arguments.change_weight, arguments.seed
        )
        trees = join_trees(iter(pool.map(encode_range, index_ranges)))
    trees.save(arguments.out)
    print(f"{len(trees.ids_N):,} tokens, {(trees.segments_S4[:, 2] > 0).sum():,} conversations in {arguments.out}")


if __name__ == "__main__":
    main()
