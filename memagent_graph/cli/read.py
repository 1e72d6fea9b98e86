"""`memagent read` and `memagent resume`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer

from memagent_graph.cli.exit_codes import ExitCode, choose_exit_code, report_failures
from memagent_graph.cli.options import (
    CheckpointsOption,
    JSONOption,
    LogOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    QuietOption,
    ReaderOptions,
    StoreOption,
    expand_questions,
    open_reader,
)
from memagent_graph.cli.run_choice import RunArgument, find_read_id, find_runs_to_resume, list_open_questions, open_log
from memagent_graph.errors import DocumentError, MemAgentError, PolicyAuthenticationError, RunError, RunNotFoundError
from memagent_graph.events import StopReason
from memagent_graph.plain_text import format_count
from memagent_graph.policies.server_url import NO_KEY, remove_credentials
from memagent_graph.settings import ReadSettings, SamplingSettings

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.concurrency.shared_pass import Barrier
    from memagent_graph.reader import MemAgent
    from memagent_graph.reading.state import Limits
    from memagent_graph.results import ReadResult


_MIN_USUAL_CHUNK_TOKENS: Final = 64
"""Fewer tokens per chunk are probably a mistake, because the prompt template is as long."""


def require_file(path: Path) -> Path:
    """Return the path of a document that exists.

    Raises:
        DocumentError: the file does not exist, or is a folder.
    """
    if re.match(r"https?:/", str(path)):
        hint = "Save it as a file and read that, or pipe it: curl -L URL | memagent read - -q QUESTION."
        raise DocumentError("a web address was given, and only files are read here", hint=hint)
    try:
        if path.is_dir():
            command = f"memagent corpus {shlex.quote(str(path))} -q QUESTION --out TABLE"
            hint = f"Give one file, or read all of them into a table: `{command}`."
            raise DocumentError(f"{path} is a folder", hint=hint)
        path.stat()
    except FileNotFoundError:
        hint = "Check the path; `-` reads standard input."
        raise DocumentError(f"the file {path} does not exist", hint=hint) from None
    except (OSError, ValueError):
        return path  # opening it raises a better error
    return path


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for starting or continuing a run."""

    base_url: str | None = None
    api_key: str | None = None
    encoding: Annotated[str | None, typer.Option(help="The document's charset.", show_default="detected")] = None
    max_chunks: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many chunks. The run can be resumed.")
    ] = None
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    checkpoints: CheckpointsOption = None
    store: StoreOption = None
    log: LogOption = None
    updates: Annotated[bool, typer.Option("--updates", help="Add the memory after every chunk to the JSON.")] = False
    as_json: JSONOption = False
    quiet: QuietOption = False

    @property
    def limits(self) -> Limits:
        """The limits of the call."""
        from memagent_graph.reading.state import Limits

        return Limits(max_chunks=self.max_chunks, max_tokens_total=self.max_tokens_total, max_seconds=self.max_seconds)

    async def prepare(self, reader: MemAgent, console: Console) -> None:
        """Ask the policy for missing settings, and print the strategy and the length of chunks."""
        with console.show_status("asking the policy"):
            context = await reader.aprepare()
        excerpt_note = "" if reader.strategy.reads_all else ", which shows the policy only a part of the document"
        tokens = context.budget.chunk_tokens
        budget_note = (
            "; each such short chunk costs a call with the whole prompt" if tokens < _MIN_USUAL_CHUNK_TOKENS else ""
        )
        strategy = f"strategy {reader.strategy.name}{excerpt_note}"
        console.print_note(f"{strategy}; {tokens:,} tokens in a chunk{budget_note}")

    def format_resume_command(self, run_id: str) -> str:
        """Return the command that continues a run (or the runs with a common prefix) with the same files."""
        from memagent_graph.storage.checkpoints import display_checkpoints

        arguments = ["memagent", "resume", run_id]
        address = remove_credentials(self.base_url) if self.base_url else ""
        # A key is sent only to a named server, and one in the address is not in the log.
        if address and (self.api_key or os.environ.get("OPENAI_API_KEY") or address != self.base_url):
            arguments += ["--base-url", address]
        for option, path in (("--checkpoints", self.checkpoints), ("--store", self.store), ("--log", self.log)):
            arguments += [option, display_checkpoints(path)] if path else []
        return shlex.join(arguments)

    def run_to_end(self, run: Callable[[Console], Coroutine[Any, Any, list[ReadResult | Exception]]]) -> None:
        """Run to the end, print the outcomes, and exit with the code of the first failure or stop."""
        import asyncio

        from memagent_graph.cli.console import Console

        async def run_until_signal(console: Console) -> list[ReadResult | Exception]:
            """Await `run`, and treat SIGTERM like Ctrl-C."""
            task = asyncio.current_task()
            if task is not None and os.name == "posix":
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            return await run(console)

        if self.updates and not self.as_json:
            raise typer.BadParameter("the updates are a part of the JSON; add --json", param_hint="'--updates'")
        console = Console(as_json=self.as_json, quiet=self.quiet)
        with report_failures(console):
            try:
                outcomes = asyncio.run(run_until_signal(console))
            except ValueError as error:
                console.report_error(MemAgentError(str(error)))
                raise typer.Exit(ExitCode.SETTINGS) from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                console.report_interruption()
                raise typer.Exit(ExitCode.INTERRUPTED) from None
        console.print_results(outcomes, updates=self.updates)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, MemAgentError)]:
            raise typer.Exit(choose_exit_code(errors[0]))
        reasons = {outcome.stop_reason for outcome in outcomes if not isinstance(outcome, Exception)}
        if any(reason.resumable for reason in reasons):
            raise typer.Exit(ExitCode.STOPPED)
        if reasons & {StopReason.NO_ANSWER, StopReason.INVALID_ANSWER}:
            raise typer.Exit(ExitCode.NO_ANSWER)


@dataclass(frozen=True, kw_only=True)
class Read(ReaderOptions, SamplingSettings, RunOptions):
    """Read a document and answer one question about it, or several."""

    examples: ClassVar = (
        'memagent read book.txt -q "Who built the lighthouse?" --base-url http://localhost:8000/v1',
        'memagent read report.pdf -q "What did it cost?" -q "Who paid?" --json',
        "memagent read book.txt -q @questions.txt --model english",
        'memagent read contract.pdf --pages 5-10 -q "When can it be terminated?" --boundary heading',
        'memagent read filing.html -q "What does the filing say of revenue?" --schema filing.py:Filing --json',
        'cat notes.txt | memagent read - -q "What was decided?"',
    )
    document: Annotated[str, typer.Argument(help="The document's path, or - for standard input.")]
    question: Annotated[
        list[str],
        typer.Option(
            "--question",
            "-q",
            help="The question. Repeat the option for several questions. @FILE is a file with one question per line.",
        ),
    ]
    schema: Annotated[
        str | None,
        typer.Option(
            help="The form of the answer: a file with a JSON schema, or a Pydantic model as path/to/file.py:Model. The "
            "answer is then JSON; each reply is checked, and repaired if it does not have the form.",
            show_default="an answer in words",
        ),
    ] = None
    pages: Annotated[
        str | None,
        typer.Option(help="The pages of a PDF file to read: 5, 5-10, 12- (to the end) or 1-3,7.", show_default="all"),
    ] = None
    run_id: Annotated[str | None, typer.Option(help="Your own id for the run. A run with the same id is replaced.")] = (
        None
    )
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep nothing of the read: no log, no document, no state to resume from.")
    ] = False

    def run(self) -> None:
        """Run the command."""

        async def run(console: Console) -> list[ReadResult | Exception]:
            from memagent_graph.documents import Document, open_store
            from memagent_graph.reading.run_history import await_result
            from memagent_graph.reading.state import new_run_id
            from memagent_graph.response_format import ResponseFormat

            questions = expand_questions(self.question)
            response_format = None if self.schema is None else ResponseFormat.load(self.schema)
            source = (
                Document.from_file(sys.stdin.buffer, encoding=self.encoding)
                if self.document == "-"
                else Document.from_path(require_file(Path(self.document)), encoding=self.encoding)
            ).only(self.pages)
            run_id = self.run_id or new_run_id()
            options: Any = {"response_format": response_format, "run_id": run_id, "limits": self.limits}
            # The document comes first: an unreadable one is reported at once, and a policy may take seconds to load.
            store = open_store(store_url).with_options(
                converter=self.converter, replace_undecodable=self.replace_undecodable
            )
            with console.show_status("reading the file"):
                reference = await store.add_async(source)
            settings = self.make_settings()
            console.print_note(settings.policy_reason)
            with console.show_status("loading the policy"):
                reader = open_reader(self, settings, store=store, is_logged=not self.no_log)
            async with reader:
                await self.prepare(reader, console)
                if not self.no_log:
                    console.resume_command = self.format_resume_command(run_id)
                if len(questions) > 1:
                    return await console.follow_questions(
                        lambda show: reader.aread(
                            reference, questions=questions, on_update=show, return_exceptions=True,
                            max_concurrency=self.concurrency, **options,
                        )
                    )  # fmt: skip
                stream = reader.astream(reference, questions[0], **options)
                return [await console.follow_questions(lambda show: await_result(stream, partial(show, questions[0])))]

        is_temporary = self.no_log and self.store is None
        with tempfile.TemporaryDirectory() if is_temporary else nullcontext(self.store) as store_url:
            self.run_to_end(run)


@dataclass(frozen=True, kw_only=True)
class Resume(RunOptions):
    """Continue a run that was killed, failed, or stopped at a limit.

    For a read with several questions, give the id that its runs share: its open questions continue in one pass.
    """

    examples: ClassVar = (
        "memagent resume latest",
        "memagent resume 20261121-083011 --base-url http://localhost:8001/v1",
    )
    run_id: RunArgument
    document: Annotated[Path | None, typer.Option(help="The document, needed only if its stored text is missing.")] = (
        None
    )
    schema: Annotated[
        str | None,
        typer.Option(help="The form of the answer, as for `read`. It must equal the run's.", show_default="the run's"),
    ] = None
    policy: Annotated[str | None, typer.Option(help="Name of another policy.", show_default="the run's")] = None
    model: Annotated[str | None, typer.Option(help="Another model, as for `read`.", show_default="the run's")] = None
    base_url: Annotated[str | None, typer.Option(help="The current URL of the server.", show_default="the run's")] = (
        None
    )
    strategy: Annotated[str | None, typer.Option(help="Another strategy.", show_default="the run's")] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="As for `read`.", show_default="the run's")] = None
    timeout: Annotated[float | None, typer.Option(min=0.1, help="As for `read`.", show_default="the run's")] = None
    unsupported: Annotated[str | None, typer.Option(help="As for `read`.", show_default="the run's")] = None
    header: Any = None
    ca_file: str | None = None
    proxy: str | None = None

    def change_settings(self, settings: ReadSettings) -> ReadSettings:
        """Return a run's settings with the policy, its server and the other settings of the options.

        Key and headers are sent only to a server that the options or OPENAI_BASE_URL name.

        Raises:
            RunError: a key or a header is given, but only the log names the server.
        """
        is_server_from_log = settings.api_key == NO_KEY and self.policy is None and self.base_url is None
        if is_server_from_log and (self.api_key or self.header):
            secret, server = "key" if self.api_key else "header", settings.base_url
            raise RunError(
                f"the {secret} is not sent to {server}: only the log names this server",
                hint=f"If it is your server, pass --base-url {server}.",
            )
        changes: dict[str, Any] = {"api_key": NO_KEY if is_server_from_log else self.api_key}
        if self.policy is not None:
            changes |= {"policy": self.policy, "model": self.model, "base_url": self.base_url}
        elif self.model is not None or self.base_url is not None:
            base_url = self.base_url or settings.base_url
            changes |= {"policy": None, "model": self.model or settings.model, "base_url": base_url}
        names = ("strategy", "concurrency", "timeout", "unsupported")
        changes |= {name: value for name in names if (value := getattr(self, name)) is not None}
        return settings.replace(header=self.header, ca_file=self.ca_file, proxy=self.proxy, **changes)

    def run(self) -> None:
        """Run the command."""

        async def run(console: Console) -> list[ReadResult | Exception]:
            from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, read_in_passes
            from memagent_graph.documents import Document
            from memagent_graph.reading.run_history import await_result, require_results
            from memagent_graph.response_format import ResponseFormat
            from memagent_graph.run_log import RunFilter
            from memagent_graph.strategies import load_strategy

            log = open_log(self.log)
            run_ids = find_runs_to_resume(log, self.run_id)
            run_id, read_id = run_ids[0], find_read_id(run_ids[0])
            if open_questions := {*list_open_questions(log, read_id)} - {*run_ids}:
                question_count = format_count(len(open_questions), "more question")
                command = self.format_resume_command(read_id)
                console.print_note(f"{question_count} of the same read without an answer; for all: {command}")
            settings = self.change_settings(ReadSettings.from_log(log.get(run_id).settings, run_id))
            if self.strategy is None:
                load_strategy(settings.strategy, allow_own_code=False)  # a log may come from others
            if settings.api_key == NO_KEY and list(log.runs(RunFilter(run_ids=[run_id], is_own=False))):
                raise RunError(
                    f"run {run_id} was imported, so its server URL, {settings.base_url}, is not trusted",
                    hint="Set the server yourself: --base-url URL.",
                )
            document = None
            if self.document is not None:
                document = Document.from_path(require_file(self.document), encoding=self.encoding)
            with console.show_status("loading the policy"):
                reader = open_reader(self, settings)
            async with reader:
                console.resume_command = self.format_resume_command(read_id if len(run_ids) > 1 else run_id)
                response_format = None if self.schema is None else ResponseFormat.load(self.schema)
                options: Any = {"document": document, "response_format": response_format, "limits": self.limits}

                async def resume_run(run_id: str, show: Callable[..., None], barrier: Barrier) -> ReadResult:
                    return await await_result(
                        reader.astream_resume(run_id, barrier=barrier, **options), partial(show, run_id)
                    )

                try:
                    await self.prepare(reader, console)
                    outcomes = await console.follow_questions(
                        lambda show: read_in_passes(
                            [partial(resume_run, run_id, show) for run_id in run_ids], MAX_SHARED_READS
                        )
                    )
                    all_failed = all(isinstance(outcome, Exception) for outcome in outcomes)
                    return [*require_results(outcomes)] if all_failed else outcomes
                except PolicyAuthenticationError as error:
                    if settings.api_key == NO_KEY:
                        server = settings.base_url
                        error.hint = f"Only the log names this server. If it is your server, pass --base-url {server}."
                    raise
                except RunNotFoundError as error:
                    if log.get(run_id).stop_reason is not None:
                        command = shlex.join(["memagent", "show", run_id])
                        error.hint = f"It was read without checkpoints, and has ended: {command}."
                    raise

        self.run_to_end(run)
