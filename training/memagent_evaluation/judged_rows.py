"""Grades an evaluation's answers with a language model, when all of them are there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from memagent_evaluation.grading import Grader
from memagent_evaluation.result_journal import Journal
from memagent_evaluation.result_table import Outcome, Row
from memagent_graph.errors import EvaluationError, MemAgentError, PolicyError


async def judge_rows(journal: Journal, grader: Grader, *, concurrency: int = 16) -> None:
    """Grade every row that this grader has not graded yet; a question without an answer gets 0 without a call.

    Raises:
        PolicyError: the judge cannot be reached; existing grades stay.
        EvaluationError: some replies had no grade; all others are stored, and these are requested again next time.
    """
    open_rows = iter([row for row in journal.rows.values() if row.judge != grader.policy.name])
    failed: list[MemAgentError] = []
    await asyncio.gather(*(_work(open_rows, journal, grader, failed) for _ in range(concurrency)))
    if gone := next((error for error in failed if isinstance(error, PolicyError)), None):
        raise gone
    if failed:
        count = "an answer" if len(failed) == 1 else f"{len(failed)} answers"
        raise EvaluationError(
            f"all is done but {count} without a grade: {failed[0].message}",
            hint=f"{failed[0].hint or ''} --resume asks for these again.".lstrip(),
        )


async def _work(rows: Iterator[Row], journal: Journal, grader: Grader, failed: list[MemAgentError]) -> None:
    for row in rows:
        if any(isinstance(error, PolicyError) for error in failed):
            return
        answer = row.answer if row.outcome is Outcome.ANSWERED else None
        try:
            grade = await grader.grade(row.question, answer or "", row.gold)
        except (PolicyError, EvaluationError) as error:
            failed.append(error)
        else:
            journal.add(replace(row, judged=grade, judge=grader.policy.name))
