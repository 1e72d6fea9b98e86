"""The command line: `memagent read | resume | doctor | demo`, and the run log's commands from their own modules.

Exit codes: 0 answered, 2 wrong usage, 3 the document, 4 the policy or its server, 5 stopped at a limit and resumable,
6 no such run or another one, 7 settings that do not fit, 8 read to the end without an answer, 9 a policy that
collapsed while it was trained, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memagent_graph import cli_eval, cli_mcp, cli_rl, cli_runs, cli_show, cli_train
from memagent_graph.cli_json import print_json
from memagent_graph.cli_options import (
    AnswerForm,
    AnswerTemplate,
    AnswerTokens,
    ApiKey,
    AsJSON,
    BaseURL,
    BaseURLAlone,
    BaseURLOfRun,
    Checkpoints,
    ChunkBoundary,
    ChunkTokens,
    Concurrency,
    ContextWindow,
    EmptyMemory,
    Encoding,
    Layout,
    Log,
    MaxChunks,
    MaxSeconds,
    MaxTokensTotal,
    MemoryTokens,
    Model,
    ModelOfRun,
    OnInvented,
    ProfileSpec,
    QuestionTokens,
    Quiet,
    ReplaceUndecodable,
    Retries,
    Rule,
    Temperature,
    Timeout,
    TokenizerSpec,
    TopP,
    UpdateTemplate,
)
from memagent_graph.errors import MemAgentError
from memagent_graph.exit_codes import ExitCode, exit_code

if TYPE_CHECKING:
    from memagent_graph.console import Console
    from memagent_graph.reader import MemAgent
    from memagent_graph.reading.state import Limits
    from memagent_graph.results import ReadResult
    from memagent_graph.settings import ReaderSettings


app = typer.Typer(
    name="memagent",
    help="Read documents of any length with a language model of small context.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NoLog = Annotated[bool, typer.Option("--no-log", help="Keep no log; `memagent resume` then cannot find the run.")]
WithUpdates = Annotated[bool, typer.Option("--updates", help="Add the memory after every chunk to the JSON.")]


@app.command()
def read(
    document: Annotated[str, typer.Argument(help="The document's path, or - for standard input.")],
    question: Annotated[str, typer.Option("--question", "-q", help="What to find out.")],
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
    answer_tokens: AnswerTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    logprobs: Annotated[
        bool | None,
        typer.Option(
            "--logprobs/--no-logprobs",
            help="Ask for token ids and log-probs.",
            show_default="if logged, and the policy has them",
        ),
    ] = None,
    boundary: ChunkBoundary = None,
    on_truncated: Annotated[
        Rule, typer.Option(help="What to do with a memory that was cut off or is too long.")
    ] = "accept",
    on_empty: Annotated[Rule, typer.Option(help="With an empty one.")] = "keep_previous",
    on_refused: Annotated[Rule, typer.Option(help="With a refusal.")] = "keep_previous",
    on_invented: OnInvented = None,
    encoding: Encoding = None,
    replace_undecodable: ReplaceUndecodable = False,
    concurrency: Concurrency = 128,
    timeout: Timeout = 300.0,
    retries: Retries = 4,
    max_chunks: MaxChunks = None,
    max_tokens_total: MaxTokensTotal = None,
    max_seconds: MaxSeconds = None,
    run_id: Annotated[
        str | None, typer.Option(help="An id of your own for the run; one of that id is replaced.")
    ] = None,
    checkpoints: Checkpoints = None,
    log: Log = None,
    no_log: NoLog = False,
    updates: WithUpdates = False,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Read a document with a question in mind."""
    given = locals()

    async def run(console: Console) -> ReadResult:
        from memagent_graph.documents.store import Document, DocumentStore  # noqa: PLC0415
        from memagent_graph.reading.state import new_run_id  # noqa: PLC0415
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415
        from memagent_graph.storage.paths import default_store  # noqa: PLC0415

        names = {each.name for each in fields(ReaderSettings)}
        settings = ReaderSettings(**{name: value for name, value in given.items() if name in names})
        source = (
            Document.from_file(sys.stdin.buffer, encoding=encoding)
            if document == "-"
            else Document.from_path(Path(document), encoding=encoding)
        )
        name = run_id or new_run_id()
        # The document comes first: it costs little to find out that it cannot be read, and a policy may take seconds.
        reference = DocumentStore(default_store()).add(source, replace_undecodable=replace_undecodable)
        async with _reader(settings, api_key, checkpoints, False if no_log else log) as reader:
            if not no_log:
                console.resume_command = _resume_command(name, checkpoints, log)
            stream = reader.astream(
                reference, question, run_id=name, limits=_limits(max_chunks, max_tokens_total, max_seconds)
            )
            return await console.follow(stream)

    _finish(run, as_json=as_json, quiet=quiet, updates=updates)


@app.command()
def resume(
    run_id: Annotated[str, typer.Argument(help="The run, as `memagent read` named it.")],
    document: Annotated[Path | None, typer.Option(help="The document again, if its stored text is gone.")] = None,
    encoding: Encoding = None,
    model: ModelOfRun = None,
    base_url: BaseURLOfRun = None,
    api_key: ApiKey = None,
    max_chunks: MaxChunks = None,
    max_tokens_total: MaxTokensTotal = None,
    max_seconds: MaxSeconds = None,
    checkpoints: Checkpoints = None,
    log: Log = None,
    updates: WithUpdates = False,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was killed, failed, or stopped at a limit."""

    async def run(console: Console) -> ReadResult:
        from memagent_graph.documents.store import Document  # noqa: PLC0415
        from memagent_graph.run_log import RunLog  # noqa: PLC0415
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415
        from memagent_graph.storage.paths import default_run_log  # noqa: PLC0415

        record = RunLog(log or default_run_log()).get(run_id)
        settings = ReaderSettings.from_log(record.settings, run_id)
        settings = replace(settings, model=model or settings.model, base_url=base_url or settings.base_url)
        async with _reader(settings, api_key, checkpoints, log) as reader:
            console.resume_command = _resume_command(run_id, checkpoints, log)
            source = None if document is None else Document.from_path(document, encoding=encoding)
            stream = reader.astream_resume(
                run_id, document=source, limits=_limits(max_chunks, max_tokens_total, max_seconds)
            )
            return await console.follow(stream)

    _finish(run, as_json=as_json, quiet=quiet, updates=updates)


@app.command()
def doctor(
    model: Model = None,
    base_url: BaseURL = None,
    api_key: ApiKey = None,
    tokenizer: TokenizerSpec = None,
    profile: ProfileSpec = None,
    context_window: ContextWindow = None,
    chunk_tokens: ChunkTokens = None,
    timeout: Timeout = 60.0,
    as_json: AsJSON = False,
) -> None:
    """Check a policy: is the server there, what does it serve, does everything fit and agree?"""
    from memagent_graph.console import Console  # noqa: PLC0415
    from memagent_graph.doctor import Finding, Health, examine  # noqa: PLC0415
    from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

    settings = ReaderSettings(
        model=model,
        base_url=base_url,
        tokenizer=tokenizer,
        profile=profile,
        context_window=context_window,
        chunk_tokens=chunk_tokens,
        timeout=timeout,
        retries=0,
    )
    console = Console(as_json=as_json)

    async def run() -> list[Finding]:
        async with settings.with_server_of_environment().make_reader(api_key=api_key, run_log=False) as reader:
            findings = []
            async for finding in examine(reader):
                console.finding(finding)
                findings.append(finding)
            return findings

    try:
        findings = asyncio.run(run())
    except MemAgentError as error:
        raise typer.Exit(console.failure(error, exit_code(error))) from None
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    if any(finding.health is Health.BAD for finding in findings):
        raise typer.Exit(ExitCode.POLICY)


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=5_000, help="Length of the document, at least.")] = 100_000,
    questions: Annotated[int, typer.Option(min=1, max=50, help="How many facts to plant and ask for.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the facts and of their places.")] = 7,
    model: Model = None,
    base_url: BaseURLAlone = None,
    profile: ProfileSpec = None,
    on_invented: OnInvented = None,
    as_json: AsJSON = False,
) -> None:
    """Plant facts in real prose, read it with the embedded policy, and show what was found."""
    from memagent_graph.console import Console  # noqa: PLC0415
    from memagent_graph.demo import compose  # noqa: PLC0415
    from memagent_graph.documents.store import Document  # noqa: PLC0415
    from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

    console = Console(as_json=as_json)
    profile = profile or ("embedded" if base_url else None)
    settings = ReaderSettings(model=model, base_url=base_url, profile=profile, on_invented=on_invented)

    async def run(folder: Path) -> None:
        async with settings.make_reader(store=folder, run_log=False) as reader:
            context = await reader.aprepare()
            document = compose(context.tokenizer, tokens=tokens, questions=questions, seed=seed)
            reference = reader.store.add(Document.from_text(document.text, name="demo"))
            console.demo_begins(document, context.budget.chunk_tokens)
            streams = [reader.astream(reference, each.fact.question) for each in document.questions]
            results, seconds = await console.follow_all(
                streams, chunks=-(-document.tokens // context.budget.chunk_tokens)
            )
            console.demo_ends(document, results, seconds)

    try:
        with TemporaryDirectory() as folder:
            asyncio.run(run(Path(folder)))
    except MemAgentError as error:
        raise typer.Exit(console.failure(error, exit_code(error))) from None


cli_show.register(app)
cli_runs.register(app)
cli_eval.register(app)
cli_train.register(app)
cli_rl.register(app)
cli_mcp.register(app)


def main() -> None:
    """The `memagent` command."""
    # Threads that spin while they wait slow a local policy down manifold wherever something else is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app()


def _reader(
    settings: ReaderSettings, api_key: str | None, checkpoints: Path | None, log: Path | Literal[False] | None
) -> MemAgent:
    from memagent_graph.storage.paths import default_checkpoints  # noqa: PLC0415

    return settings.with_server_of_environment().make_reader(
        api_key=api_key,
        checkpoints=checkpoints or default_checkpoints(),
        run_log=True if log is None else log,
    )


def _resume_command(run_id: str, checkpoints: Path | None, log: Path | None) -> str:
    """What goes on with a run that is kept in these files, or in those of the home folder."""
    words = ["memagent", "resume", run_id]
    for option, path in (("--checkpoints", checkpoints), ("--log", log)):
        words += [option, str(path)] if path else []
    return shlex.join(words)


def _limits(max_chunks: int | None, max_tokens_total: int | None, max_seconds: float | None) -> Limits:
    from memagent_graph.reading.state import Limits  # noqa: PLC0415

    return Limits(max_chunks=max_chunks, max_tokens_total=max_tokens_total, max_seconds=max_seconds)


def _finish(
    run: Callable[[Console], Coroutine[Any, Any, ReadResult]], *, as_json: bool, quiet: bool, updates: bool
) -> None:
    """Run to the end, print the outcome, and leave with the exit code that says how it went."""
    from memagent_graph.console import Console  # noqa: PLC0415
    from memagent_graph.events import StopReason  # noqa: PLC0415

    console = Console(as_json=as_json, quiet=quiet)
    try:
        result = asyncio.run(run(console))
    except MemAgentError as error:
        raise typer.Exit(console.failure(error, exit_code(error))) from None
    except ValueError as error:
        raise typer.Exit(console.failure(MemAgentError(str(error)), ExitCode.SETTINGS)) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(console.interrupted(ExitCode.INTERRUPTED)) from None
    console.result(result, updates=updates)
    if result.stop_reason is StopReason.NO_ANSWER:
        raise typer.Exit(ExitCode.NO_ANSWER)
    if result.stop_reason.resumable:
        raise typer.Exit(ExitCode.STOPPED)
