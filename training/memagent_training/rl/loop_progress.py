"""A loop's progress in numbers: what it reported, and when. `loop_view` shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from threading import RLock
from typing import Final

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.rl.watching import Phase, Watcher
from memagent_training.serving.policy_sync import Served

_RECENT: Final = 10
"""How many recent iterations the remaining time is estimated from: documents become longer, and so do iterations."""


@dataclass(eq=False)
class LoopProgress(Watcher):
    """The state of a loop. Times are seconds of the clock.

    Args:
        iterations: how many there are in total.
        clock: like `time.monotonic`.
    """

    iterations: int
    clock: Callable[[], float] = time.monotonic
    lock: RLock = field(default_factory=RLock, init=False)
    """Held while values that are read together change: measurements come from one thread, the rest from another, and a
    third may draw a view."""
    began: float = field(init=False)
    iteration: int | None = field(default=None, init=False)
    """The current one, counted from 0; `iterations` when all are done. None before the first."""
    phase: Phase | None = field(default=None, init=False)
    """None before the first, and after the end."""
    phase_began: float = field(default=0.0, init=False)
    served: tuple[int, Served] | None = field(default=None, init=False)
    """After how many iterations the server's weights were made, and how they were loaded."""
    records: dict[int, CollectionRecord] = field(default_factory=dict, init=False)
    """The newest collection for each iteration, including those of earlier processes."""
    measurements: dict[tuple[int, float], Measurement] = field(default_factory=dict, init=False)
    """By iteration and temperature."""
    step: int | None = field(default=None, init=False)
    """The newest optimizer step, and its logged metrics."""
    metrics: Mapping[str, float] = field(default_factory=dict, init=False)
    saved_step: int | None = field(default=None, init=False)
    reason: str | None = field(default=None, init=False)
    """Why the loop ended."""
    ended: float | None = field(default=None, init=False)
    _times: dict[int, dict[Phase, float]] = field(default_factory=dict, init=False)
    """Seconds of each iteration of this process, by phase."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    def begins(self, iteration: int, phase: Phase) -> None:
        """Begin a phase, and end the previous one."""
        with self.lock:
            self._close_phase()
            self.iteration, self.phase = iteration, phase
            self._times.setdefault(iteration, {})

    def serves(self, iteration: int, served: Served) -> None:
        """See `Watcher`."""
        self.served = (iteration, served)

    def measured(self, measurement: Measurement) -> None:
        """See `Watcher`."""
        with self.lock:
            self.measurements[measurement.iteration, measurement.temperature] = measurement

    def collected(self, record: CollectionRecord) -> None:
        """See `Watcher`."""
        with self.lock:
            self.records[record.iteration] = record

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Watcher`."""
        with self.lock:
            self.step, self.metrics = step, dict(metrics)

    def saved(self, step: int) -> None:
        """See `Watcher`."""
        self.saved_step = step

    def ends(self, reason: str | None = None) -> None:
        """End the loop, without a reason if it was given up; a second call changes nothing."""
        with self.lock:
            if self.ended is None:
                self._close_phase()
                self.phase, self.ended, self.reason = None, self.phase_began, reason

    # What follows from it

    @property
    def latest(self) -> CollectionRecord | None:
        """The newest collection."""
        return self.records[max(self.records)] if self.records else None

    @property
    def rewards(self) -> list[float]:
        """Mean rewards, by iteration."""
        return [record.reward for _, record in sorted(self.records.items())]

    @property
    def training_tokens_per_second(self) -> float | None:
        """Forwarded tokens per second in the newest step."""
        tokens, seconds = self.metrics.get("tokens/forwarded"), self.metrics.get("step_time")
        return tokens / seconds if tokens is not None and seconds else None

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return (self.clock() if self.ended is None else self.ended) - self.began

    @property
    def in_phase(self) -> float:
        """Seconds of the present phase so far."""
        return self.clock() - self.phase_began

    def times(self, iteration: int | None = None) -> dict[Phase, float]:
        """Seconds by phase, of one iteration or of all in this process."""
        chosen = self._times.items() if iteration is None else [(iteration, self._times.get(iteration, {}))]
        totals = dict.fromkeys(Phase, 0.0)
        for number, times in chosen:
            for phase, seconds in times.items():
                totals[phase] += seconds
            if number == self.iteration and self.phase is not None:
                totals[self.phase] += self.in_phase
        return totals

    @property
    def left(self) -> float | None:
        """Estimated seconds of the remaining iterations; None if unknown."""
        if self.iteration is None or self.iteration >= self.iterations or self.ended is not None:
            return None
        done = [sum(times.values()) for number, times in sorted(self._times.items()) if number < self.iteration]
        if not done:
            return None
        # The first one also waited for the server to start.
        each = fmean(done[1:][-_RECENT:] or done)
        rest = max(each - sum(self.times(self.iteration).values()), 0.0)
        return rest + each * (self.iterations - self.iteration - 1)

    def _close_phase(self) -> None:
        now = self.clock()
        if self.phase is not None and self.iteration is not None:
            times = self._times[self.iteration]
            times[self.phase] = times.get(self.phase, 0.0) + now - self.phase_began
        self.phase_began = now
