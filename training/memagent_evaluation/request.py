"""One evaluation from its request to its rows: checks everything, builds the parts, runs, and cleans up."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from memagent_evaluation.grading import Grader, judge_rows
from memagent_evaluation.harness import Evaluation, EvaluationEnd, EvaluationLimits, evaluate
from memagent_evaluation.markdown_tables import length_label
from memagent_evaluation.planning import check_plan, data_identities, decisive_settings, load_tasks, plan_of
from memagent_evaluation.result_journal import (
    CHECKPOINTS,
    KEPT_DOCUMENTS,
    OPEN_DOCUMENTS,
    RUNS,
    ResultJournal,
    open_results,
)
from memagent_evaluation.result_table import TABLE, EvaluationPlan, Key, QuestionOutcome, ResultRow, write_table
from memagent_evaluation.samples import Sample, Task
from memagent_evaluation.systems import load_system
from memagent_evaluation.tasks import TaskSettings
from memagent_graph.cli.progress import ProgressDisplay
from memagent_graph.errors import EvaluationError
from memagent_graph.policies.scripted import is_scripted
from memagent_graph.policy_registry import make_policy
from memagent_graph.reader import MemAgent
from memagent_graph.run_log import RunLog
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.checkpoints import open_saver
from memagent_graph.storage.paths import default_store
from memagent_graph.strategies.excerpts import words_around


@dataclass(frozen=True)
class EvaluationRequest:
    """The request of `memagent eval`."""

    tasks: tuple[str, ...]
    """Names for `load_task`."""
    systems: tuple[str, ...]
    lengths: tuple[int, ...] | None
    """The same for all tasks; None means the tasks' own."""
    count: int
    """Questions of each task at each length."""
    reader: ReadSettings
    out: Path
    """The folder."""
    command: str
    """The command line, for the report."""
    seed: int = 0
    small: bool = False
    haystack: Path | None = None
    data: Path | None = None
    questions_per_document: int = 1
    repeats: int = 1
    """How often each system is asked each question."""
    judge: ReadSettings | None = None
    """The policy that grades answers, if any; only the policy's settings are used."""
    limits: EvaluationLimits = field(default_factory=EvaluationLimits)
    log: Path | None = None
    """The run log; one in the folder if None."""
    resume: bool = False
    retry_failed: bool = False
    checkpoints: bool = True
    """Whether to resume to the chunk, not only to the question."""
    keep_documents: bool = False
    quiet: bool = False

    @property
    def log_path(self) -> Path:
        """The run log."""
        return self.log or self.out / RUNS

    @property
    def documents(self) -> Path:
        """The document store: for kept documents where `memagent show` looks for them, next to the log or the user's
        own.
        """
        if not self.keep_documents:
            return self.out / OPEN_DOCUMENTS
        return self.out / KEPT_DOCUMENTS if self.log_path.parent == self.out else default_store()


async def carry_out(request: EvaluationRequest) -> EvaluationEnd:
    """Check everything, then run to the end, or to a limit.

    Raises:
        EvaluationError, MissingExtraError: the request cannot be fulfilled, or does not match the folder's results.
        PolicyError, TokenizerError, BudgetError, ProfileError, PromptError: like the reader's first read; or the server
            went down, and the evaluation can be resumed.
    """
    # The log is opened after all checks: a refused request leaves no files.
    async with MemAgent(settings=request.reader, store=request.documents, run_log=False) as reader:
        checked = await _check(request, reader)
        with open_results(request.out, checked.settings, resume=request.resume) as journal:
            journal.plan(checked.plan)
            try:
                ended = await _measure(request, journal, checked, reader)
                if request.judge is not None:
                    await _judge(request.judge, journal)
                return ended
            finally:
                if journal.rows:
                    write_table(journal.results, request.out / TABLE)
                shutil.rmtree(request.out / OPEN_DOCUMENTS, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A checked request."""

    plan: EvaluationPlan
    tasks: Mapping[str, Task]
    settings: Mapping[str, Any]
    """The settings that determine a row."""


async def _check(request: EvaluationRequest, reader: MemAgent) -> _Checked:
    context = await reader.aprepare()
    if request.repeats > 1 and not context.sampling.temperature:
        raise EvaluationError(
            "at temperature 0 all samples of an answer are alike", hint="Give a --temperature, or leave out --repeats."
        )
    identities = [(name, await load_system(name, reader).identity()) for name in request.systems]
    task_settings = TaskSettings(
        context.tokenizer,
        request.seed,
        request.small,
        request.haystack,
        request.data,
        request.questions_per_document,
        words_around(context),
    )
    tasks = load_tasks(request.tasks, task_settings)
    plan = plan_of(request.systems, tasks, request.lengths, request.count, request.repeats)
    check_plan(plan, tasks, context, seed=request.seed)
    plan = replace(plan, data=data_identities(request.tasks, task_settings), identities=tuple(identities))
    return _Checked(plan, tasks, decisive_settings(context, task_settings))


async def _judge(settings: ReadSettings, journal: ResultJournal) -> None:
    policy = make_policy(settings)
    try:
        await judge_rows(journal, Grader(policy), concurrency=settings.concurrency)
    finally:
        if hasattr(policy, "aclose"):
            await policy.aclose()


async def _measure(
    request: EvaluationRequest,
    journal: ResultJournal,
    checked: _Checked,
    reader: MemAgent,
) -> EvaluationEnd:
    plan, tasks = checked.plan, checked.tasks
    journal.command(request.command)
    context = await reader.aprepare()
    with closing(RunLog(request.log_path)) as log, ProgressDisplay("evaluating", quiet=request.quiet) as display:
        saver = await open_saver(request.out / CHECKPOINTS if request.checkpoints else None)
        reader = reader.copy(run_log=log, checkpoints=saver)
        evaluation = Evaluation(
            plan=plan,
            tasks=tasks,
            systems={name: load_system(name, reader) for name in plan.systems},
            store=context.store,
            seed=request.seed,
            answer_format=context.prompts.answer_format,
            answer_tokens=context.budget.answer_tokens,
            scripted=is_scripted(context.policy),
            run_log=log,
            saver=saver,
            keep_documents=request.keep_documents,
            retry_failed=request.retry_failed,
            concurrency=request.reader.concurrency,
            limits=request.limits,
        )
        try:
            ended = await evaluate(evaluation, journal, EvaluationProgress(display))
        finally:
            if saver is not None:
                await saver.conn.close()  # type: ignore[attr-defined]
    if ended is EvaluationEnd.DONE:
        for path in request.out.glob(f"{CHECKPOINTS}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder holds the leases
    return ended


class EvaluationProgress:
    """Shows an evaluation while it runs: a watcher of the harness.

    Args:
        display: where it is shown.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._right: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._total = self._done = self._failed = self._tokens = 0
        self._work_left = self._work_done = self._work_under_way = 0
        self._began = time.monotonic()

    def on_begin(self, plan: EvaluationPlan, rows: Mapping[Key, ResultRow]) -> None:
        """Count existing rows, and the work that is left."""
        keys = list(dict.fromkeys(plan.keys()))
        self._total = len(keys)
        for key in keys:
            if (row := rows.get(key)) is not None:
                self._count(row)
            else:
                self._work_left += key[2]
        self._began = time.monotonic()
        self._display.update(self._done, total=self._total)

    def on_question(self, sample: Sample) -> None:
        """Count a question as under way."""
        self._work_under_way += sample.length

    def on_row(self, row: ResultRow) -> None:
        """Count a new row, and show the state."""
        self._count(row)
        self._work_under_way -= row.length
        self._tokens += row.prompt_tokens + row.completion_tokens
        self._work_done += row.length
        self._work_left -= row.length
        self._display.update(self._done, self.status, total=self._total)

    @property
    def status(self) -> str:
        """Accuracy so far by length (lenient), failures, tokens a second, and the time left."""
        lengths = " ".join(
            f"{length_label(length, unit)} {100 * fmean(values):.0f}%"
            for (unit, length), values in sorted(self._right.items())
        )
        seconds = max(time.monotonic() - self._began, 1e-9)
        parts = [lengths, f"{self._failed} failed" if self._failed else "", f"{self._tokens / seconds:,.0f} tokens/s"]
        if self._work_done:
            # By length, not by number, since long documents are first. Running questions are half done, on average.
            done = self._work_done + self._work_under_way / 2
            left = timedelta(seconds=round(seconds * (self._work_done + self._work_left - done) / done))
            parts.append(f"{left} left")
        return ", ".join(filter(None, parts))

    def _count(self, row: ResultRow) -> None:
        self._done += 1
        self._failed += row.outcome is QuestionOutcome.FAILED
        if row.outcome is not QuestionOutcome.DOES_NOT_FIT:
            self._right[row.unit, row.length].append(row.lenient)
