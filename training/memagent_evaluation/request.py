"""One evaluation from its request to its rows: checks everything, builds the parts, runs, and cleans up."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memagent_evaluation.grading import Grader
from memagent_evaluation.harness import Ended, Evaluation, EvaluationLimits, evaluate
from memagent_evaluation.judged_rows import judge_rows
from memagent_evaluation.output_folder import CHECKPOINTS, KEPT_DOCUMENTS, OPEN_DOCUMENTS, RUNS
from memagent_evaluation.planned_costs import PlannedCost, planned_costs
from memagent_evaluation.planning import check_plan, data_that_counts, load_tasks, plan_of, settings_that_count
from memagent_evaluation.progress_display import ProgressDisplay
from memagent_evaluation.result_journal import Journal, open_journal
from memagent_evaluation.result_table import TABLE, Plan, write_table
from memagent_evaluation.sample_documents import MUCH, Maker, ProcessMaker, ThreadMaker
from memagent_evaluation.samples import Task
from memagent_evaluation.systems import ReaderSystem, load_system
from memagent_evaluation.tasks import TaskSettings
from memagent_graph.errors import EvaluationError
from memagent_graph.policies.scripted import is_scripted
from memagent_graph.reader import MemAgent
from memagent_graph.run_log import RunLog
from memagent_graph.settings import ReaderSettings
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
    reader: ReaderSettings
    out: Path
    """The folder."""
    command: str
    """The command line, for the report."""
    api_key: str | None = None
    seed: int = 0
    small: bool = False
    haystack: Path | None = None
    data: Path | None = None
    questions_per_document: int = 1
    repeats: int = 1
    """How often each system is asked each question."""
    judge: ReaderSettings | None = None
    """The policy that grades answers, if any; only the policy's settings are used."""
    judge_key: str | None = None
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

    def system(self, name: str, reader: MemAgent) -> ReaderSystem:
        """The system of that name, with a reader; errors like `load_system`."""
        return load_system(name, reader)


async def carry_out(request: EvaluationRequest) -> Ended:
    """Check everything, then run to the end, or to a limit.

    Raises:
        EvaluationError, MissingExtraError: the request cannot be fulfilled, or does not match the folder's results.
        PolicyError, TokenizerError, BudgetError, ProfileError, PromptError: like the reader's first read; or the server
            went down, and the evaluation can be resumed.
    """
    # The log is opened after all checks: a refused request leaves no files.
    async with request.reader.make_reader(api_key=request.api_key, store=request.documents, run_log=False) as reader:
        checked = await _check(request, reader)
        with open_journal(request.out, checked.settings, resume=request.resume) as journal:
            journal.plan(checked.plan)
            try:
                ended = await _measure(request, journal, checked, reader)
                if request.judge is not None:
                    await _judge(request.judge, request.judge_key, journal)
                return ended
            finally:
                if journal.rows:
                    write_table(journal.results, request.out / TABLE)
                shutil.rmtree(request.out / OPEN_DOCUMENTS, ignore_errors=True)


async def planned(request: EvaluationRequest) -> tuple[Plan, list[PlannedCost]]:
    """Check everything, and count what would be asked; nothing is read, and nothing is written.

    Raises:
        EvaluationError, MissingExtraError, PolicyError, TokenizerError, BudgetError, ProfileError, PromptError: like
            `carry_out` before its first question.
    """
    # A store makes its folder only when a document is added.
    async with request.reader.make_reader(api_key=request.api_key, store=request.documents, run_log=False) as reader:
        checked = await _check(request, reader)
        strategies = {name: request.system(name, reader).strategy for name in request.systems}
        return checked.plan, planned_costs(checked.plan, checked.tasks, strategies, await reader.aprepare())


@dataclass(frozen=True, slots=True)
class _Checked:
    """A checked request."""

    plan: Plan
    tasks: Mapping[str, Task]
    task_settings: TaskSettings
    settings: Mapping[str, Any]
    """The settings that determine a row."""


async def _check(request: EvaluationRequest, reader: MemAgent) -> _Checked:
    context = await reader.aprepare()
    if request.repeats > 1 and not context.sampling.temperature:
        raise EvaluationError(
            "at temperature 0 all samples of an answer are alike", hint="Give a --temperature, or leave out --repeats."
        )
    identities = [(name, await request.system(name, reader).identity()) for name in request.systems]
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
    plan = replace(plan, data=data_that_counts(request.tasks, task_settings), identities=tuple(identities))
    return _Checked(plan, tasks, task_settings, settings_that_count(context, task_settings))


async def _judge(settings: ReaderSettings, api_key: str | None, journal: Journal) -> None:
    policy = settings.make_policy(api_key)
    try:
        await judge_rows(journal, Grader(policy), concurrency=settings.concurrency)
    finally:
        if hasattr(policy, "aclose"):
            await policy.aclose()


async def _measure(
    request: EvaluationRequest,
    journal: Journal,
    checked: _Checked,
    reader: MemAgent,
) -> Ended:
    plan, tasks, task_settings = checked.plan, checked.tasks, checked.task_settings
    journal.command(request.command)
    context = await reader.aprepare()
    maker: Maker = ThreadMaker(tasks, context.store, task_settings.seed)
    if sum(cell.length * cell.count for cell in plan.cells) >= MUCH:
        maker = ProcessMaker(list(dict.fromkeys(request.tasks)), task_settings, tasks, context.store)
    with closing(RunLog(request.log_path)) as log, ProgressDisplay(quiet=request.quiet) as display:
        saver = await open_saver(request.out / CHECKPOINTS if request.checkpoints else None)
        reader = reader.copy(run_log=log, checkpoints=saver)
        evaluation = Evaluation(
            plan=plan,
            tasks=tasks,
            systems={name: request.system(name, reader) for name in plan.systems},
            store=context.store,
            seed=request.seed,
            answer_format=context.prompts.answer_format,
            answer_tokens=context.budget.answer_tokens,
            scripted=is_scripted(context.policy),
            run_log=log,
            saver=saver,
            maker=maker,
            keep_documents=request.keep_documents,
            retry_failed=request.retry_failed,
            concurrency=request.reader.concurrency,
            limits=request.limits,
        )
        try:
            ended = await evaluate(evaluation, journal, display)
        finally:
            if saver is not None:
                await saver.conn.close()  # type: ignore[attr-defined]
    if ended is Ended.DONE:
        for path in request.out.glob(f"{CHECKPOINTS}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder holds the leases
    return ended
