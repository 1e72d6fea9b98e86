"""The progress of a command on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES: Final = 10.0


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
    """Shows the progress of a command. Use it as a context manager. Other threads may call `update`.

    Args:
        description: a word for the activity, such as "reading".
        quiet: whether to show nothing.
        console: the console, by default on standard error.
        as_percentage: whether to show a percentage and the remaining time, instead of a count.
    """

    def __init__(
        self, description: str, *, quiet: bool = False, console: Console | None = None, as_percentage: bool = False
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
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
