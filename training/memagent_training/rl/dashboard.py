"""Shows a loop while it runs, on standard error.

On a terminal it is a view that is kept up to date; on anything else a line per iteration and one per measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from memagent_training.rl.loop_journal import Measurement
from memagent_training.rl.loop_progress import LoopProgress
from memagent_training.rl.loop_view import iteration_line, measurement_line, rendered
from memagent_training.rl.watching import Phase

_REFRESHES_PER_SECOND: Final = 2


class Dashboard(LoopProgress):
    """Shows a loop; a context manager.

    Args:
        iterations: how many the loop has in all.
        quiet: show nothing.
        console: where it is shown; standard error if it is left out.
        clock: seconds, like `time.monotonic`.
    """

    def __init__(
        self,
        iterations: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(iterations, clock)
        self._console = console or Console(stderr=True, highlight=False)
        self._prints_lines = not quiet and not self._console.is_terminal
        self._live = Live(
            console=self._console, refresh_per_second=_REFRESHES_PER_SECOND, get_renderable=self._rendered
        )
        self._is_live = not quiet and self._console.is_terminal

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        super().ends()
        if self._is_live:
            self._live.transient = self.iteration is None  # an empty view before the error would be useless
            self._live.stop()

    def begins(self, iteration: int, phase: Phase) -> None:
        """See `Watcher`."""
        trained = self._in_training
        super().begins(iteration, phase)
        if trained is not None and trained != iteration:
            self._print(iteration_line(self, trained))

    def resumes(self, checkpoint: Path | None, passed_over: Sequence[Path]) -> None:
        """See `Watcher`."""
        for folder in passed_over:
            self._print(f"passed over {folder}, which was not written to its end")
        if checkpoint is not None:
            self._print(f"continuing from {checkpoint}")

    def measured(self, measurement: Measurement) -> None:
        """See `Watcher`."""
        super().measured(measurement)
        self._print(measurement_line(measurement))

    def ends(self, reason: str | None = None) -> None:
        """See `Watcher`."""
        trained = self._in_training
        super().ends(reason)
        if trained is not None:
            self._print(iteration_line(self, trained))

    @property
    def _in_training(self) -> int | None:
        return self.iteration if self.phase is Phase.TRAIN else None

    def _print(self, line: str) -> None:
        if self._prints_lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _rendered(self) -> RenderableType:
        with self.lock:
            return rendered(self, self._console.width)
