"""Makes the row of one attempt at a question: its scores, its costs, and the chunks where facts were lost."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass, replace

from memagent_evaluation.failures import find_losses, read_logged_run
from memagent_evaluation.result_table import QuestionKey, QuestionOutcome, ResultRow
from memagent_evaluation.samples import Needle, Sample
from memagent_evaluation.score_statistics import check_scores
from memagent_evaluation.scorers import contains, score
from memagent_evaluation.systems import Attempt
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import MemAgentError, RunError
from memagent_graph.prompts import AnswerFormat
from memagent_graph.run_log import RunLog


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question for one system."""

    key: QuestionKey
    """The key of its row."""
    sample: Sample
    document: DocumentRef
    """The sample's document in the store."""


def make_run_id(evaluation_id: str, system: str, sample_id: str, repeat: int = 0) -> str:
    """Return the id of a question's run: always the same in one evaluation, and different in others."""
    name = f"{evaluation_id}-{system}-{sample_id}" + (f"-repeat-{repeat}" if repeat else "")
    return re.sub(r"[^\w.-]+", "-", name)


def make_row(
    question: PendingQuestion,
    attempt: Attempt,
    *,
    attempts: int,
    seed: int,
    answer_format: AnswerFormat,
    scripted: bool = False,
    error: Exception | None = None,
) -> ResultRow:
    """Return the row of an attempt, without the lost facts from the run log (`add_losses`).

    Args:
        question: the question.
        attempt: the attempt's outcome.
        attempts: the number of attempts at the question so far.
        seed: the task's seed.
        answer_format: the form in which the prompts ask for the answer.
        scripted: whether a script answered.
        error: the error, if it failed.
    """
    sample, usage, is_answered = question.sample, attempt.usage, attempt.outcome is QuestionOutcome.ANSWERED
    answer = attempt.answer or ""
    error_text = str(error) if isinstance(error, MemAgentError) else f"{type(error).__name__}: {error}"
    scores = score(sample, attempt.answer, attempt.raw_answer, outcome=attempt.outcome, answer_format=answer_format)
    check_scores([*asdict(scores).values()])
    return ResultRow(
        system=question.key.system,
        task=sample.task.name,
        length=sample.length,
        reached_length=sample.reached_length,
        unit=sample.task.unit.value,
        index=sample.index,
        repeat=question.key.repeat,
        sample_id=sample.id,
        question=sample.question,
        gold=sample.gold,
        answer=attempt.answer,
        raw_answer=attempt.raw_answer,
        outcome=attempt.outcome,
        error=None if error is None else error_text,
        detail=attempt.detail,
        **asdict(scores),
        run_id=attempt.run_id,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        calls=usage.turns,
        seconds=usage.seconds,
        flops=usage.flops,
        full_context_flops=usage.full_context_flops,
        chunks=attempt.chunks,
        document_bytes=question.document["size"] or 0,
        needle_depths=tuple(needle.depth for needle in sample.needles),
        needles_found=tuple(is_answered and _is_found(needle, sample, answer) for needle in sample.needles),
        where_lost=(),
        lost_at=(),
        attempts=attempts,
        seed=seed,
        document=question.document["key"],
        scripted=scripted,
        turns=attempt.trace.critical_path_length or None,
    )


async def add_losses(row: ResultRow, sample: Sample, log: RunLog | None, store: DocumentStore) -> ResultRow:
    """Return the row; if its answer is wrong, with the chunks where facts were lost, from the run log.

    If the run is not in the log, because it failed before the log had it or could not be logged, the row has no run id.
    """
    run_id = row.run_id
    if log is None or run_id is None:
        return replace(row, run_id=None)
    try:
        if row.lenient == 1.0:
            await asyncio.to_thread(log.get, run_id)
            return row
        view, completions = await asyncio.to_thread(read_logged_run, log, run_id, store)
    except RunError:
        return replace(row, run_id=None)
    losses = await asyncio.to_thread(find_losses, sample, view, completions)
    return replace(
        row,
        where_lost=tuple(loss.loss.value for loss in losses),
        lost_at=tuple(loss.chunk_index for loss in losses),
    )


def _is_found(needle: Needle, sample: Sample, answer: str) -> bool:
    """Return whether an answer contains a needle's gold string, or any gold string if the needle only leads to the
    answer.
    """
    return any(contains(answer, gold) for gold in ((needle.gold,) if needle.gold in sample.gold else sample.gold))
