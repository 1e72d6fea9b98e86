"""What a person sees of a loop: the view on any terminal, the lines elsewhere, and where the numbers come from."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from memagent_evaluation.statistics import wilson
from memagent_training.rl.dashboard import Dashboard
from memagent_training.rl.loop_journal import CollectionRecord, LengthReward, Measurement
from memagent_training.rl.loop_progress import LoopProgress
from memagent_training.rl.loop_view import Sparkline, rendered
from memagent_training.rl.watching import Phase
from memagent_training.serving.policy_sync import How, Served

METRICS = {
    "loss": 0.0123, "grad_norm": 0.456, "learning_rate": 1e-6, "entropy": 0.789, "clip_ratio/low_mean": 0.011,
    "clip_ratio/high_mean": 0.022, "clip_ratio/dual_mean": 0.033, "logprob_gap/mean": 2.5e-5, "logprob_gap/max": 0.004,
    "kl": 0.0042, "importance/mean": 0.998, "importance/capped": 0.044, "tokens/forwarded": 90_000.0, "step_time": 20.0,
    "collect/reward": 0.25,
}  # fmt: skip


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def record(iteration: int, *, number: int | None = None, reward: float = 0.25, **values: Any) -> CollectionRecord:
    lengths = {500: LengthReward(reward + 0.1, 96), 1000: LengthReward(reward - 0.1, 96)}
    usual: dict[str, Any] = {
        "is_enough": True, "version": iteration, "stage": 1, "asked": 16, "by_length": lengths,
        "all_right": 3, "other_uniform": 5,
        "group_of": {f"run-{each}": f"group-{each // 4}" for each in range(16)}, "failed": 2, "prompt_tokens": 100_000,
        "cached_tokens": 25_000, "completion_tokens": 20_000, "turns": 99, "seconds": 60.0,
    }  # fmt: skip
    return CollectionRecord(number=iteration if number is None else number, iteration=iteration, **{**usual, **values})


def measurement(iteration: int, right: int = 4, *, temperature: float = 0.0, failed: int = 0) -> Measurement:
    return Measurement(iteration, temperature, {500: wilson(right, 16), 2000: wilson(right // 2, 16)}, failed, 30.0)


def served(iteration: int, how: How = How.RELOAD) -> Served:
    return Served("policy", f"iteration-{iteration}", how, 1.25, 3e-5)


def an_iteration(dashboard: Dashboard, clock: Clock, iteration: int, *, reward: float = 0.25) -> None:
    """All that a loop tells of an iteration, which takes 100 seconds: 2, 18, 50 and 30."""
    dashboard.begins(iteration, Phase.SYNC)
    clock.now += 2
    dashboard.serves(iteration, served(iteration))
    dashboard.begins(iteration, Phase.MEASURE)
    clock.now += 18
    dashboard.measured(measurement(iteration, 4 + iteration))
    dashboard.begins(iteration, Phase.COLLECT)
    clock.now += 50
    dashboard.collected(record(iteration, reward=reward))
    dashboard.begins(iteration, Phase.TRAIN)
    clock.now += 30
    dashboard.trained(2 * iteration + 2, METRICS)
    dashboard.saved(2 * iteration + 2)


def a_loop(*, iterations: int = 10, done: int = 3, clock: Clock | None = None) -> Dashboard:
    """A loop that has just begun to collect for the iteration after `done` ones."""
    clock = clock or Clock()
    dashboard = Dashboard(iterations, quiet=True, clock=clock)
    for iteration in range(done):
        an_iteration(dashboard, clock, iteration, reward=(0.2, 0.32, 0.4)[iteration])
    dashboard.begins(done, Phase.COLLECT)
    clock.now += 7
    return dashboard


def seen(progress: LoopProgress, width: int = 120, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(rendered(progress, width))
    file.seek(0)
    return file.read()


# The view


def test_the_view_says_where_the_loop_is_and_how_long_it_will_take() -> None:
    shown = seen(a_loop())
    assert "iteration 4 of 10" in shown
    assert "collecting for 0:00:07" in shown
    assert "0:05:07 gone, about 0:11:33 left" in shown
    assert "the weights after 2 iterations, reloaded in place in 1.2 s, log-probs within 3e-05" in shown
    assert "last checkpoint: step 6" in shown


@pytest.mark.parametrize(("how", "words"), [(How.ADAPTER, "as adapters"), (How.RESTART, "by a restart of the server")])
def test_the_view_says_how_weights_came_into_the_server(how, words) -> None:
    progress = a_loop()
    progress.serves(0, served(0, how))
    assert f"the weights before any training, {words}" in seen(progress)


def test_the_view_shows_rewards_over_iterations_and_by_length() -> None:
    shown = seen(a_loop())
    assert re.search(r"reward +0\.400 +▁▅█ +0\.200 to 0\.400", shown)
    assert re.search(r"\b500 +0\.500 +96\b", shown) and re.search(r"\b1,000 +0\.300 +96\b", shown)
    assert (
        "4 groups with variance, 3 always right, 5 never or all alike, 2 failed; 2,000 tokens/s, 25% of prompts cached"
        in shown
    )


def test_the_view_has_the_newest_measurement_beside_the_one_before_any_training() -> None:
    shown = seen(a_loop())
    assert re.search(r"length +temperature +before any training +after 2 iterations", shown)
    assert re.search(r"500 +0 +25\.0 % \[10\.2, 49\.5\] +37\.5 % \[18\.5, 61\.4\]", shown)
    assert "after 1 iteration " not in shown


def test_measurements_at_several_temperatures_have_a_row_each_and_say_what_failed() -> None:
    progress = a_loop()
    progress.measured(measurement(0, 8, temperature=1.0))
    progress.measured(measurement(2, 12, temperature=1.0, failed=3))
    shown = seen(progress)
    assert re.search(r"500 +1 +50\.0 %.* +75\.0 %", shown)
    assert re.search(r"failed +1 +3\b", shown)


def test_the_view_shows_what_the_trainer_logged() -> None:
    shown = seen(a_loop())
    assert "training, step 6" in shown
    for name, value in (
        ("loss", "0.0123"), ("gradient norm", "0.456"), ("learning rate", "1e-06"), ("entropy", "0.789"),
        ("clipped low", "1.10%"), ("clipped high", "2.20%"), ("dual-clipped", "3.30%"), ("gap to logged", "2.5e-05"),
        ("largest gap", "0.004"), ("KL to reference", "0.0042"), ("importance weights", "0.998"),
        ("importance capped", "4.40%"), ("tokens/s", "4,500"),
    ):  # fmt: skip
        assert re.search(rf"{name} +{re.escape(value)}", shown), name


def test_time_is_shown_by_phase_with_its_share() -> None:
    shown = seen(a_loop())
    for phase, time, share in (
        ("sync", "0:00:06", 2), ("measure", "0:00:54", 18), ("collect", "0:02:37", 51), ("train", "0:01:30", 29)
    ):  # fmt: skip
        assert re.search(rf"{phase} +{time} +{share}%", shown), phase


@pytest.mark.parametrize("name", [None, *METRICS])
def test_what_is_not_logged_is_not_shown(name) -> None:
    progress = a_loop()
    progress.trained(6, {} if name is None else {each: METRICS[each] for each in METRICS if each != name})
    shown = seen(progress)
    assert ("training, step" in shown) == (name is not None)
    assert ("entropy" in shown) == (name not in {None, "entropy"})
    assert ("4,500" in shown) == (name not in {None, "tokens/forwarded", "step_time"})


def test_a_metric_that_is_no_number_is_shown_as_none_or_left_out() -> None:
    progress = a_loop()
    progress.trained(6, {**METRICS, "loss": float("nan"), "entropy": None, "step_time": 0.0})
    shown = seen(progress)
    assert re.search(r"loss +nan", shown)
    assert "entropy" not in shown


@settings(max_examples=40)
@given(st.integers(1, 300))
def test_the_view_fits_any_width(width) -> None:
    assert max(map(len, seen(a_loop(), width=width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 78, 79, 103, 104, 250])
def test_the_view_leaves_nothing_out_where_it_is_narrow(width) -> None:
    shown = seen(a_loop(), width=width)
    for words in ("4 of 10", "accuracy", "37.5", "latest", "training", "gradient", "sync", "0.400"):
        assert words in shown, words


def test_a_wide_terminal_needs_fewer_lines() -> None:
    heights = [len(seen(a_loop(), width=width).splitlines()) for width in (60, 90, 120)]
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] <= 24 and len(set(heights)) == 3


def test_a_terminal_without_unicode_gets_the_view_too() -> None:
    shown = seen(a_loop(), encoding="ascii")
    assert shown.isascii()
    assert re.search(r"reward +0\.400 +_\+#", shown)


def test_before_anything_is_told_the_loop_is_starting() -> None:
    clock = Clock()
    progress = LoopProgress(5, clock)
    clock.now = 3.0
    assert seen(progress).split() == ["starting", "0:00:03", "gone"]


def test_before_an_iteration_is_over_nothing_is_foretold() -> None:
    clock = Clock()
    progress = LoopProgress(5, clock)
    progress.begins(0, Phase.SYNC)
    clock.now += 1
    shown = seen(progress)
    assert "iteration 1 of 5" in shown and "left" not in shown
    assert "waiting for the server, and bringing the weights into it, for 0:00:01" in shown


def test_after_the_last_iteration_none_is_named_that_there_is_not() -> None:
    clock = Clock()
    progress = a_loop(iterations=3, done=3, clock=clock)
    shown = seen(progress)
    assert "all 3 iterations are trained" in shown and "left" not in shown
    progress.ends("all 3 iterations are done")
    clock.now += 1000
    shown = seen(progress)
    assert "ended: all 3 iterations are done; 0:05:07 gone" in shown and "left" not in shown


# Numbers


def test_the_first_iteration_which_waited_for_the_server_foretells_only_until_there_is_another() -> None:
    clock = Clock()
    progress = LoopProgress(12, clock)
    for iteration, now, left in ((0, 0.0, None), (1, 500.0, 11 * 500), (2, 600.0, 10 * 100)):
        clock.now = now
        progress.begins(iteration, Phase.SYNC)
        assert progress.left == left
    clock.now = 640.0
    assert progress.left == 10 * 100 - 40
    clock.now = 900.0
    assert progress.left == 9 * 100, "an iteration that takes longer than others shortens none of them"


def test_a_loop_that_goes_on_counts_the_time_of_its_own_iterations_alone() -> None:
    clock = Clock()
    progress = LoopProgress(100, clock)
    for number in range(50):
        progress.collected(record(number))
    progress.begins(50, Phase.SYNC)
    clock.now += 20
    progress.begins(51, Phase.SYNC)
    assert progress.left == 49 * 20
    assert len(progress.rewards) == 50


def test_of_several_collections_for_an_iteration_the_last_counts() -> None:
    progress = LoopProgress(100)
    progress.collected(record(0, number=0, reward=0.2, is_enough=False))
    progress.collected(record(0, number=1, reward=0.3))
    assert progress.rewards == [pytest.approx(0.3)]


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(Phase), st.floats(0, 1e4)), min_size=1, max_size=30))
def test_every_second_since_the_first_phase_belongs_to_a_phase(calls) -> None:
    clock, iteration = Clock(5.0), 0
    progress = LoopProgress(100, clock)
    for step, phase, seconds in calls:
        iteration += step
        progress.begins(iteration, phase)
        clock.now += seconds
    passed = pytest.approx(clock.now - 5)
    assert sum(progress.times().values()) == passed
    assert sum(sum(progress.times(each).values()) for each in range(iteration + 1)) == passed
    progress.ends()
    clock.now += 99
    assert sum(progress.times().values()) == passed


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
def test_a_sparkline_has_a_bar_per_value_as_far_as_there_is_room(values, width) -> None:
    file = io.StringIO()
    Console(file=file, width=width, legacy_windows=False).print(Sparkline(values), end="")
    bars = file.getvalue().rstrip("\n")
    assert len(bars) == min(len(values), width)
    if len(values) <= width and len(set(values)) > 1:
        assert bars[values.index(max(values))] == "█" and bars[values.index(min(values))] == "▁"


# Lines


def lines_of(told: Any, *, iterations: int = 2, **options: Any) -> list[str]:
    file, clock = io.StringIO(), Clock()
    with Dashboard(iterations, console=Console(file=file, width=40), clock=clock, **options) as dashboard:
        told(dashboard, clock)
    return file.getvalue().splitlines()


def whole_loop(dashboard: Dashboard, clock: Clock) -> None:
    for iteration in range(2):
        an_iteration(dashboard, clock, iteration)
    dashboard.begins(2, Phase.SYNC)
    clock.now += 2
    dashboard.begins(2, Phase.MEASURE)
    dashboard.measured(measurement(2, 16, failed=1))
    dashboard.ends("all 2 iterations are done")


def test_without_a_terminal_there_is_a_line_per_iteration_and_one_per_measurement() -> None:
    lines = lines_of(whole_loop)
    assert [line.split(":")[0] for line in lines] == [
        "accuracy before any training, at temperature 0", "iteration 1 of 2",
        "accuracy after 1 iteration, at temperature 0", "iteration 2 of 2",
        "accuracy after 2 iterations, at temperature 0",
    ]  # fmt: skip
    assert lines[0].endswith("500: 25.0 % [10.2, 49.5], 2,000: 12.5 % [3.5, 36.0]; took 0:00:30")
    assert "; 1 failed;" in lines[4]
    assert lines[1].startswith("iteration 1 of 2: reward 0.250 (500: 0.350, 1,000: 0.150); 4 groups with variance, 3 ")
    assert "entropy 0.789" in lines[1] and "gap to logged 2.5e-05" in lines[1]
    assert lines[1].endswith("sync 0:00:02, measure 0:00:18, collect 0:00:50, train 0:00:30; about 0:01:40 left")


def test_an_iteration_after_which_nothing_is_measured_has_its_line_when_the_loop_ends() -> None:
    def told(dashboard: Dashboard, clock: Clock) -> None:
        an_iteration(dashboard, clock, 0)
        dashboard.ends("all 1 iterations are done")

    assert [line.split(":")[0] for line in lines_of(told, iterations=1)][1:] == ["iteration 1 of 1"]


def test_an_iteration_that_is_given_up_has_no_line() -> None:
    def told(dashboard: Dashboard, clock: Clock) -> None:
        dashboard.begins(0, Phase.COLLECT)
        dashboard.ends("reads of a question no longer differ")

    assert lines_of(told) == []


def test_a_step_of_which_little_is_known_has_a_line_too() -> None:
    def told(dashboard: Dashboard, clock: Clock) -> None:
        dashboard.begins(0, Phase.TRAIN)
        dashboard.begins(1, Phase.SYNC)

    assert lines_of(told) == ["iteration 1 of 2: about 0:00:00 left"]


# Terminals


def terminal(file: io.StringIO) -> Console:
    return Console(file=file, width=100, height=50, force_terminal=True, legacy_windows=False, color_system=None)


def test_on_a_terminal_the_last_view_stays() -> None:
    file, clock = io.StringIO(), Clock()
    with Dashboard(2, console=terminal(file), clock=clock) as dashboard:
        whole_loop(dashboard, clock)
    shown = file.getvalue().rpartition("ended: all 2 iterations are done")[2]
    assert "after 2 iterations" in shown and "100.0 %" in shown
    assert "iteration 1 of 2: " not in file.getvalue(), "lines are for what is no terminal"


def test_a_loop_that_is_interrupted_is_shown_as_stopped() -> None:
    file, clock = io.StringIO(), Clock()
    with pytest.raises(KeyboardInterrupt), Dashboard(2, console=terminal(file), clock=clock) as dashboard:
        an_iteration(dashboard, clock, 0)
        raise KeyboardInterrupt
    assert "stopped; 0:01:40 gone" in file.getvalue()


def test_a_refusal_before_anything_begins_leaves_no_view_behind() -> None:
    file = io.StringIO()
    with pytest.raises(ValueError), Dashboard(2, console=terminal(file)):
        raise ValueError
    erase_line = "\x1b[2K"
    assert file.getvalue().rstrip().endswith(erase_line)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_shows_nothing(is_terminal) -> None:
    file, clock = io.StringIO(), Clock()
    console = terminal(file) if is_terminal else Console(file=file)
    with Dashboard(2, quiet=True, console=console, clock=clock) as dashboard:
        whole_loop(dashboard, clock)
    assert file.getvalue() == ""


def test_what_is_printed_meanwhile_stands_above_the_view(capsys) -> None:
    file, clock = io.StringIO(), Clock()
    with Dashboard(2, console=terminal(file), clock=clock) as dashboard:
        an_iteration(dashboard, clock, 0)
        print("a library's chatter")
    assert "a library's chatter" in file.getvalue()
    assert capsys.readouterr().out == ""


def test_measurements_may_come_from_another_thread() -> None:
    file, clock = io.StringIO(), Clock()
    with Dashboard(2, console=terminal(file), clock=clock) as dashboard:
        dashboard.begins(0, Phase.MEASURE)
        others = [threading.Thread(target=dashboard.measured, args=(measurement(each),)) for each in range(20)]
        for other in others:
            other.start()
        for other in others:
            other.join()
    assert len(dashboard.measurements) == 20
