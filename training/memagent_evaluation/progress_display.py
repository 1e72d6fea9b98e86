"""Shows an evaluation while it runs: progress, accuracy so far, the remaining time.

On a terminal a bar, otherwise a line once a minute; in both cases on standard error.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Final

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from memagent_evaluation.markdown_tables import length_label
from memagent_evaluation.result_table import Key, Outcome, Plan, Row
from memagent_evaluation.samples import Sample

_SECONDS_BETWEEN_LINES: Final = 60.0


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the progress of one evaluation; a `Watcher` of the harness.

    Args:
        quiet: show nothing.
        console: where it is shown; standard error if it is left out.
    """

    def __init__(self, *, quiet: bool = False, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("evaluating", total=None, told="")
        self._right: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._total = self._done = self._failed = self._tokens = 0
        self._work_left = self._work_done = self._work_under_way = 0
        self._began = self._told_last = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begins(self, plan: Plan, rows: Mapping[Key, Row]) -> None:
        """The evaluation begins, or continues with existing rows."""
        keys = list(dict.fromkeys(plan.keys()))
        self._total = len(keys)
        for key in keys:
            if (row := rows.get(key)) is not None:
                self._count(row)
            else:
                self._work_left += key[2]
        self._began = self._told_last = time.monotonic()
        self._bar.update(self._task, total=self._total, completed=self._done)

    def asks(self, system: str, sample: Sample) -> None:
        """A question is begun."""
        self._work_under_way += sample.length

    def has(self, row: Row) -> None:
        """There is a new row."""
        self._count(row)
        self._work_under_way -= row.length
        self._tokens += row.prompt_tokens + row.completion_tokens
        self._work_done += row.length
        self._work_left -= row.length
        self._bar.update(self._task, completed=self._done, told=self.told)
        now = time.monotonic()
        if not self._quiet and not self._console.is_terminal and now - self._told_last >= _SECONDS_BETWEEN_LINES:
            self._told_last = now
            self._console.print(f"{self._done:,} of {self._total:,}: {self.told}", markup=False, soft_wrap=True)

    @property
    def told(self) -> str:
        """Accuracy so far by length (lenient), failures, tokens a second, and the time left."""
        lengths = " ".join(
            f"{length_label(length, unit)} {100 * sum(values) / len(values):.0f}%"
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

    def _count(self, row: Row) -> None:
        self._done += 1
        self._failed += row.outcome is Outcome.FAILED
        if row.outcome is not Outcome.DOES_NOT_FIT:
            self._right[row.unit, row.length].append(row.lenient)
