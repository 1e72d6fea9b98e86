"""The command line's part for evaluation: `memagent eval | eval-report`."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit, urlunsplit

import typer

from memagent_graph.errors import EvaluationError, MemAgentError
from memagent_graph.exit_codes import ExitCode, failures_told

if TYPE_CHECKING:
    from memagent_graph.documents import DocumentStore
    from memagent_graph.evaluation.harness import Ended, EvaluationLimits
    from memagent_graph.evaluation.journal import Journal
    from memagent_graph.evaluation.making import Maker
    from memagent_graph.evaluation.results import Plan, Results
    from memagent_graph.evaluation.samples import Task
    from memagent_graph.evaluation.systems import SystemSettings
    from memagent_graph.evaluation.tasks import TaskSettings
    from memagent_graph.settings import ReaderSettings

_FOLDER: Final = Path("memagent-eval")
_REPORT: Final = "report.md"
_RUNS: Final = "runs.sqlite"
_CHECKPOINTS: Final = "checkpoints.sqlite"
_DOCUMENTS: Final = "documents"

AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("eval")(eval_)
    app.command("eval-report")(eval_report)


def eval_(
    context: typer.Context,
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASKS", help="What to measure; your own: path/to/file.py:Name.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the tasks and systems there are.")] = False,
    lengths: Annotated[
        str, typer.Option(help="Document lengths, in the tasks' unit (tokens, passages). 1k is 1024, 1M is 1024k.")
    ] = "8k,32k,128k",
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Questions of each task at each length.")] = 128,
    systems: Annotated[str, typer.Option(help="What is measured; others are compared with the first.")] = "memagent",
    model: Annotated[
        str | None,
        typer.Option(
            help='A name on the server; without one a folder or hub id, or "embedded".', show_default="embedded"
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="The server's API, as in http://localhost:8000/v1.", show_default="$OPENAI_BASE_URL"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", show_default="$OPENAI_API_KEY")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help='A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
            show_default="the policy's",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help='Budgets and prompts a policy was trained with: a folder, or "embedded".'),
    ] = None,
    layout: Annotated[
        Literal["paper", "section_first"] | None, typer.Option(help="Order of the update prompt's parts.")
    ] = None,
    answer_format: Annotated[
        Literal["boxed", "plain"] | None, typer.Option(help="How the answer is asked for.")
    ] = None,
    update_template: Annotated[str | None, typer.Option(help="Your own update prompt: a text file.")] = None,
    answer_template: Annotated[str | None, typer.Option(help="Your own answer prompt: a text file.")] = None,
    empty_memory: Annotated[
        str | None, typer.Option(help="What stands for the memory at the first chunk.", show_default="(empty)")
    ] = None,
    context_window: Annotated[int | None, typer.Option(help="Tokens.", show_default="the server's, or 8192")] = None,
    question_tokens: Annotated[int | None, typer.Option(help="Bound of the question.", show_default="1024")] = None,
    memory_tokens: Annotated[int | None, typer.Option(help="Bound of the memory.", show_default="1024")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Size of a chunk.", show_default="5000")] = None,
    boundary: Annotated[
        Literal["token", "sentence", "paragraph"] | None,
        typer.Option(help="Where chunks may end.", show_default="the profile's, or token"),
    ] = None,
    retrieved_chunks: Annotated[
        int | None, typer.Option(min=1, help="Chunks that retrieval shows.", show_default="as many as fit")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The tasks' variants for policies of small context.")] = False,
    haystack: Annotated[
        Path | None,
        typer.Option(help="Text to hide facts in: a file, or a folder of .txt and .md.", show_default="Python's docs"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Data files of the tasks that need some: a file or folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks, and of sampling where it is not greedy.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Log token ids and log-probs, so that the runs can be trained on.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions, and requests, in flight.")] = 128,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one completion may take.")] = 300.0,
    retries: Annotated[int, typer.Option(min=0, help="How often a failed request is sent again.")] = 4,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many questions; can be resumed.")
    ] = None,
    max_tokens_total: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many tokens; can be resumed.")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0.001, help="Stop after this time; can be resumed.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, report, plots and run log.")] = _FOLDER,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder, or add to it.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: ask again what counts as failed.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option("--log", help="SQLite file for the run log.", show_default=f"{_RUNS} in the folder")
    ] = None,
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Resume to the question only, not to the chunk.")
    ] = False,
    keep_documents: Annotated[
        bool, typer.Option("--keep-documents", help="Keep the texts, so that `memagent show` has the chunks, too.")
    ] = False,
    as_json: AsJSON = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Measure a policy on long documents, beside what one would do without MemAgent: accuracy, costs, failures."""
    given = locals()
    from memagent_graph.evaluation.harness import Ended  # noqa: PLC0415
    from memagent_graph.evaluation.journal import require_no_results  # noqa: PLC0415
    from memagent_graph.evaluation.results import RowOutcome  # noqa: PLC0415

    if list_:
        _print_names(as_json=as_json)
        return
    if not tasks:
        raise typer.BadParameter("name at least one; --list names all", param_hint="'TASKS'")
    with failures_told(as_json=as_json):
        request = _Request.of(given, _command(context))
        if not resume:
            require_no_results(out)
        try:
            ended = asyncio.run(_run(request))
        except (MemAgentError, ValueError, KeyboardInterrupt, asyncio.CancelledError) as error:
            _tell_of_end(error, out)
            if isinstance(error, ValueError):
                raise EvaluationError(str(error)) from error
            if isinstance(error, MemAgentError):
                raise
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        results = _write_all(request.out, request.log)
    _print_results(results, out, request.log, ended.value, as_json=as_json)
    if ended is not Ended.DONE:
        typer.echo(f"stopped at {ended.value.replace('_', ' ')}; {_go_on(out)}", err=True)
        raise typer.Exit(ExitCode.STOPPED)
    if all(row.outcome == RowOutcome.FAILED.value for row in results.rows):
        raise typer.Exit(ExitCode.POLICY)


def eval_report(
    folder: Annotated[Path, typer.Argument(help="A folder that `memagent eval` wrote to.")],
    other: Annotated[
        Path | None, typer.Argument(help="Another one, to be compared on the questions that both have.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Make tables and plots anew from an evaluation's results, finished or not, or compare two evaluations."""
    from memagent_graph.evaluation.journal import load_results  # noqa: PLC0415
    from memagent_graph.evaluation.report import comparison, render_comparison  # noqa: PLC0415

    with failures_told(as_json=as_json):
        if other is None:
            log = folder / _RUNS
            results = _write_all(folder, log if log.exists() else None)
            ended = "unfinished" if results.missing else "done"
            _print_results(results, folder, log if log.exists() else None, ended, as_json=as_json)
            return
        first, second = load_results(folder), load_results(other)
        names = (str(folder), str(other))
        if as_json:
            _print_json({"first": names[0], "second": names[1], "comparisons": comparison(first, second, names)})
        else:
            sys.stdout.write(render_comparison(first, second, names))


@dataclass(frozen=True)
class _Request:
    """What was asked for on the command line."""

    tasks: list[str]
    systems: list[str]
    lengths: tuple[int, ...]
    count: int
    reader: ReaderSettings
    api_key: str | None
    seed: int
    small: bool
    haystack: Path | None
    data: Path | None
    retrieved_chunks: int | None
    limits: EvaluationLimits
    out: Path
    log: Path
    resume: bool
    retry_failed: bool
    checkpoints: bool
    keep_documents: bool
    quiet: bool
    command: str

    @classmethod
    def of(cls, given: dict[str, Any], command: str) -> _Request:
        """From the command's parameters, by name.

        Raises:
            EvaluationError: lengths that are none, or no system.
        """
        from memagent_graph.evaluation.harness import EvaluationLimits  # noqa: PLC0415
        from memagent_graph.evaluation.planning import parse_lengths  # noqa: PLC0415
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

        systems = list(dict.fromkeys(filter(None, (each.strip() for each in given["systems"].split(",")))))
        if not systems:
            raise EvaluationError("no system was named", hint="Name at least one, as in --systems memagent.")
        names = {each.name for each in fields(ReaderSettings)}
        # Each task has a bound of its own for answers; what a reader is made with takes no room from it.
        reader = ReaderSettings(**{name: given[name] for name in names & given.keys()}, answer_tokens=1)
        return cls(
            systems=systems,
            lengths=parse_lengths(given["lengths"]),
            count=given["n"],
            reader=reader.with_server_of_environment(),
            limits=EvaluationLimits(given["max_questions"], given["max_tokens_total"], given["max_seconds"]),
            log=given["log"] or given["out"] / _RUNS,
            checkpoints=not given["no_checkpoints"],
            quiet=given["quiet"] or given["as_json"],
            command=command,
            **{
                name: given[name]
                for name in (
                    "tasks", "api_key", "seed", "small", "haystack", "data", "retrieved_chunks", "out", "resume",
                    "retry_failed", "keep_documents",
                )
            },
        )  # fmt: skip


async def _run(request: _Request) -> Ended:
    """Check everything, then run to the end, or to a limit."""
    from memagent_graph.evaluation.journal import open_journal  # noqa: PLC0415
    from memagent_graph.evaluation.planning import check_plan, load_tasks, settings_that_count  # noqa: PLC0415
    from memagent_graph.evaluation.results import TABLE, Plan, write_table  # noqa: PLC0415
    from memagent_graph.evaluation.systems import SystemSettings, load_system  # noqa: PLC0415
    from memagent_graph.evaluation.tasks import TaskSettings  # noqa: PLC0415
    from memagent_graph.paths import default_store  # noqa: PLC0415

    documents = default_store() if request.keep_documents else request.out / _DOCUMENTS
    # The log is opened once all is checked: what is refused leaves nothing behind.
    async with request.reader.make_reader(api_key=request.api_key, store=documents, run_log=False) as reader:
        given = {"retrieved_chunks": request.retrieved_chunks} if request.retrieved_chunks else {}
        systems = await SystemSettings.of(reader, **given)
        for name in request.systems:
            load_system(name, systems)
        task_settings = TaskSettings(
            systems.context.tokenizer, request.seed, request.small, request.haystack, request.data
        )
        tasks = load_tasks(request.tasks, task_settings)
        plan = Plan(tuple(request.systems), tuple(tasks), request.lengths, request.count)
        check_plan(plan, tasks, systems.context)
        settings = settings_that_count(systems, task_settings)
        with open_journal(request.out, settings, resume=request.resume) as journal:
            try:
                maker = _maker(request, plan, tasks, task_settings, systems.context.store)
                return await _measure(request, journal, plan, tasks, systems, maker)
            finally:
                if journal.rows:
                    write_table(journal.results, request.out / TABLE)
                if not request.keep_documents:
                    shutil.rmtree(documents, ignore_errors=True)


def _maker(
    request: _Request, plan: Plan, tasks: Mapping[str, Task], settings: TaskSettings, store: DocumentStore
) -> Maker:
    from memagent_graph.evaluation.making import MUCH, ProcessMaker, ThreadMaker  # noqa: PLC0415

    if sum(plan.lengths) * plan.count * len(tasks) < MUCH:
        return ThreadMaker(tasks, store)
    return ProcessMaker(list(dict.fromkeys(request.tasks)), settings, tasks, store)


async def _measure(
    request: _Request,
    journal: Journal,
    plan: Plan,
    tasks: Mapping[str, Task],
    settings: SystemSettings,
    maker: Maker,
) -> Ended:
    from memagent_graph.checkpoints import open_saver  # noqa: PLC0415
    from memagent_graph.evaluation.harness import Ended, Evaluation, evaluate  # noqa: PLC0415
    from memagent_graph.evaluation.progress import ProgressDisplay  # noqa: PLC0415
    from memagent_graph.evaluation.systems import load_system  # noqa: PLC0415
    from memagent_graph.run_log import RunLog  # noqa: PLC0415

    journal.command(request.command)
    log = RunLog(request.log)
    saver = await open_saver(request.out / _CHECKPOINTS if request.checkpoints else None)
    settings = replace(settings, context=replace(settings.context, run_log=log), checkpoints=saver)
    evaluation = Evaluation(
        plan=plan,
        tasks=tasks,
        systems={name: load_system(name, settings) for name in plan.systems},
        store=settings.context.store,
        seed=request.seed,
        answer_format=settings.context.prompts.answer_format,
        run_log=log,
        saver=saver,
        maker=maker,
        keep_documents=request.keep_documents,
        retry_failed=request.retry_failed,
        concurrency=request.reader.concurrency,
        limits=request.limits,
    )
    try:
        with ProgressDisplay(quiet=request.quiet) as display:
            ended = await evaluate(evaluation, journal, display)
    finally:
        for system in evaluation.systems.values():
            await system.aclose()
        if saver is not None:
            await saver.conn.close()  # type: ignore[attr-defined]
        log.close()
    if ended is Ended.DONE:
        for path in request.out.glob(f"{_CHECKPOINTS}*"):
            path.unlink()
    return ended


def _write_all(folder: Path, log: Path | None) -> Results:
    """The table, the plots and the report of what is in a folder."""
    from memagent_graph.evaluation.journal import load_results  # noqa: PLC0415
    from memagent_graph.evaluation.plots import draw_all  # noqa: PLC0415
    from memagent_graph.evaluation.report import render_report  # noqa: PLC0415
    from memagent_graph.evaluation.results import TABLE, unwritable, write_table  # noqa: PLC0415

    results = load_results(folder)
    folder = folder if folder.is_dir() else folder.parent
    if results.rows:
        write_table(results, folder / TABLE)
        plots = draw_all(results, folder)
        report = render_report(results, plots=plots, log=log)
        try:
            (folder / _REPORT).write_text(report, encoding="utf-8")
        except OSError as error:
            raise unwritable(folder / _REPORT, error) from error
    return results


def _print_results(results: Results, folder: Path, log: Path | None, ended: str, *, as_json: bool) -> None:
    from memagent_graph.evaluation.report import render_report, summary  # noqa: PLC0415

    if as_json:
        values = {
            "evaluation": results.evaluation,
            "folder": str(folder),
            "ended": ended,
            "rows": len(results.rows),
            "missing": results.missing,
            "settings": results.settings,
            "results": summary(results),
        }
        _print_json(values)
        return
    sys.stdout.write(render_report(results, log=log))
    typer.echo(f"table, report and plots are in {folder}", err=True)


def _print_names(*, as_json: bool) -> None:
    from memagent_graph.evaluation.systems import system_names  # noqa: PLC0415
    from memagent_graph.evaluation.tasks import task_names  # noqa: PLC0415

    if as_json:
        _print_json({"tasks": task_names(), "systems": system_names()})
        return
    for kind, names in (("tasks", task_names()), ("systems", system_names())):
        typer.echo(f"{kind}:\n" + "\n".join(f"  {name}" for name in names))


def _tell_of_end(error: BaseException, folder: Path) -> None:
    """What an evaluation that ended early has, and how to go on with it."""
    from memagent_graph.evaluation.journal import JOURNAL  # noqa: PLC0415

    said = "interrupted; " if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else ""
    if (folder / JOURNAL).exists():
        typer.echo(f"{said}{_go_on(folder)}", err=True)


def _go_on(folder: Path) -> str:
    return f"nothing in {folder} is lost; go on with the same command and --resume"


def _command(context: typer.Context) -> str:
    """What was typed, without keys."""
    words = ["memagent", "eval", *(context.params["tasks"] or ())]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if given is None or given.name != "COMMANDLINE" or name in {"tasks", "api_key"}:
            continue
        value = context.params[name]
        option = max(parameter.opts, key=len)
        words += [option] if value is True else [option, _without_password(str(value))]
    return shlex.join(words)


def _without_password(value: str) -> str:
    """A URL without user name and password; any other value as it is."""
    parts = urlsplit(value)
    return (
        urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.scheme and "@" in value else value
    )


def _print_json(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
