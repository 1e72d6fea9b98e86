"""Prints the progress of a loop on standard error: one line per iteration and per measurement.

On a terminal, the last line shows the current phase and the estimated remaining time. The training log and the trackers
of `report_to` have all metrics.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from transformers import TrainerCallback

from memagent_graph.plain_text import format_count
from memagent_training.job.step_lines import format_metrics
from memagent_training.rl.loop_journal import CollectionRecord, Measurement


class Phase(StrEnum):
    """The phases of a loop."""

    SYNC = "sync"
    """Weights are written, and loaded into the server."""
    MEASURE = "measure"
    COLLECT = "collect"
    """Questions are read; with rollouts one version behind, this is only the remaining wait."""
    TRAIN = "train"


class PhaseClock:
    """Measures the seconds of each iteration in this process by phase. `clock` is like `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_counted_at = 0.0
        self.iteration = -1
        self.phase: Phase | None = None
        self._seconds: defaultdict[int, defaultdict[Phase, float]] = defaultdict(lambda: defaultdict(float))

    def begin(self, iteration: int, phase: Phase) -> None:
        """Begin a phase, and end the previous one."""
        self.end()
        self.iteration, self.phase = iteration, phase

    def end(self) -> None:
        """End the current phase."""
        self._add_elapsed()
        self.phase = None

    def get_times(self, iteration: int) -> Mapping[Phase, float]:
        """Return the seconds of an iteration by phase, up to now."""
        self._add_elapsed()
        return self._seconds[iteration]

    def _add_elapsed(self) -> None:
        current_time = self._clock()
        if self.phase is not None:
            self._seconds[self.iteration][self.phase] += current_time - self._last_counted_at
        self._last_counted_at = current_time


class LoopStatus(TrainerCallback):
    """Prints a loop's progress; a context manager.

    A subclass may handle the loop's events itself: `on_resume`, `on_phase`, `on_measurement`, `on_collection`,
    `on_step` and `on_end`. The trainer calls `on_log`, which calls `on_step`, and the inherited `on_` methods.

    Args:
        iterations: the number of iterations of the whole loop.
        quiet: print nothing.
        console: where to print; standard error by default.
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
        self._iterations = iterations
        self._console = console or Console(stderr=True, highlight=False, quiet=quiet)
        self.phase_clock = PhaseClock(clock)
        """The time of each phase."""
        is_shown = self._console.is_terminal and not quiet
        columns = ("{task.description}", TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not is_shown)
        self._task = self._progress.add_task("starting", total=iterations)
        self._record: CollectionRecord | None = None
        self._metrics: Mapping[str, float] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_resume(self, checkpoint: Path | None, incomplete: Sequence[Path]) -> None:
        """Print the checkpoint from which the loop continues, and newer ones that are incomplete."""
        for folder in incomplete:
            self._print(f"skipped the incomplete checkpoint {folder}")
        if checkpoint is not None:
            self._print(f"continuing from {checkpoint}")

    def on_phase(self, iteration: int, phase: Phase) -> None:
        """Begin a phase of an iteration; the previous phase ends."""
        finished_iteration = self.phase_clock.iteration if self.phase_clock.phase is Phase.TRAIN else None
        self.phase_clock.begin(iteration, phase)
        if finished_iteration is not None and finished_iteration != iteration:
            self._print(self._format_iteration(finished_iteration))
        description = f"iteration {min(iteration + 1, self._iterations)} of {self._iterations}: {phase}"
        self._progress.update(self._task, completed=iteration, description=description)

    def on_measurement(self, measurement: Measurement) -> None:
        """Print the accuracy on held-out questions."""
        lengths = ", ".join(f"{length:,}: {accuracy}" for length, accuracy in sorted(measurement.accuracy.items()))
        failed_reads = f"; {measurement.failed} failed" if measurement.failed else ""
        training_state = (
            f"after {format_count(measurement.iteration, 'iteration')}"
            if measurement.iteration
            else "before any training"
        )
        self._print(
            f"accuracy {training_state}, at temperature {measurement.temperature:g}"
            f"{', as it will be deployed' if measurement.as_deployed else ''}: {lengths}{failed_reads}; "
            f"took {_format_duration(measurement.seconds)}"
        )

    def on_collection(self, record: CollectionRecord) -> None:
        """Store the newest collection for the iteration's line, also one that an earlier call made."""
        self._record = record

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of an optimizer step for the iteration's line."""
        self._metrics = dict(metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report a step's metrics; the trainer calls this."""
        if logs and "loss" in logs:
            self.on_step(state.global_step, logs)

    def on_end(self, reason: str) -> None:
        """Print the last iteration's line. `reason` says why the loop ended."""
        if self.phase_clock.phase is Phase.TRAIN:
            self.phase_clock.end()
            self._print(self._format_iteration(self.phase_clock.iteration))

    def _format_iteration(self, iteration: int) -> str:
        """Return the line with the result of an iteration."""
        parts = []
        if (record := self._record) is not None and record.iteration == iteration:
            lengths = ", ".join(f"{length:,}: {mean.reward:.3f}" for length, mean in sorted(record.by_length.items()))
            parts += [
                f"reward {record.reward:.3f} ({lengths})",
                f"{record.groups} groups to train on, {record.solved_groups} always right, "
                f"{record.uniform_groups} never right or with equal rewards, {record.failed_groups} failed",
            ]
        parts.append(format_metrics(self._metrics))
        times = self.phase_clock.get_times(iteration)
        parts.append(", ".join(f"{phase} {_format_duration(times[phase])}" for phase in Phase if times.get(phase)))
        return f"iteration {iteration + 1} of {self._iterations}: {'; '.join(filter(None, parts))}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
