"""A task that `read_perfectly` solves, and rows of results made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memagent_evaluation.result_table import EvaluationPlan, QuestionOutcome, ResultRow, Results, make_results
from memagent_evaluation.samples import LengthUnit, Metric, Needle, Sample
from support.scripts import make_document

NAMES = ("harbor", "castle", "garden", "bridge", "tower", "valley")


class KeyTask:
    """Find one key in a document of `length` words."""

    name, metric, unit, answer_tokens = "keys", Metric.ALL, LengthUnit.TOKENS, 60

    def sample(self, length: int, index: int) -> Sample:
        rng = random.Random(f"{length}/{index}")
        name, key, depth = rng.choice(NAMES), str(rng.randrange(1000, 10_000)), rng.random()
        fact = f"The key of {name} is {key}."
        text = make_document({depth: fact}, words=length)
        needles = (Needle(fact, key, text.index(fact) / len(text)),)
        return Sample(
            self, length, index, f"What is the key of {name}?", (key,), lambda: iter([text[:99], text[99:]]), needles
        )


@dataclass(frozen=True)
class MadeTask:
    """A task whose samples come from `make(length, index)`, which returns question, answer and text."""

    name: str
    make: Callable[[int, int], tuple[str, str, str]]
    answer_tokens: int = 8
    metric, unit = Metric.ALL, LengthUnit.TOKENS

    def sample(self, length: int, index: int) -> Sample:
        question, answer, text = self.make(length, index)
        return Sample(self, length, index, question, (answer,), lambda: iter([text]))


def make_row(system: str = "memagent", length: int = 1024, index: int = 0, **changes: Any) -> ResultRow:
    """Return a row with a correct answer, or a wrong one with `right=False`."""
    is_right = changes.pop("right", True)
    task = changes.get("task", "keys")
    values: dict[str, Any] = {
        "system": system, "task": task, "length": length, "unit": "tokens", "index": index,
        "sample_id": f"{task}/{length}/{index}", "question": f"What is it in {length}?", "gold": ("4711",),
        "answer": "4711" if is_right else "12", "raw_answer": None, "outcome": QuestionOutcome.ANSWERED, "error": None,
        "detail": "", "strict": float(is_right), "lenient": float(is_right), "string_match": float(is_right),
        "token_f1": float(is_right),
        "run_id": None, "prompt_tokens": length, "completion_tokens": 10, "cached_tokens": 0, "calls": 2,
        "seconds": 0.5, "flops": 1e9 * length, "full_context_flops": 1e6 * length**2, "chunks": 1,
        "document_bytes": 4 * length, "needle_depths": (0.25,), "needles_found": (is_right,), "where_lost": (),
        "lost_at": (), "attempts": 1, "seed": 0, **changes,
    }  # fmt: skip
    return ResultRow(**values)


def make_failed_row(
    system: str = "memagent", length: int = 1024, index: int = 0, *, outcome: str = "failed"
) -> ResultRow:
    """Return a row without an answer."""
    error = "the server is on fire" if outcome == "failed" else None
    return make_row(system, length, index, right=False, answer=None, outcome=QuestionOutcome(outcome), error=error)


def make_table(*rows: ResultRow) -> Results:
    """Return a finished table of these rows."""
    plans = [EvaluationPlan.grid((row.system,), (row.task,), (row.length,), 0) for row in rows]
    return make_results(rows, plans, {"policy": {"model": "m"}}, "e", ["memagent eval keys"])
