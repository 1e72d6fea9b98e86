"""What a loop reports while it runs, and how that is shown on standard error: a line per iteration and per measurement.

On a terminal, a last line also says what is being done. Everything else is in the log and in `report_to`'s trackers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Final, Self

from rich.console import Console

from memagent_graph.plain_text import quantity
from memagent_training.job.step_lines import choose_metrics
from memagent_training.rl.loop_journal import CollectionRecord, Measurement

_RECENT: Final = 10
"""How many recent iterations the remaining time is estimated from: documents become longer, and so do iterations."""


class Phase(StrEnum):
    """The phases of a loop."""

    SYNC = "sync"
    """Weights are written, and loaded into the server."""
    MEASURE = "measure"
    COLLECT = "collect"
    """Questions are read; with rollouts one version behind, only the remaining wait."""
    TRAIN = "train"


class PhaseClock:
    """The seconds of each iteration of this process, by phase. `clock` is like `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self.iteration: int | None = None
        self.phase: Phase | None = None
        self._times: dict[int, dict[Phase, float]] = {}

    def begin(self, iteration: int, phase: Phase) -> None:
        """Begin a phase, and end the one before."""
        self.end()
        self.iteration, self.phase = iteration, phase

    def end(self) -> None:
        """End the phase."""
        if self.phase is not None and self.iteration is not None:
            times = self._times.setdefault(self.iteration, {})
            times[self.phase] = times.get(self.phase, 0.0) + self._clock() - self._began
        self.phase, self._began = None, self._clock()

    def times(self, iteration: int) -> dict[Phase, float]:
        """Return the seconds of an iteration, with those of its present phase."""
        times = dict(self._times.get(iteration, {}))
        if iteration == self.iteration and self.phase is not None:
            times[self.phase] = times.get(self.phase, 0.0) + self._clock() - self._began
        return times

    def left(self, iterations: int) -> float | None:
        """Return the estimated seconds of the remaining iterations; None if unknown."""
        if self.iteration is None or self.iteration >= iterations:
            return None
        done = [sum(times.values()) for number, times in sorted(self._times.items()) if number < self.iteration]
        if not done:
            return None
        each = fmean(done[1:][-_RECENT:] or done)  # the first one also waited for the server to start
        rest = max(each - sum(self.times(self.iteration).values()), 0.0)
        return rest + each * (iterations - self.iteration - 1)


class LoopStatus:
    """Gets a loop's progress, and shows it; a context manager. Calls come from the training thread, except `measured`.

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
        self._iterations = iterations
        self._console = console or Console(stderr=True, highlight=False, quiet=quiet)
        self.clock = PhaseClock(clock)
        """The time of each phase."""
        self._status = self._console.status("starting")
        self._has_status = self._console.is_terminal and not quiet
        self._record: CollectionRecord | None = None
        self._metrics: Mapping[str, float] = {}

    def __enter__(self) -> Self:
        if self._has_status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def resumes(self, checkpoint: Path | None, passed_over: Sequence[Path]) -> None:
        """Take note of the checkpoint that the loop continues from; newer ones are incomplete."""
        for folder in passed_over:
            self._print(f"passed over {folder}, which was not written to its end")
        if checkpoint is not None:
            self._print(f"continuing from {checkpoint}")

    def begins(self, iteration: int, phase: Phase) -> None:
        """Take note that a phase of an iteration begins, and the previous one has ended."""
        before = self.clock.iteration if self.clock.phase is Phase.TRAIN else None
        self.clock.begin(iteration, phase)
        if before is not None and before != iteration:
            self._print(self._line(before))
        self._status.update(
            f"iteration {min(iteration + 1, self._iterations)} of {self._iterations}: {phase}{self._left}"
        )

    def serves(self, iteration: int, version: str, how: str) -> None:
        """Take note that the weights of an iteration are served under this name, and how they got there."""

    def measured(self, measurement: Measurement) -> None:
        """Take note that held-out questions were read."""
        lengths = ", ".join(f"{length:,}: {accuracy}" for length, accuracy in sorted(measurement.accuracy.items()))
        failed = f"; {measurement.failed} failed" if measurement.failed else ""
        after = (
            f"after {quantity(measurement.iteration, 'iteration')}" if measurement.iteration else "before any training"
        )
        self._print(
            f"accuracy {after}, at temperature {measurement.temperature:g}"
            f"{', as it will be used' if measurement.as_used else ''}: {lengths}{failed}; "
            f"took {_duration(measurement.seconds)}"
        )

    def collected(self, record: CollectionRecord) -> None:
        """Take note of an iteration's groups, also of those that an earlier call collected."""
        self._record = record

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of an optimizer step."""
        self._metrics = dict(metrics)

    def ends(self, reason: str) -> None:
        """Take note that the loop ended, and why."""
        if self.clock.iteration is not None and self.clock.phase is Phase.TRAIN:
            self.clock.end()
            self._print(self._line(self.clock.iteration))

    @property
    def _left(self) -> str:
        left = self.clock.left(self._iterations)
        return "" if left is None else f"; about {_duration(left)} left"

    def _line(self, iteration: int) -> str:
        """Return the result of an iteration."""
        parts = []
        if (record := self._record) is not None and record.iteration == iteration:
            lengths = ", ".join(f"{length:,}: {each.reward:.3f}" for length, each in sorted(record.by_length.items()))
            parts += [
                f"reward {record.reward:.3f} ({lengths})",
                f"{record.groups} groups to train on, {record.all_right} always right, {record.other_uniform} never or "
                f"all alike, {record.failed} failed",
            ]
        parts.append(choose_metrics(self._metrics))
        times = self.clock.times(iteration)
        parts.append(", ".join(f"{phase} {_duration(times[phase])}" for phase in Phase if times.get(phase)))
        return f"iteration {iteration + 1} of {self._iterations}: {'; '.join(filter(None, parts))}{self._left}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
