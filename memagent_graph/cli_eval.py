"""The command line's part for evaluation: `memagent eval | eval-report`."""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memagent_graph.cli_json import print_json
from memagent_graph.cli_options import (
    AnswerForm,
    AnswerTemplate,
    ApiKey,
    AsJSON,
    BaseURL,
    ChunkBoundary,
    ChunkTokens,
    ContextWindow,
    EmptyMemory,
    Layout,
    MaxSeconds,
    MaxTokensTotal,
    MemoryTokens,
    Model,
    OnInvented,
    ProfileSpec,
    QuestionTokens,
    Quiet,
    Retries,
    Temperature,
    Timeout,
    TokenizerSpec,
    TopP,
    UpdateTemplate,
)
from memagent_graph.errors import EvaluationError, PolicyError
from memagent_graph.exit_codes import ExitCode, failures_told
from memagent_graph.policies.server_url import without_password

if TYPE_CHECKING:
    from memagent_graph.evaluation.request import EvaluationRequest
    from memagent_graph.evaluation.result_table import Results

_FOLDER: Final = Path("memagent-eval")


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
        str | None,
        typer.Option(
            help="Document lengths, in the tasks' unit (tokens, passages). 1k is 1024, 1M is 1024k.",
            show_default="8k,32k,128k; passages: 50,200,800; data files: all theirs",
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "--n",
            "-n",
            min=1,
            help="Questions of each task at each length; of a data file that has fewer, without --lengths, all.",
        ),
    ] = 128,
    systems: Annotated[str, typer.Option(help="What is measured; others are compared with the first.")] = "memagent",
    model: Model = None,
    base_url: BaseURL = None,
    api_key: ApiKey = None,
    tokenizer: TokenizerSpec = None,
    profile: ProfileSpec = None,
    layout: Layout = None,
    answer_format: AnswerForm = None,
    update_template: UpdateTemplate = None,
    answer_template: AnswerTemplate = None,
    empty_memory: EmptyMemory = None,
    context_window: ContextWindow = None,
    question_tokens: QuestionTokens = None,
    memory_tokens: MemoryTokens = None,
    chunk_tokens: ChunkTokens = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Bound of the answer; more where a task needs more.", show_default="the policy's, or 1024"),
    ] = None,
    boundary: ChunkBoundary = None,
    on_invented: OnInvented = None,
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
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Ask for token ids and log-probs and log them, so that the runs can be trained on; without it the log "
            "has their texts alone.",
        ),
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions, and requests, in flight.")] = 128,
    timeout: Timeout = 300.0,
    retries: Retries = 4,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many questions; can be resumed.")
    ] = None,
    max_tokens_total: MaxTokensTotal = None,
    max_seconds: MaxSeconds = None,
    out: Annotated[Path, typer.Option(help="Folder for results, report, plots and run log.")] = _FOLDER,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder, or add to it.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: ask again what counts as failed.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="SQLite file for the run log.", show_default="runs.sqlite in the folder"),
    ] = None,
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Resume to the question only, not to the chunk.")
    ] = False,
    keep_documents: Annotated[
        bool,
        typer.Option(
            "--keep-documents", help="Keep the texts in the folder, so that `memagent show` has the chunks, too."
        ),
    ] = False,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Measure a policy on long documents, beside what one would do without MemAgent: accuracy, costs, failures."""
    given = locals()
    if list_:
        _print_names(as_json=as_json)
        return
    if not tasks:
        raise typer.BadParameter("name at least one; --list names all", param_hint="'TASKS'")
    from memagent_graph.evaluation.harness import Ended  # noqa: PLC0415
    from memagent_graph.evaluation.output_folder import write_outputs  # noqa: PLC0415
    from memagent_graph.evaluation.request import carry_out  # noqa: PLC0415
    from memagent_graph.evaluation.result_journal import require_no_results  # noqa: PLC0415
    from memagent_graph.evaluation.result_table import Outcome  # noqa: PLC0415

    with failures_told(as_json=as_json):
        request = _request(given, _command(context))
        if not resume:
            require_no_results(out)
        try:
            ended = asyncio.run(carry_out(request))
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        except PolicyError:
            _tell_how_to_go_on(out)
            raise
        except (KeyboardInterrupt, asyncio.CancelledError):
            _tell_how_to_go_on(out, "interrupted; ")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        results = write_outputs(request.out, request.log_path)
    _print_results(results, out, request.log_path, ended.value, as_json=as_json)
    if ended is not Ended.DONE:
        typer.echo(f"stopped at {ended.value.replace('_', ' ')}; {_go_on(out)}", err=True)
        raise typer.Exit(ExitCode.STOPPED)
    if all(row.outcome is Outcome.FAILED for row in results.rows):
        raise typer.Exit(ExitCode.POLICY)


def eval_report(
    folder: Annotated[Path, typer.Argument(help="A folder that `memagent eval` wrote to.")],
    other: Annotated[
        Path | None, typer.Argument(help="Another one, to be compared on the questions that both have.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Make tables and plots anew from an evaluation's results, finished or not, or compare two evaluations."""
    from memagent_graph.evaluation.comparisons import comparison, render_comparison  # noqa: PLC0415
    from memagent_graph.evaluation.output_folder import RUNS, write_outputs  # noqa: PLC0415
    from memagent_graph.evaluation.result_journal import load_results  # noqa: PLC0415

    with failures_told(as_json=as_json):
        if other is None:
            log = folder / RUNS if (folder / RUNS).exists() else None
            results = write_outputs(folder, log)
            _print_results(results, folder, log, "unfinished" if results.missing else "done", as_json=as_json)
            return
        first, second = load_results(folder), load_results(other)
        names = (str(folder), str(other))
        if as_json:
            print_json({"first": names[0], "second": names[1], "comparisons": comparison(first, second, names)})
        else:
            sys.stdout.write(render_comparison(first, second, names))


def _request(given: dict[str, Any], command: str) -> EvaluationRequest:
    """What was asked for, from the command's parameters by name.

    Raises:
        EvaluationError: lengths that are none, or no system.
    """
    from memagent_graph.evaluation.harness import EvaluationLimits  # noqa: PLC0415
    from memagent_graph.evaluation.planning import parse_lengths  # noqa: PLC0415
    from memagent_graph.evaluation.request import EvaluationRequest  # noqa: PLC0415
    from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

    systems = tuple(dict.fromkeys(filter(None, (each.strip() for each in given["systems"].split(",")))))
    if not systems:
        raise EvaluationError("no system was named", hint="Name at least one, as in --systems memagent.")
    names = {each.name for each in fields(ReaderSettings)}
    reader = ReaderSettings(**{name: given[name] for name in names & given.keys()})
    as_given = {each.name for each in fields(EvaluationRequest)} & given.keys()
    return EvaluationRequest(
        **{name: given[name] for name in as_given}
        | {
            "tasks": tuple(given["tasks"]),
            "systems": systems,
            "lengths": None if given["lengths"] is None else parse_lengths(given["lengths"]),
            "count": given["n"],
            "reader": reader.with_server_of_environment(),
            "limits": EvaluationLimits(given["max_questions"], given["max_tokens_total"], given["max_seconds"]),
            "checkpoints": not given["no_checkpoints"],
            "quiet": given["quiet"] or given["as_json"],
            "command": command,
        }
    )


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
        print_json(values)
        return
    sys.stdout.write(render_report(results, log=log))
    typer.echo(f"table, report and plots are in {folder}", err=True)


def _print_names(*, as_json: bool) -> None:
    from memagent_graph.evaluation.systems import system_names  # noqa: PLC0415
    from memagent_graph.evaluation.tasks import task_names  # noqa: PLC0415

    if as_json:
        print_json({"tasks": task_names(), "systems": system_names()})
        return
    for kind, names in (("tasks", task_names()), ("systems", system_names())):
        typer.echo(f"{kind}:\n" + "\n".join(f"  {name}" for name in names))


def _tell_how_to_go_on(folder: Path, why: str = "") -> None:
    """What to do about an evaluation that ended early. Other errors say it themselves, or are no reason to go on."""
    from memagent_graph.evaluation.result_journal import JOURNAL  # noqa: PLC0415

    if (folder / JOURNAL).exists():
        typer.echo(f"{why}{_go_on(folder)}", err=True)


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
        if name == "base_url":
            value = without_password(value)
        words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
