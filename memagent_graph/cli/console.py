"""The command line's output: progress, results and errors. Standard output is only for results."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self, TypeVar

import rich.markup
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from memagent_graph.cli.options import print_json
from memagent_graph.errors import BudgetError, MemAgentError, RunHeldError, RunMismatchError, StrategyError
from memagent_graph.events import EventKind, StopReason, count_events
from memagent_graph.plain_text import format_count, make_one_line, make_printable
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate

T = TypeVar("T")
_SECONDS_BETWEEN_LINES: Final = 10.0


def escape(text: str) -> str:
    """Return a text without control characters and with escaped markup."""
    return rich.markup.escape(make_printable(text))


def describe_progress(
    seconds: float, command_figures: str, *, failed: int, tokens: int, done_work: float, work_left: float
) -> str:
    """Return the status of a command: its figures, failures, tokens per second, and the estimated time left.

    Args:
        seconds: the time since the beginning.
        command_figures: figures of the command.
        failed: the number of failures.
        tokens: the number of tokens since the beginning.
        done_work: the amount of work since the beginning; 0 if the time left cannot be estimated.
        work_left: the amount of work that is left.
    """
    figures = [command_figures, f"{failed:,} failed" if failed else "", f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"]
    if done_work:
        figures.append(f"{timedelta(seconds=round(seconds * max(0, work_left) / done_work))} left")
    return ", ".join(filter(None, figures))


class ProgressDisplay:
    """Shows the progress of a command: a bar on a terminal, otherwise a line every few seconds.

    Use it as a context manager. Other threads may call `update`.

    Args:
        description: a word for the activity, such as "reading".
        quiet: whether to show nothing.
        console: the console, by default on standard error.
        as_percentage: whether to show a percentage and the remaining time, instead of a count.
    """

    def __init__(
        self, description: str, *, quiet: bool = False, console: RichConsole | None = None, as_percentage: bool = False
    ) -> None:
        self._console = console or RichConsole(stderr=True, highlight=False, emoji=False)
        self._description = description
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn() if as_percentage else MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            *((TimeRemainingColumn(),) if as_percentage else ()),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(description, total=None, status="")
        self._last_print_time = time.monotonic()

    def update(self, completed: float, status: str = "", *, total: int | None = None) -> None:
        """Show the number of completed units.

        Args:
            completed: the number of units.
            status: further figures, such as tokens per second.
            total: the total number of units, if it is known or has changed.
        """
        self._bar.update(self._task, completed=completed, status=status, total=total)
        now = time.monotonic()
        if self._quiet or self._console.is_terminal or now - self._last_print_time < _SECONDS_BETWEEN_LINES:
            return
        self._last_print_time = now
        total_units = self._bar.tasks[0].total
        count = f"{completed:,}" if total_units is None else f"{completed:,} of {int(total_units):,}"
        line = f"{self._description}: {count}" + (f", {status}" if status else "")
        self._console.print(line, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


class Console:
    """The output of a command. With `as_json`, all that it prints on standard output is one JSON object."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.out = RichConsole(highlight=False, soft_wrap=True, emoji=False)  # a text may have ":x:"
        self.err = RichConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self._shows_notes = not (as_json or quiet)
        self._is_quiet = quiet or not self.err.is_terminal
        if quiet and logging.lastResort:  # the handler of last resort prints warnings
            logging.lastResort.setLevel(logging.ERROR)
        self.resume_command: str | None = None
        """The command that resumes the run; None until the run has begun."""

    def print_note(self, note: str) -> None:
        """Print a note on standard error, such as the policy and the reason for its choice."""
        if self._shows_notes:
            self.err.print(f"[dim]{escape(note)}[/]")

    def show_status(self, activity: str) -> AbstractContextManager[object]:
        """Return a context manager that shows an activity on a terminal while its body runs."""
        return nullcontext() if self._is_quiet else self.err.status(f"[dim]{activity}[/]")

    async def follow_questions(self, read: Callable[[Callable[[str, MemoryUpdate], None]], Awaitable[T]]) -> T:
        """Await a read of many questions and show its progress. `read` gets a function to call with each update."""
        return await self.follow_documents(1, lambda show: read(partial(show, "")))

    async def follow_documents(
        self, document_count: int, read: Callable[[Callable[[str, str, MemoryUpdate], None]], Awaitable[T]]
    ) -> T:
        """Await reads of several documents and show their progress. `read` gets a function to call with each update."""
        with ProgressDisplay("reading", quiet=self._is_quiet, console=self.err, as_percentage=True) as display:
            shares_by_document = dict[str, dict[str, float]]()

            def show(document: str, question: str, update: MemoryUpdate) -> None:
                shares = shares_by_document.setdefault(document, {})
                shares[question] = max(update.progress or 0.0, shares.get(question, 0.0))
                completed = sum(min(shares.values()) for shares in shares_by_document.values())
                chunk = "" if update.chunk_number is None else f"chunk {update.chunk_number}"
                status = chunk if document_count == 1 else f"{int(completed)} of {document_count} documents"
                display.update(completed, status, total=None if update.progress is None else document_count)

            return await read(show)

    def print_results(self, outcomes: Sequence[ReadResult | Exception], *, updates: bool = False) -> None:
        """Print the outcomes of one or more questions. In JSON, several outcomes are a list, failures included.

        Raises:
            Exception: an outcome is an unexpected error.
        """
        if self.as_json:
            values = [
                outcome.to_dict(updates=updates) if isinstance(outcome, ReadResult) else _collect_error_values(outcome)
                for outcome in outcomes
            ]
            print_json(values[0] if len(outcomes) == 1 else {"results": values})
        for index, outcome in enumerate(() if self.as_json else outcomes):
            if index:
                self.out.print()
            if isinstance(outcome, ReadResult):
                self.print_result(outcome)
            elif isinstance(outcome, MemAgentError):
                self._print_field("error", outcome.message)
                self.report_error(outcome)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, MemAgentError):
                raise outcome

    def print_result(self, result: ReadResult) -> None:
        """Print question, answer and evidence on standard output, and facts about the read on standard error.

        The parts have a label and a colon at the beginning of a line. Further lines are indented by two spaces, so an
        empty line only separates questions.
        """
        self._print_field("question", result.question)
        if result.answer is None:
            self._print_field(
                "stopped", f"{result.stop_reason.value} after {format_count(result.chunks_read, 'chunk')}"
            )
            self._print_field("memory", result.memory or "(empty)")
        else:
            self._print_field("answer", result.answer)
            for sentence, quote in result.view().list_sentences():
                location = quote.place or f"chunk {quote.chunk_index + 1}"
                self._print_field("evidence", f'"{" ".join(sentence.split())}" ({make_one_line(location)})')
        if not result.is_whole or result.answer is None:
            self._print_field("read", result.extent)
        if result.stop_reason is StopReason.INVALID_ANSWER:
            reason = next(
                (event.detail for event in reversed(result.events) if event.kind is EventKind.INVALID_ANSWER), ""
            )
            self.err.print(f"[yellow]the answer does not fit the schema:[/] {escape(reason)}")
        for kind, count in count_events(result.events).items():
            self.err.print(f"[yellow]{kind.value}: {count}[/]")
        usage = result.usage
        savings = ""
        if result.chunks_read > 1 and usage.flops and (usage.full_context_flops or 0.0) > usage.flops:
            factor = (usage.full_context_flops or 0.0) / usage.flops
            savings = f", about {factor:.1f} times fewer operations than one full-context call"
        read, turns = format_count(result.chunks_read, "chunk"), format_count(usage.turns, "turn")
        if not result.chunks_read and (tokens := result.trace.tokens_shown):
            read = f"{tokens:,} of {usage.document_tokens:,} tokens shown"
        self.err.print(
            f"[dim]{read} by {escape(result.model)} ({escape(result.strategy)}), "
            f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens in {turns}, "
            f"{usage.seconds:.1f} s{savings}; run {escape(result.run_id)}[/]"
        )
        if result.stop_reason.resumable and self.resume_command:
            self.err.print(f"continue with: {escape(self.resume_command)}")

    def _print_field(self, label: str, text: str) -> None:
        """Print a labelled text on standard output."""
        lines = make_printable(text).splitlines() or [""]
        self.out.print(f"[bold]{label}:[/] {rich.markup.escape(lines[0])}")
        for line in lines[1:]:
            self.out.print(f"  {line}", markup=False)

    def report_error(self, error: MemAgentError) -> None:
        """Print an error with its remedy."""
        if self.as_json:
            print_json(_collect_error_values(error))
        self.err.print(f"[red]error:[/] {escape(error.message)}")
        if error.hint:
            self.err.print(f"[bold]what to do:[/] {escape(error.hint)}")
        if error.run_id and self.resume_command and not isinstance(error, _NOT_RESUMABLE):
            position = "" if error.chunk_index is None else f" at chunk {error.chunk_index + 1}"
            command = self.resume_command
            if served_model := getattr(error, "served_model", ""):
                command += f" --model {shlex.quote(served_model)}"
            self.err.print(f"nothing is lost: the run stopped{position}; continue with: {escape(command)}")

    def report_interruption(self) -> None:
        """Print that the read was interrupted."""
        how = f"; continue with: {escape(self.resume_command)}" if self.resume_command else ""
        self.err.print(f"[yellow]interrupted[/]{how}")


_NOT_RESUMABLE: Final = (BudgetError, RunHeldError, RunMismatchError, StrategyError)
"""Errors that the same command would raise again."""


def _collect_error_values(error: Exception) -> dict[str, Any]:
    values = {name: getattr(error, name, None) for name in ("message", "hint", "run_id", "chunk_index")}
    return {"error": {"type": type(error).__name__, **values}}
