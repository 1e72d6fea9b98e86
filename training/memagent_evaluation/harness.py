"""Runs an evaluation: every system on every question, many at once, with a row in the journal for each.

Every question gets a row: a failed attempt is repeated once, then counted as failed with the error's text. Only errors
that are not about the systems end the evaluation: a server that is down, a full disk, or, when everything else is done,
samples that cannot be made. An evaluation that ended early, by an error, a limit or a kill, can be resumed; reads then
continue at their chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from statistics import fmean
from typing import Any, Final

from langgraph.checkpoint.base import BaseCheckpointSaver

from memagent_evaluation.attempt_rows import PendingQuestion, add_losses, make_row, make_run_id
from memagent_evaluation.markdown_tables import format_length
from memagent_evaluation.result_journal import ResultJournal
from memagent_evaluation.result_table import EvaluationPlan, QuestionKey, QuestionOutcome, ResultRow
from memagent_evaluation.sample_documents import SampleDocuments, SampleError, make_sample_error
from memagent_evaluation.samples import Task
from memagent_evaluation.systems import Attempt, ReaderSystem
from memagent_graph.cli.console import ProgressDisplay, describe_progress
from memagent_graph.documents import DocumentStore
from memagent_graph.errors import (
    EvaluationError,
    MemAgentError,
    PolicyAuthenticationError,
    PolicyOverloadedError,
    PolicyUnreachableError,
)
from memagent_graph.prompts import AnswerFormat
from memagent_graph.results import Usage
from memagent_graph.run_log import RunLog

ATTEMPTS: Final = 2
"""Attempts at a question before it counts as failed. If the server may be down, as many more are made at the end."""
_SERVER_ERRORS: Final = (PolicyUnreachableError, PolicyAuthenticationError, PolicyOverloadedError)
_MAX_CONSECUTIVE_FAILURES: Final = 16
"""After so many failures without a success, the server counts as down."""


class EvaluationEnd(StrEnum):
    """The reason why an evaluation ended. It can be resumed after all but the first."""

    DONE = "done"
    """Every row is there."""
    MAX_QUESTIONS = "max_questions"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"


class EvaluationProgress:
    """Shows an evaluation while it runs."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._scores: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._total_rows = self._done_rows = self._failed_rows = self._tokens = 0
        self._length_left = self._length_done = 0

    def on_begin(self, plan: EvaluationPlan, rows: Mapping[QuestionKey, ResultRow]) -> None:
        """Count the rows that exist, and the lengths of the documents that are left."""
        keys = list(dict.fromkeys(plan.iter_keys()))
        self._total_rows = len(keys)
        for key in keys:
            if (row := rows.get(key)) is not None:
                self._count(row)
            else:
                self._length_left += key.length
        self._start_time = time.monotonic()
        self._display.update(self._done_rows, total=self._total_rows)

    def on_row(self, row: ResultRow) -> None:
        """Count a new row, and update the display."""
        self._count(row)
        self._tokens += row.prompt_tokens + row.completion_tokens
        self._length_done += row.length
        self._length_left -= row.length
        self._display.update(self._done_rows, self.status, total=self._total_rows)

    @property
    def status(self) -> str:
        """Lenient accuracy by length, failures, tokens per second, and the estimated time left."""
        accuracies = " ".join(
            f"{format_length(length, unit)} {100 * fmean(scores):.0f}%"
            for (unit, length), scores in sorted(self._scores.items())
        )
        # Lengths instead of question counts, because long documents come first.
        return describe_progress(
            time.monotonic() - self._start_time,
            accuracies,
            failed=self._failed_rows,
            tokens=self._tokens,
            done_work=self._length_done,
            work_left=self._length_left,
        )

    def _count(self, row: ResultRow) -> None:
        self._done_rows += 1
        self._failed_rows += row.outcome is QuestionOutcome.FAILED
        if row.outcome is not QuestionOutcome.DOES_NOT_FIT:
            self._scores[row.unit, row.length].append(row.lenient)


@dataclass(frozen=True)
class Evaluation:
    """The request for an evaluation: systems, tasks, and limits."""

    plan: EvaluationPlan
    tasks: Mapping[str, Task]
    """The tasks by name, as in the plan."""
    systems: Mapping[str, ReaderSystem]
    store: DocumentStore
    """The document store, which is also the systems'."""
    seed: int = 0
    """The tasks' seed."""
    answer_format: AnswerFormat = AnswerFormat.BOXED
    """The form in which the systems' prompts ask for the answer."""
    scripted: bool = False
    """Whether the systems' policy is a script."""
    run_log: RunLog | None = None
    """The systems' run log; without a log, rows do not say where facts were lost."""
    checkpointer: BaseCheckpointSaver[Any] | None = None
    """The systems' checkpoints; they are deleted once the question has a row."""
    keep_documents: bool = False
    retry_failed: bool = False
    """Whether to repeat questions that an earlier call counted as failed."""
    concurrency: int = 128
    """The maximum number of questions in progress. The documents of as many more are prepared in advance."""
    max_questions: int | None = None
    """The maximum number of questions asked in this call. Here and below, None means no limit."""
    max_tokens: int | None = None
    """The limit for the tokens of finished questions, prompts and completions. Running questions are finished."""
    max_seconds: float | None = None
    """The time limit. Running questions are cancelled."""

    def keeps(self, row: ResultRow) -> bool:
        """Return whether a row of an earlier call counts; its question is asked again otherwise."""
        return not (self.retry_failed and row.outcome is QuestionOutcome.FAILED)


async def evaluate(
    evaluation: Evaluation, journal: ResultJournal, progress: EvaluationProgress | None = None
) -> EvaluationEnd:
    """Add the plan's missing rows to the journal.

    Raises:
        PolicyError: the server is down, or refuses the key.
        EvaluationError: the journal or a document cannot be written; or everything is done except samples that cannot
            be made.
    """
    journal.add_plan(evaluation.plan)
    if progress is not None:
        progress.on_begin(evaluation.plan, {key: row for key, row in journal.rows.items() if evaluation.keeps(row)})
    return await _EvaluationRun(evaluation, journal, progress).run()


class _EvaluationRun:
    """One call of `evaluate`."""

    def __init__(self, evaluation: Evaluation, journal: ResultJournal, progress: EvaluationProgress | None) -> None:
        self._evaluation = evaluation
        self._journal = journal
        self._progress = progress
        self._documents = SampleDocuments(
            evaluation.tasks, evaluation.store, evaluation.seed, keep_documents=evaluation.keep_documents
        )
        self._end = EvaluationEnd.DONE
        self._attempts: Counter[QuestionKey] = Counter()
        """The number of attempts at each question."""
        self._tokens = 0
        self._possible_outages: list[tuple[ResultRow, Exception]] = []
        """Failures that the server may have caused; recorded when another question succeeds."""
        self._has_answer = False
        self._sample_errors: list[SampleError] = []

    async def run(self) -> EvaluationEnd:
        try:
            await self._ask_until_time_limit()
        except* MemAgentError as errors:
            raise _find_first_error(errors) from None
        finally:
            await self._documents.close()
        if self._end is EvaluationEnd.DONE:
            for row, _ in self._possible_outages:
                await self._record(row)
            if self._sample_errors:
                first_error, *other_errors = self._sample_errors
                description = f"{len(self._sample_errors)} samples" if other_errors else "a sample"
                raise EvaluationError(
                    f"finished, except for {description} that could not be made: {first_error.message}",
                    hint=f"{first_error.hint or ''} `memagent eval-report` shows what there is.".lstrip(),
                )
        elif self._possible_outages and not self._has_answer:  # nothing shows that the server works
            raise self._possible_outages[-1][1]
        return self._end

    async def _ask_until_time_limit(self) -> None:
        try:
            async with asyncio.timeout(self._evaluation.max_seconds) as time_limit:
                rows = self._journal.rows
                await self._ask_all(
                    key
                    for key in self._evaluation.plan.iter_keys()
                    if key not in rows or not self._evaluation.keeps(rows[key])
                )
                if self._possible_outages and self._end is EvaluationEnd.DONE:
                    await self._retry([row.key for row, _ in self._possible_outages])
        except TimeoutError:
            if not time_limit.expired():
                raise
            self._end = EvaluationEnd.MAX_SECONDS

    async def _retry(self, keys: Collection[QuestionKey]) -> None:
        """Ask the last failed questions again: no later success showed that the server was running.

        Raises:
            PolicyError: all of them fail again, and the server may be down. One question alone may be too much for a
                server that works, so its overload is not raised.
        """
        self._possible_outages = []
        await self._ask_all(key for key in self._evaluation.plan.iter_keys() if key in keys)
        if len(self._possible_outages) == len(keys):
            _, error = self._possible_outages[-1]
            if len(keys) > 1 or not isinstance(error, PolicyOverloadedError):
                raise error

    async def _ask_all(self, keys: Iterable[QuestionKey]) -> None:
        question_queue: asyncio.Queue[PendingQuestion | None] = asyncio.Queue(self._evaluation.concurrency)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue_questions(question_queue, keys))
            for _ in range(self._evaluation.concurrency):
                group.create_task(self._ask_from_queue(question_queue))

    async def _queue_questions(
        self, question_queue: asyncio.Queue[PendingQuestion | None], keys: Iterable[QuestionKey]
    ) -> None:
        """Queue the questions in their order, each with its document in the store; then None for each worker."""
        for sample_key, group in groupby(keys, key=lambda key: (key.task, key.length, key.question_index)):
            if self._end is not EvaluationEnd.DONE:
                break
            sample_keys = list(group)
            try:
                sample, document = await self._documents.prepare(*sample_key, len(sample_keys))
            except SampleError as error:
                self._sample_errors.append(error)
                continue
            for key in sample_keys:
                await question_queue.put(PendingQuestion(key, sample, document))
        for _ in range(self._evaluation.concurrency):
            await question_queue.put(None)

    async def _ask_from_queue(self, question_queue: asyncio.Queue[PendingQuestion | None]) -> None:
        while (question := await question_queue.get()) is not None:
            if self._admit(question):
                row, error = await self._ask(question)
                await self._record_or_defer(row, error)
            self._documents.release(question.document)

    def _admit(self, question: PendingQuestion) -> bool:
        """Return whether a question may be asked, and count it; it may not if a limit is reached."""
        if question.key in self._attempts:
            return True
        evaluation = self._evaluation
        if evaluation.max_questions is not None and len(self._attempts) >= evaluation.max_questions:
            self._end = EvaluationEnd.MAX_QUESTIONS
        elif evaluation.max_tokens is not None and self._tokens >= evaluation.max_tokens:
            self._end = EvaluationEnd.MAX_TOKENS
        if self._end is not EvaluationEnd.DONE:
            return False
        self._attempts[question.key] = 0
        return True

    async def _ask(self, question: PendingQuestion) -> tuple[ResultRow, Exception | None]:
        """Ask a system a question, once more if it fails; return the row, and the error of the last attempt."""
        evaluation, sample, key = self._evaluation, question.sample, question.key
        run_id = make_run_id(self._journal.evaluation_id, key.system, sample.id, key.repeat)
        start_time = time.monotonic()
        for _ in range(ATTEMPTS):
            self._attempts[key] += 1
            error: Exception | None = None
            try:
                attempt = await evaluation.systems[key.system].attempt(
                    question.document,
                    sample.question,
                    answer_tokens=sample.task.answer_tokens,
                    run_id=run_id,
                    repeat=key.repeat,
                )
                break
            except Exception as failure:  # noqa: BLE001  the question has a row after any error
                error = failure
                usage = Usage(seconds=time.monotonic() - start_time)
                attempt = Attempt(QuestionOutcome.FAILED, None, None, usage, run_id=run_id)
        try:
            row = make_row(
                question, attempt, attempts=self._attempts[key], error=error, seed=evaluation.seed,
                answer_format=evaluation.answer_format, scripted=evaluation.scripted,
            )  # fmt: skip
        except Exception as failure:
            raise make_sample_error(failure, "own_score", sample.task, *key[2:4], evaluation.seed) from failure
        return await add_losses(row, sample, evaluation.run_log, evaluation.store), error

    async def _record_or_defer(self, row: ResultRow, error: Exception | None) -> None:
        """Record a row, or defer it if the server may be down.

        Raises:
            PolicyError: the server is down. Questions that failed because of that have no row, and are asked again.
        """
        if isinstance(error, _SERVER_ERRORS):
            self._possible_outages.append((row, error))
            if len(self._possible_outages) >= _MAX_CONSECUTIVE_FAILURES:
                raise error
            return
        if row.has_costs:  # a document that does not fit says nothing about the server
            self._has_answer = True
            deferred_failures, self._possible_outages = self._possible_outages, []
            for failed_row, _ in deferred_failures:
                await self._record(failed_row)
        await self._record(row)

    async def _record(self, row: ResultRow) -> None:
        self._journal.add(row)
        self._tokens += row.prompt_tokens + row.completion_tokens
        if self._progress is not None:
            self._progress.on_row(row)
        if self._evaluation.checkpointer is not None:
            await self._evaluation.checkpointer.adelete_thread(
                make_run_id(self._journal.evaluation_id, row.system, *row.attempt_key)
            )


def _find_first_error(errors: BaseExceptionGroup[MemAgentError]) -> MemAgentError:
    error = errors.exceptions[0]
    return error if isinstance(error, MemAgentError) else _find_first_error(error)
