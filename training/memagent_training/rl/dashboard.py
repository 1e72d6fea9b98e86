"""Shows a loop while it goes on, on standard error.

On a terminal it is a view that is kept up to date; on anything else a line per iteration and one per measurement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.rl.loop_progress import LoopProgress
from memagent_training.rl.loop_view import iteration_line, measurement_line, rendered
from memagent_training.rl.watching import Phase, Watcher
from memagent_training.serving.policy_sync import Served

_REFRESHES_PER_SECOND: Final = 2


class Dashboard(Watcher, AbstractContextManager["Dashboard"]):
    """Shows a loop, from when it is entered until it is left.

    Args:
        iterations: how many the loop has in all.
        quiet: show nothing.
        console: where it is shown; standard error if it is left out.
        clock: seconds, as of `time.monotonic`.
    """

    def __init__(
        self,
        iterations: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._lock = threading.RLock()  # measurements come from another thread, and the view is drawn by a third
        self.progress = LoopProgress(iterations, clock())
        self._tells_lines = not quiet and not self._console.is_terminal
        self._live = Live(
            console=self._console, refresh_per_second=_REFRESHES_PER_SECOND, get_renderable=self._rendered
        )
        self._is_live = not quiet and self._console.is_terminal

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self.progress.ends(self._clock())
        if self._is_live:
            self._live.transient = not self.progress.has_begun  # an empty view would only stand before the error
            self._live.stop()

    def begins(self, iteration: int, phase: Phase) -> None:
        """See `Watcher`."""
        with self._lock:
            before = self.progress.iteration
            was_trained = self.progress.phase is Phase.TRAIN and before != iteration
            self.progress.begins(iteration, phase, self._clock())
            if was_trained and before is not None:
                self._tell(iteration_line(self.progress, before, self._clock()))

    def resumes(self, checkpoint: Path | None, passed_over: Sequence[Path]) -> None:
        """See `Watcher`."""
        for folder in passed_over:
            self._tell(f"passed over {folder}, which was not written to its end")
        if checkpoint is not None:
            self._tell(f"going on from {checkpoint}")

    def serves(self, iteration: int, served: Served) -> None:
        """See `Watcher`."""
        with self._lock:
            self.progress.serves(iteration, served)

    def measured(self, measurement: Measurement) -> None:
        """See `Watcher`."""
        with self._lock:
            self.progress.measured(measurement)
            self._tell(measurement_line(measurement))

    def collected(self, record: CollectionRecord) -> None:
        """See `Watcher`."""
        with self._lock:
            self.progress.collected(record)

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Watcher`."""
        with self._lock:
            self.progress.trained(step, metrics)

    def saved(self, step: int) -> None:
        """See `Watcher`."""
        with self._lock:
            self.progress.saved(step)

    def ends(self, reason: str) -> None:
        """See `Watcher`."""
        with self._lock:
            was_trained = self.progress.phase is Phase.TRAIN
            self.progress.ends(self._clock(), reason)
            if was_trained and self.progress.iteration is not None:
                self._tell(iteration_line(self.progress, self.progress.iteration, self._clock()))

    def _tell(self, line: str) -> None:
        if self._tells_lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _rendered(self) -> RenderableType:
        with self._lock:
            return rendered(self.progress, self._clock(), self._console.width)
