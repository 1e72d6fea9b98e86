"""The common parts of `memagent read` and `memagent resume`: files, limits, and the end of a run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memagent_graph.cli.exit_codes import ExitCode, choose_exit_code, report_failures
from memagent_graph.cli.options import (
    CheckpointsOption,
    JSONOption,
    LogOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    QuietOption,
    StoreOption,
)
from memagent_graph.errors import DocumentError, MemAgentError

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
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
            hint = f"Give one file, or read all of them into a table: `memagent corpus {path} -q QUESTION --out TABLE`."
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
        console.print_policy(f"{strategy}; {tokens:,} tokens in a chunk{budget_note}")

    def format_resume_command(self, run_id: str) -> str:
        """Return the command that continues a run (or the runs with a common prefix) with the same files."""
        from memagent_graph.policies.server_url import remove_password
        from memagent_graph.storage.checkpoints import display_checkpoints

        arguments = ["memagent", "resume", run_id]
        if self.base_url and (self.api_key or os.environ.get("OPENAI_API_KEY")):  # a key is sent only to a named server
            arguments += ["--base-url", remove_password(self.base_url)]
        for option, path in (("--checkpoints", self.checkpoints), ("--store", self.store), ("--log", self.log)):
            arguments += [option, display_checkpoints(path)] if path else []
        return shlex.join(arguments)

    def run_to_end(self, run: Callable[[Console], Coroutine[Any, Any, list[ReadResult | Exception]]]) -> None:
        """Run to the end, print the outcomes, and exit with the code of the first failure or stop."""
        import asyncio
        import signal

        from memagent_graph.cli.console import Console
        from memagent_graph.events import StopReason

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
                raise typer.Exit(console.report_error(MemAgentError(str(error)), ExitCode.SETTINGS)) from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise typer.Exit(console.report_interruption(ExitCode.INTERRUPTED)) from None
        console.print_results(outcomes, updates=self.updates)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, MemAgentError)]:
            raise typer.Exit(choose_exit_code(errors[0]))
        reasons = {outcome.stop_reason for outcome in outcomes if not isinstance(outcome, Exception)}
        if any(reason.resumable for reason in reasons):
            raise typer.Exit(ExitCode.STOPPED)
        if reasons & {StopReason.NO_ANSWER, StopReason.INVALID_ANSWER}:
            raise typer.Exit(ExitCode.NO_ANSWER)
