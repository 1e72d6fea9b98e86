"""Several samples of each answer: how good one is on average, and how often one of k is right (pass@k).

Intervals are over questions, clustered by document: the samples of one question are not independent trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

from memagent_evaluation.comparisons import accuracy
from memagent_evaluation.markdown_tables import SCORES, grouped, interval, labelled, markdown
from memagent_evaluation.result_table import Outcome, Row
from memagent_evaluation.statistics import Estimate, estimate
from memagent_graph.errors import EvaluationError

REPEATS_LEGEND: Final = (
    "Several samples of each answer. Mean: of one of them. pass@k: the chance that at least one of k is right, without "
    "bias from all samples of a question (1 - C(wrong, k) / C(all, k)). Intervals are over questions."
)
_SCORES: Final = ("strict", "lenient")


@dataclass(frozen=True, slots=True)
class Repeated:
    """One system's samples at one task and length, by one score of 0 or 1."""

    system: str
    task: str
    length: str
    """With its unit."""
    score: str
    questions: int
    samples: int
    """The number of samples of each question; if a question has more, all count."""
    mean: Estimate
    pass_at: dict[int, Estimate]
    """By k: 1, 2, 4 and so on, and the number of samples."""


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples is right, given how many of all samples are right.

    Raises:
        EvaluationError: k is not 1 to the number of samples, or more are right than there are.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise EvaluationError(
            f"there is no pass@{k} of {right} right samples of {samples}", hint="Give a k from 1 to the samples."
        )
    return 1 - comb(samples - right, k) / comb(samples, k)


def repeated(rows: Sequence[Row]) -> list[Repeated]:
    """The statistics of each system, task and length whose questions all have several samples."""
    found = []
    for (system, task, length), group in grouped(rows, lambda row: (row.system, row.task, labelled(row))):
        questions = [same for _, same in grouped(group, lambda row: row.sample_id)]
        samples = min(map(len, questions))
        if samples < 2 or all(row.outcome is Outcome.DOES_NOT_FIT for row in group):
            continue
        clusters = [same[0].cluster for same in questions]
        for score in _SCORES:
            right = [(sum(getattr(row, score) == 1 for row in same), len(same)) for same in questions]
            pass_at = {
                k: estimate([pass_at_k(number, all_, k) for number, all_ in right], clusters=clusters)
                for k in _shown(samples)
            }
            mean = accuracy(group, score)
            found.append(Repeated(system, task, length, score, len(questions), samples, mean, pass_at))
    return found


def repeated_table(found: Sequence[Repeated]) -> str:
    """In Markdown."""
    columns = sorted({k for each in found for k in each.pass_at} - {1})
    table = [["task", "length", "system", "score", "questions", "samples", "mean", *(f"pass@{k}" for k in columns)]]
    for each in found:
        cells = [interval(each.pass_at[k]) if k in each.pass_at else "" for k in columns]
        table.append(
            [each.task, each.length, each.system, SCORES[each.score],
             f"{each.questions}", f"{each.samples}", interval(each.mean), *cells]
        )  # fmt: skip
    return markdown(table)


def _shown(samples: int) -> list[int]:
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return sorted({*powers, samples})
