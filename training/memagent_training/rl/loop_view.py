"""Draws a loop's progress: its state, rewards, accuracy and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement as Width
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from memagent_graph.plain_text import counted
from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.rl.loop_progress import LoopProgress
from memagent_training.rl.watching import Phase
from memagent_training.serving.policy_sync import How

_WIDE: Final = 104
"""With at least this many columns, everything is next to the accuracy."""
_MEDIUM: Final = 79
"""With at least this many columns, the small tables are next to each other."""
_DOING: Final = {
    Phase.SYNC: "bringing the weights into the server",
    Phase.MEASURE: "measuring",
    Phase.COLLECT: "collecting",
    Phase.TRAIN: "training",
}
_WAITING: Final = "waiting for the server, and bringing the weights into it,"
_CAME_BY: Final = {
    How.ADAPTER: "as adapters",
    How.RELOAD: "reloaded in place",
    How.RESTART: "by a restart of the server",
}
_SHADES: Final = "▁▂▃▄▅▆▇█"
_ASCII_SHADES: Final = "_.-=+*%#"
_SHOWN: Final = (
    ("gradient norm", "grad_norm", ".3g"),
    ("learning rate", "learning_rate", ".3g"),
    ("entropy", "entropy", ".3g"),
    ("clipped low", "clip_ratio/low_mean", ".2%"),
    ("clipped high", "clip_ratio/high_mean", ".2%"),
    ("dual-clipped", "clip_ratio/dual_mean", ".2%"),
    ("gap to logged", "logprob_gap/mean", ".2g"),
    ("largest gap", "logprob_gap/max", ".2g"),
    ("KL to reference", "kl", ".3g"),
    ("importance weights", "importance/mean", ".3f"),
    ("importance capped", "importance/capped", ".2%"),
    ("loss", "loss", ".3g"),
)
"""A metric's label, the trainer's name for it, and the format of its value."""


def iteration_line(progress: LoopProgress, iteration: int) -> str:
    """Return the result of an iteration."""
    parts = []
    record = progress.records.get(iteration)
    if record is not None:
        lengths = ", ".join(f"{length:,}: {each.reward:.3f}" for length, each in sorted(record.by_length.items()))
        parts += [f"reward {record.reward:.3f} ({lengths})", _groups(record)]
    parts.append(", ".join(f"{name} {value}" for name, value in _training_rows(progress)))
    times = progress.times(iteration)
    parts.append(", ".join(f"{phase.value} {_duration(seconds)}" for phase, seconds in times.items() if seconds))
    left = progress.left
    parts.append("" if left is None else f"about {_duration(left)} left")
    return f"iteration {iteration + 1} of {progress.iterations}: {'; '.join(filter(None, parts))}"


def measurement_line(measurement: Measurement) -> str:
    """Return the accuracy on held-out questions."""
    lengths = ", ".join(f"{length:,}: {each}" for length, each in sorted(measurement.accuracy.items()))
    failed = f"; {measurement.failed} failed" if measurement.failed else ""
    return (
        f"accuracy {_after(measurement.iteration)}, at temperature {measurement.temperature:g}: {lengths}{failed}; "
        f"took {_duration(measurement.seconds)}"
    )


def rendered(progress: LoopProgress, width: int) -> RenderableType:
    """Return a loop's view for a number of columns; the most important part is first, since a low terminal shows only
    that.
    """
    parts: list[RenderableType] = [_headline(progress, width), *_state_lines(progress)]
    if progress.latest is not None:
        parts += [Text(), _reward(progress), Text(_groups(progress.latest) + _speed(progress.latest), style="dim")]
    if progress.iteration is None:
        return Group(*parts)
    accuracy, rewards, times = _accuracy(progress), _rewards_by_length(progress), _time(progress)
    training = _table(f"training, step {progress.step}", [] if progress.step is None else _training_rows(progress))
    if width >= _WIDE:
        left = _stacked([accuracy, _beside([rewards, times])])
        parts += [Text(), _beside([left, training])]
    elif width >= _MEDIUM:
        parts += [Text(), _stacked([accuracy, _beside([rewards, times, training])])]
    else:
        parts += [Text(), _stacked([accuracy, rewards, training, times])]
    return Group(*parts)


def _beside(tables: Sequence[RenderableType | None]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(*(each for each in tables if each is not None))
    return grid


def _stacked(tables: Sequence[RenderableType | None]) -> Group:
    """Join parts with empty lines between them."""
    lines = [line for each in tables if each is not None for line in (Text(), each)]
    return Group(*lines[1:])


def _headline(progress: LoopProgress, width: int) -> RenderableType:
    done = progress.iteration or 0
    total = progress.iterations
    if progress.ended is not None:
        title = f"ended: {progress.reason}" if progress.reason else "stopped"
    elif progress.iteration is None:
        title = "starting"
    elif done >= total:
        title = f"all {total} iterations are trained"
    else:
        title = f"iteration {done + 1} of {total}"
    left = progress.left
    times = f"{_duration(progress.elapsed)} gone" + ("" if left is None else f", about {_duration(left)} left")
    if width < _MEDIUM or progress.ended is not None:
        return Text.assemble((title, "bold"), "; ", times)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(title, style="bold"), ProgressBar(total=total, completed=done, width=20), Text(times))
    return grid


def _state_lines(progress: LoopProgress) -> Iterator[Text]:
    """Yield the current work, the served weights, and the files on disk."""
    if progress.phase is not None:
        is_first = progress.phase is Phase.SYNC and progress.served is None  # the loop's own server then starts
        doing = _WAITING if is_first else _DOING[progress.phase]
        yield Text(f"{doing} for {_duration(progress.in_phase)}", style="cyan")
    facts = []
    if progress.served is not None:
        iteration, served = progress.served
        facts.append(
            f"served: the weights {_after(iteration)}, {_CAME_BY[served.how]} in {served.seconds:.1f} s, "
            f"log-probs within {served.gap:.1g}"
        )
    if progress.saved_step is not None:
        facts.append(f"last checkpoint: step {progress.saved_step}")
    if facts:
        yield Text("; ".join(facts), style="dim")


def _reward(progress: LoopProgress) -> RenderableType:
    rewards = progress.rewards
    grid = Table.grid(padding=(0, 2))
    bounds = f"{min(rewards):.3f} to {max(rewards):.3f}" if len(rewards) > 1 else ""
    grid.add_row(
        Text("reward", style="bold"), Text(f"{rewards[-1]:.3f}"), Sparkline(rewards), Text(bounds, style="dim")
    )
    return grid


def _accuracy(progress: LoopProgress) -> Table | None:
    """Return the newest measurements next to those before any training."""
    iterations = {iteration for iteration, _ in progress.measurements}
    shown = sorted(iterations & {0, max(iterations, default=0)})
    rows: list[tuple[str, ...]] = []
    for temperature in sorted({temperature for _, temperature in progress.measurements}):
        found = [progress.measurements.get((iteration, temperature)) for iteration in shown]
        for length in sorted({length for each in found if each is not None for length in each.accuracy}):
            cells = ["" if each is None else str(each.accuracy.get(length, "")) for each in found]
            rows.append((f"{length:,}", f"{temperature:g}", *cells))
        failed = ["" if each is None or not each.failed else str(each.failed) for each in found]
        if any(failed):
            rows.append(("failed", f"{temperature:g}", *failed))
    return _table("accuracy on held-out questions", rows, ("length", "temperature", *map(_after, shown)))


def _rewards_by_length(progress: LoopProgress) -> Table | None:
    lengths = progress.latest.by_length if progress.latest is not None else {}
    rows = [(f"{length:,}", f"{each.reward:.3f}", f"{each.reads:,}") for length, each in sorted(lengths.items())]
    return _table("latest collection", rows, ("length", "reward", "reads"))


def _speed(record: CollectionRecord) -> str:
    if not record.tokens_per_second:
        return ""
    return f"; {record.tokens_per_second:,.0f} tokens/s, {record.cached_fraction:.0%} of prompts cached"


def _groups(record: CollectionRecord) -> str:
    others = f"{record.all_right} always right, {record.other_uniform} never or all alike, {record.failed} failed"
    return f"{record.groups} groups with variance, {others}"


def _training_rows(progress: LoopProgress) -> list[tuple[str, str]]:
    """Names and values of the newest step's logged metrics; missing ones are left out."""
    rate = progress.training_tokens_per_second
    logged = ((label, progress.metrics.get(name), form) for label, name, form in _SHOWN)
    shown = (("tokens/s", rate, ",.0f"), *logged)
    return [(label, f"{value:{form}}") for label, value, form in shown if value is not None]


def _time(progress: LoopProgress) -> Table | None:
    times = progress.times()
    total = sum(times.values()) or 1.0
    return _table("time", [(phase, _duration(seconds), f"{seconds / total:.0%}") for phase, seconds in times.items()])


def _table(title: str, rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> Table | None:
    """Rows of numbers; without headers, the first column holds their names. None if there are no rows."""
    if not rows:
        return None
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.show_header = bool(headers)
    for place, header in enumerate(headers or [""] * len(rows[0])):
        table.add_column(header, justify="right" if headers or place else "left")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class Sparkline:
    """Values as a row of bars, from lowest to highest; means of neighbours if there are too many."""

    values: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shades = _ASCII_SHADES if options.ascii_only else _SHADES
        yield Text(_bars(_thinned(self.values, max(options.max_width, 1)), shades), style="green", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Width:
        return Width(1, min(max(len(self.values), 1), options.max_width))


def _bars(values: Sequence[float], shades: str) -> str:
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    span = highest - lowest
    steps = [(value - lowest) / span if span > 0 else 0.5 for value in values]
    return "".join(shades[min(int(step * len(shades)), len(shades) - 1)] for step in steps)


def _thinned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * place // width for place in range(width + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(edges)]


def _after(iteration: int) -> str:
    """Return a name for an iteration's initial weights."""
    if not iteration:
        return "before any training"
    return f"after {counted(iteration, 'iteration')}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
