"""The status display of a loop: a line for each iteration and measurement, and the time of each phase."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.rl_loops import make_measurement, make_record

from memagent_training.rl.loop_journal import MeanReward
from memagent_training.rl.loop_status import LoopStatus, Phase, PhaseClock

METRICS = {"loss": 0.0123, "grad_norm": 0.456, "entropy": 0.789, "train/tokens_per_second": 4500.0, "reward": 0.2}


class FakeClock:
    """A clock that only moves when a test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def report_iteration(status: LoopStatus, clock: FakeClock, iteration: int) -> None:
    """Report an iteration of 100 seconds: 2 of sync, 18 of measuring, 50 of collection and 30 of training."""
    status.on_phase(iteration, Phase.SYNC)
    clock.now += 2
    status.on_phase(iteration, Phase.MEASURE)
    clock.now += 18
    status.on_measurement(make_measurement(iteration))
    status.on_phase(iteration, Phase.COLLECT)
    clock.now += 50
    lengths = {500: MeanReward(0.35, 96), 1000: MeanReward(0.15, 96)}
    status.on_collection(make_record(iteration, by_length=lengths, failed_groups=2))
    status.on_phase(iteration, Phase.TRAIN)
    clock.now += 30
    status.on_step(iteration + 1, METRICS)


def render_status(report: Callable[[LoopStatus, FakeClock], None], *, is_terminal: bool = False, **options: Any) -> str:
    output, clock = io.StringIO(), FakeClock()
    is_quiet = options.get("quiet", False)
    console = Console(file=output, width=60, force_terminal=is_terminal, color_system=None, quiet=is_quiet)
    with LoopStatus(2, console=console, clock=clock, **options) as status:
        report(status, clock)
    return output.getvalue()


def report_loop(status: LoopStatus, clock: FakeClock) -> None:
    for iteration in range(2):
        report_iteration(status, clock, iteration)
    status.on_end("all 2 iterations are done")


def test_each_iteration_and_measurement_has_a_line() -> None:
    lines = render_status(report_loop).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "accuracy before any training, at temperature 0", "iteration 1 of 2",
        "accuracy after 1 iteration, at temperature 0", "iteration 2 of 2",
    ]  # fmt: skip
    assert lines[0].endswith("took 0:00:02")
    assert lines[1].startswith(
        "iteration 1 of 2: reward 0.250 (500: 0.350, 1,000: 0.150); 1 groups to train on, 1 always right, 2 never "
        "right or with equal rewards, 2 failed; loss 0.0123, gradient norm 0.456, entropy 0.789, tokens/s 4,500; "
    )
    assert lines[1].endswith("sync 0:00:02, measure 0:00:18, collect 0:00:50, train 0:00:30")


def test_missing_metrics_are_left_out_of_a_line() -> None:
    def report(status: LoopStatus, clock: FakeClock) -> None:
        status.on_phase(0, Phase.TRAIN)
        clock.now += 5
        status.on_phase(1, Phase.SYNC)

    assert render_status(report).splitlines() == ["iteration 1 of 2: train 0:00:05"]


def test_aborted_iteration_has_no_line() -> None:
    def report(status: LoopStatus, clock: FakeClock) -> None:
        del clock
        status.on_phase(0, Phase.COLLECT)
        status.on_end("reads of a question no longer differ")

    assert render_status(report) == ""


def test_terminal_output_has_the_lines_too() -> None:
    text = render_status(report_loop, is_terminal=True)
    assert "iteration 1 of 2: " in text and "accuracy after 1 iteration" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_status_prints_nothing(is_terminal: bool) -> None:
    assert render_status(report_loop, is_terminal=is_terminal, quiet=True) == ""


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(Phase), st.floats(0, 1e4)), min_size=1, max_size=30))
def test_every_second_since_the_first_phase_belongs_to_a_phase(calls: list[tuple[int, Phase, float]]) -> None:
    clock, iteration = FakeClock(5.0), 0
    phases = PhaseClock(clock)
    for step, phase, seconds in calls:
        iteration += step
        phases.begin(iteration, phase)
        clock.now += seconds
    expected_total = pytest.approx(clock.now - 5)
    assert sum(sum(phases.get_times(index).values()) for index in range(iteration + 1)) == expected_total
    phases.end()
    clock.now += 99
    assert sum(sum(phases.get_times(index).values()) for index in range(iteration + 1)) == expected_total
