"""How far a loop is, in numbers: what it told its watcher, and when. How that looks is the `dashboard`'s matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.rl.watching import Phase
from memagent_training.serving.policy_sync import Served

_RECENT: Final = 10
"""Iterations from which the time left is foretold: documents grow longer, and so do iterations."""


@dataclass
class LoopProgress:
    """What is known of a loop. Times are seconds of one clock, of which every change is given the present one.

    Args:
        iterations: how many there are in all.
        began: when this process began.
    """

    iterations: int
    began: float
    iteration: int | None = field(default=None, init=False)
    """The one at work, counted from 0; `iterations` once all are done. None before the first."""
    phase: Phase | None = field(default=None, init=False)
    """None before the first, and after the end."""
    phase_began: float = field(default=0.0, init=False)
    served: tuple[int, Served] | None = field(default=None, init=False)
    """After how many iterations the weights are that the server has, and how they came there."""
    records: dict[int, CollectionRecord] = field(default_factory=dict, init=False)
    """The newest collection for each iteration, those of earlier processes included."""
    measurements: dict[tuple[int, float], Measurement] = field(default_factory=dict, init=False)
    """By iteration and temperature."""
    step: int | None = field(default=None, init=False)
    """The newest optimizer step, and what the trainer logged of it."""
    metrics: Mapping[str, float] = field(default_factory=dict, init=False)
    saved_step: int | None = field(default=None, init=False)
    reason: str | None = field(default=None, init=False)
    """Why the loop ended."""
    ended: float | None = field(default=None, init=False)
    _times: dict[int, dict[Phase, float]] = field(default_factory=dict, init=False)
    """Seconds of each iteration that this process was at, by phase."""

    def begins(self, iteration: int, phase: Phase, now: float) -> None:
        """A phase begins, and the one before is over."""
        self._close_phase(now)
        self.iteration, self.phase = iteration, phase
        self._times.setdefault(iteration, {})

    def serves(self, iteration: int, served: Served) -> None:
        """The server has new weights."""
        self.served = (iteration, served)

    def measured(self, measurement: Measurement) -> None:
        """Held-out questions were read."""
        self.measurements[measurement.iteration, measurement.temperature] = measurement

    def collected(self, record: CollectionRecord) -> None:
        """An iteration's groups are there."""
        self.records[record.iteration] = record

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken."""
        self.step, self.metrics = step, dict(metrics)

    def saved(self, step: int) -> None:
        """There is a checkpoint."""
        self.saved_step = step

    def ends(self, now: float, reason: str | None = None) -> None:
        """The loop ended, or is given up, which has no reason here; a second call changes nothing."""
        if self.ended is None:
            self._close_phase(now)
            self.phase, self.ended, self.reason = None, now, reason

    # What follows from it

    @property
    def has_begun(self) -> bool:
        """Whether anything was told yet."""
        return self.iteration is not None

    @property
    def latest(self) -> CollectionRecord | None:
        """The newest collection."""
        return self.records[max(self.records)] if self.records else None

    @property
    def rewards(self) -> list[float]:
        """Mean rewards, by iteration."""
        return [record.reward for _, record in sorted(self.records.items())]

    @property
    def temperatures(self) -> list[float]:
        """At which was measured."""
        return sorted({temperature for _, temperature in self.measurements})

    def first_and_latest(self, temperature: float) -> tuple[Measurement | None, Measurement | None]:
        """What was measured before any training, and the newest that was measured after some."""
        found = {iteration: each for (iteration, at), each in self.measurements.items() if at == temperature}
        newest = max(found, default=0)
        return found.get(0), found[newest] if newest else None

    def metric(self, name: str) -> float | None:
        """What the trainer logged of the newest step; None where it logged none."""
        return self.metrics.get(name)

    @property
    def training_tokens_per_second(self) -> float | None:
        """Forwarded tokens of the newest step, by the time that it took."""
        tokens, seconds = self.metric("tokens/forwarded"), self.metric("step_time")
        return tokens / seconds if tokens is not None and seconds else None

    def elapsed(self, now: float) -> float:
        """Seconds since this process began."""
        return (now if self.ended is None else self.ended) - self.began

    def in_phase(self, now: float) -> float:
        """Seconds that the present phase has lasted."""
        return now - self.phase_began

    def times(self, now: float, iteration: int | None = None) -> dict[Phase, float]:
        """Seconds by phase, of one iteration or of all that this process was at."""
        chosen = self._times.items() if iteration is None else [(iteration, self._times.get(iteration, {}))]
        totals = dict.fromkeys(Phase, 0.0)
        for number, times in chosen:
            for phase, seconds in times.items():
                totals[phase] += seconds
            if number == self.iteration and self.phase is not None:
                totals[self.phase] += self.in_phase(now)
        return totals

    def left(self, now: float) -> float | None:
        """Seconds that the other iterations will take; None while that cannot be told."""
        if self.iteration is None or self.iteration >= self.iterations or self.ended is not None:
            return None
        done = [sum(times.values()) for number, times in sorted(self._times.items()) if number < self.iteration]
        if not done:
            return None
        # The first one also waited for the server to start.
        each = fmean(done[1:][-_RECENT:] or done)
        rest = max(each - sum(self.times(now, self.iteration).values()), 0.0)
        return rest + each * (self.iterations - self.iteration - 1)

    def _close_phase(self, now: float) -> None:
        if self.phase is not None and self.iteration is not None:
            times = self._times[self.iteration]
            times[self.phase] = times.get(self.phase, 0.0) + self.in_phase(now)
        self.phase_began = now
