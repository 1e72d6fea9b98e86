"""Measure policies and ways of reading on documents with known answers."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from memagent_evaluation.eval_report_command import print_results
from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import ExitCode, failures_told
from memagent_graph.cli.options import (
    AsJSON,
    Haystack,
    MaxSeconds,
    MaxTokensTotal,
    PriceIn,
    PriceOut,
    Quiet,
    ReaderOptions,
    Small,
)
from memagent_graph.cli.output import print_json
from memagent_graph.errors import EvaluationError, PolicyError
from memagent_graph.policies.server_url import without_password
from memagent_graph.settings import SamplingSettings

if TYPE_CHECKING:
    from memagent_evaluation.request import EvaluationRequest
    from memagent_graph.settings import ReadSettings

_FOLDER: Final = Path("memagent-eval")


@dataclass(frozen=True, kw_only=True)
class Eval(ReaderOptions, SamplingSettings):
    """Measure a policy on long documents, compared with other ways to read them: accuracy, cost, failures."""

    examples: ClassVar = (
        "memagent eval --list",
        "memagent eval niah_single_2 --lengths 8k,32k --n 50 --base-url http://localhost:8000/v1",
        "memagent eval niah_single_2 --small --model embedded --systems memagent,full_context --out results",
    )
    context: typer.Context
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASKS", help="What to measure: tasks, suites; your own: path/to/file.py:Name."),
    ] = None
    list_names: Annotated[bool, typer.Option("--list", help="List the tasks, suites and systems.")] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Document lengths, in the tasks' unit (tokens, passages). 1k is 1024, 1M is 1024k.",
            show_default="8k,32k,128k; passages: 50,200,800; data files: all theirs",
        ),
    ] = None
    count: Annotated[
        int,
        typer.Option(
            "--n",
            "-n",
            min=1,
            help="Questions of each task at each length; of a data file that has fewer, without --lengths, all.",
        ),
    ] = 128
    repeats: Annotated[
        int, typer.Option(min=1, help="Samples of each answer, at a --temperature above 0; the report has pass@k.")
    ] = 1
    systems: Annotated[
        str,
        typer.Option(help="What is measured: systems, strategies, file.py:Name; others are compared with the first."),
    ] = "memagent"
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Bound of the answer; more where a task needs more.", show_default="the policy's, or 1024"),
    ] = None
    small: Small = False
    haystack: Haystack = None
    questions_per_document: Annotated[
        int,
        typer.Option(min=1, help="Questions that share a document; RULER's needle tasks and those of our own can."),
    ] = 1
    data: Annotated[Path | None, typer.Option(help="Data files of the tasks that need some: a file or folder.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the tasks, and of sampling where it is not greedy.")] = 0
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Ask for token ids and log-probs and log them, so that the runs can be trained on; without it the log "
            "has their texts alone.",
        ),
    ] = False
    judge_model: Annotated[
        str | None, typer.Option(help="A model that grades the answers in the end, as one more score.")
    ] = None
    judge_base_url: Annotated[
        str | None, typer.Option(help="Its server's API, OpenAI-compatible.", show_default="the policy's")
    ] = None
    judge_api_key: Annotated[
        str | None,
        typer.Option(
            help="Its server's key.", envvar="MEMAGENT_JUDGE_API_KEY", show_default="the policy's on its server"
        ),
    ] = None
    price_in: PriceIn = None
    price_out: PriceOut = None
    concurrency: Annotated[int, typer.Option(min=1, help="Questions, and requests, in flight.")] = 128
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many questions; can be resumed.")
    ] = None
    max_tokens_total: MaxTokensTotal = None
    max_seconds: MaxSeconds = None
    out: Annotated[Path, typer.Option(help="Folder for results, report, plots and run log.")] = _FOLDER
    resume: Annotated[bool, typer.Option("--resume", help="Continue with what is in the folder, or add to it.")] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: repeat questions that failed.")
    ] = False
    log: Annotated[
        Path | None, typer.Option(help="SQLite file for the run log.", show_default="runs.sqlite in the folder")
    ] = None
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Resume to the question only, not to the chunk.")
    ] = False
    keep_documents: Annotated[
        bool,
        typer.Option(
            "--keep-documents", help="Keep the texts in the folder, so that `memagent show` has the chunks, too."
        ),
    ] = False
    as_json: AsJSON = False
    quiet: Quiet = False

    def run(self) -> None:
        """Run the command."""
        if self.list_names:
            _print_names(as_json=self.as_json)
            return
        if not self.tasks:
            raise typer.BadParameter("name at least one; --list names all", param_hint="'TASKS'")
        import asyncio  # noqa: PLC0415

        from memagent_evaluation.harness import EvaluationEnd  # noqa: PLC0415
        from memagent_evaluation.report import write_outputs  # noqa: PLC0415
        from memagent_evaluation.request import carry_out  # noqa: PLC0415
        from memagent_evaluation.result_journal import require_no_results  # noqa: PLC0415
        from memagent_evaluation.result_table import QuestionOutcome  # noqa: PLC0415
        from memagent_graph.prices import prices_of  # noqa: PLC0415

        out = self.out
        with failures_told(as_json=self.as_json):
            prices = prices_of(self.price_in, self.price_out)
            evaluation = _evaluation(self, self.tasks)
            if not self.resume:
                require_no_results(out)
            try:
                ended = asyncio.run(carry_out(evaluation))
            except ValueError as error:
                raise EvaluationError(str(error)) from error
            except PolicyError:
                _print_how_to_continue(out)
                raise
            except (KeyboardInterrupt, asyncio.CancelledError):
                _print_how_to_continue(out, "interrupted; ")
                raise typer.Exit(ExitCode.INTERRUPTED) from None
            results = write_outputs(out, evaluation.log_path, prices)
        print_results(results, out, evaluation.log_path, ended.value, prices, as_json=self.as_json)
        if ended is not EvaluationEnd.DONE:
            typer.echo(f"stopped at {ended.value.replace('_', ' ')}; {_how_to_continue(out)}", err=True)
            raise typer.Exit(ExitCode.STOPPED)
        if all(row.outcome is QuestionOutcome.FAILED for row in results.rows):
            raise typer.Exit(ExitCode.POLICY)


def _evaluation(request: Eval, tasks: list[str]) -> EvaluationRequest:
    """Return the evaluation that was asked for.

    Raises:
        EvaluationError: lengths that cannot be read, or no system.
    """
    from memagent_evaluation.harness import EvaluationLimits  # noqa: PLC0415
    from memagent_evaluation.planning import parse_lengths  # noqa: PLC0415
    from memagent_evaluation.request import EvaluationRequest  # noqa: PLC0415
    from memagent_evaluation.suites import with_suites  # noqa: PLC0415

    systems = tuple(dict.fromkeys(filter(None, (name.strip() for name in request.systems.split(",")))))
    if not systems:
        raise EvaluationError("no system was named", hint="Name at least one, as in --systems memagent.")
    return EvaluationRequest(
        tasks=with_suites(tasks),
        systems=systems,
        lengths=None if request.lengths is None else parse_lengths(request.lengths),
        count=request.count,
        reader=request.settings(),
        out=request.out,
        command=_typed_command(request.context),
        seed=request.seed,
        small=request.small,
        haystack=request.haystack,
        data=request.data,
        questions_per_document=request.questions_per_document,
        repeats=request.repeats,
        judge=_judge(request),
        limits=EvaluationLimits(request.max_questions, request.max_tokens_total, request.max_seconds),
        log=request.log,
        resume=request.resume,
        retry_failed=request.retry_failed,
        checkpoints=not request.no_checkpoints,
        keep_documents=request.keep_documents,
        quiet=request.quiet or request.as_json,
    )


def _judge(request: Eval) -> ReadSettings | None:
    from memagent_graph.settings import ReadSettings  # noqa: PLC0415

    if request.judge_model is None and request.judge_base_url is None:
        return None
    return ReadSettings(
        model=request.judge_model,
        base_url=request.judge_base_url or request.base_url,
        api_key=request.judge_api_key or (None if request.judge_base_url else request.api_key),
        concurrency=request.concurrency,
        timeout=request.timeout,
        retries=request.retries,
    ).resolve()


def _print_names(*, as_json: bool) -> None:
    from memagent_evaluation.suites import SUITES  # noqa: PLC0415
    from memagent_evaluation.systems import system_names  # noqa: PLC0415
    from memagent_evaluation.tasks import task_names, task_options  # noqa: PLC0415

    if as_json:
        print_json({"tasks": task_names(), "suites": SUITES, "systems": system_names()})
        return
    tasks = ["".join([name, *(f"[:{option}=...]" for option in task_options(name))]) for name in task_names()]
    suites = [f"{name}: {', '.join(own)}" for name, own in SUITES.items()]
    for kind, names in (("tasks", tasks), ("suites", suites), ("systems", system_names())):
        typer.echo(f"{kind}:\n" + "\n".join(f"  {name}" for name in names))


def _print_how_to_continue(folder: Path, why: str = "") -> None:
    """Print how to continue an evaluation that ended early. Other errors say it themselves, or end it for good."""
    from memagent_evaluation.result_journal import JOURNAL  # noqa: PLC0415

    if (folder / JOURNAL).exists():
        typer.echo(f"{why}{_how_to_continue(folder)}", err=True)


def _how_to_continue(folder: Path) -> str:
    return f"nothing in {folder} is lost; continue with the same command and --resume"


def _typed_command(context: typer.Context) -> str:
    """Return what was typed, without keys."""
    words = ["memagent", "eval", *(context.params["tasks"] or ())]
    for parameter in context.command.params:
        name = parameter.name or ""
        origin = context.get_parameter_source(name)
        if origin is None or origin.name != "COMMANDLINE" or name in {"tasks", "api_key", "judge_api_key"}:
            continue
        value = context.params[name]
        option = max(parameter.opts, key=len)
        if name in {"base_url", "judge_base_url"}:
            value = without_password(value)
        words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def register(app: typer.Typer) -> None:
    """Add `memagent eval` to a command line."""
    add_command(app, "eval", Eval)
