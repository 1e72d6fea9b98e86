"""How a loop's progress looks: where it is, what it earns, how right it answers, where time goes."""

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

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.rl.loop_progress import LoopProgress
from memagent_training.rl.watching import Phase
from memagent_training.serving.policy_sync import How

_WIDE: Final = 104
"""Columns from which everything has a place beside the accuracy."""
_MEDIUM: Final = 79
"""Columns from which the small tables stand beside each other."""
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
"""How a metric is called, the trainer's name for it, and the form of its value."""


def iteration_line(progress: LoopProgress, iteration: int, now: float) -> str:
    """What came of an iteration."""
    parts = []
    record = progress.records.get(iteration)
    if record is not None:
        lengths = ", ".join(f"{length:,}: {each.reward:.3f}" for length, each in sorted(record.by_length.items()))
        parts += [f"reward {record.reward:.3f} ({lengths})", _groups(record)]
    parts.append(", ".join(f"{name} {value}" for name, value in _training_rows(progress)))
    times = progress.times(now, iteration)
    parts.append(", ".join(f"{phase.value} {_duration(seconds)}" for phase, seconds in times.items() if seconds))
    left = progress.left(now)
    parts.append("" if left is None else f"about {_duration(left)} left")
    return f"iteration {iteration + 1} of {progress.iterations}: {'; '.join(filter(None, parts))}"


def measurement_line(measurement: Measurement) -> str:
    """How right held-out questions were answered."""
    lengths = ", ".join(f"{length:,}: {each}" for length, each in sorted(measurement.accuracy.items()))
    failed = f"; {measurement.failed} failed" if measurement.failed else ""
    return (
        f"accuracy {_after(measurement.iteration)}, at temperature {measurement.temperature:g}: {lengths}{failed}; "
        f"took {_duration(measurement.seconds)}"
    )


def rendered(progress: LoopProgress, now: float, width: int) -> RenderableType:
    """The view of a loop, for so many columns; what matters most stands first, since a low terminal shows no more."""
    parts: list[RenderableType] = [_headline(progress, now, width), *_state_lines(progress, now)]
    if progress.latest is not None:
        parts += [Text(), _reward(progress), Text(_groups(progress.latest) + _speed(progress.latest), style="dim")]
    accuracy, training, times = _accuracy(progress), _training(progress), _time(progress, now)
    rewards = _rewards_by_length(progress)
    if not progress.has_begun:
        return Group(*parts)
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
    """With an empty line between each two."""
    lines = [line for each in tables if each is not None for line in (Text(), each)]
    return Group(*lines[1:])


def _headline(progress: LoopProgress, now: float, width: int) -> RenderableType:
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
    left = progress.left(now)
    told = f"{_duration(progress.elapsed(now))} gone" + ("" if left is None else f", about {_duration(left)} left")
    if width < _MEDIUM or progress.ended is not None:
        return Text.assemble((title, "bold"), "; ", told)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(title, style="bold"), ProgressBar(total=total, completed=done, width=20), Text(told))
    return grid


def _state_lines(progress: LoopProgress, now: float) -> Iterator[Text]:
    """What is being done, which weights are served, and what is on disk."""
    if progress.phase is not None:
        is_first = progress.phase is Phase.SYNC and progress.served is None  # the loop's own server then starts
        doing = _WAITING if is_first else _DOING[progress.phase]
        yield Text(f"{doing} for {_duration(progress.in_phase(now))}", style="cyan")
    told = []
    if progress.served is not None:
        iteration, served = progress.served
        told.append(
            f"served: the weights {_after(iteration)}, {_CAME_BY[served.how]} in {served.seconds:.1f} s, "
            f"log-probs within {served.gap:.1g}"
        )
    if progress.saved_step is not None:
        told.append(f"last checkpoint: step {progress.saved_step}")
    if told:
        yield Text("; ".join(told), style="dim")


def _reward(progress: LoopProgress) -> RenderableType:
    rewards = progress.rewards
    grid = Table.grid(padding=(0, 2))
    bounds = f"{min(rewards):.3f} to {max(rewards):.3f}" if len(rewards) > 1 else ""
    grid.add_row(
        Text("reward", style="bold"), Text(f"{rewards[-1]:.3f}"), Sparkline(rewards), Text(bounds, style="dim")
    )
    return grid


def _accuracy(progress: LoopProgress) -> Table | None:
    """The newest measurement of each temperature beside the first."""
    if not progress.measurements:
        return None
    pairs = {temperature: progress.first_and_latest(temperature) for temperature in progress.temperatures}
    newest = max((latest.iteration for _, latest in pairs.values() if latest is not None), default=0)
    table = _table("accuracy on held-out questions")
    table.add_column("length", justify="right")
    table.add_column("temperature", justify="right")
    if any(first is not None for first, _ in pairs.values()):
        table.add_column(_after(0))
    if newest:
        table.add_column(_after(newest))
    for temperature, pair in pairs.items():
        shown = [each for each, column in zip(pair, (_after(0), _after(newest)), strict=True) if _has(table, column)]
        for length in sorted({length for each in pair if each is not None for length in each.accuracy}):
            cells = ["" if each is None else str(each.accuracy.get(length, "")) for each in shown]
            table.add_row(f"{length:,}", f"{temperature:g}", *cells)
        failed = [each.failed if each is not None else 0 for each in shown]
        if any(failed):
            table.add_row("failed", f"{temperature:g}", *(str(each or "") for each in failed))
    return table


def _has(table: Table, column: str) -> bool:
    return any(each.header == column for each in table.columns)


def _rewards_by_length(progress: LoopProgress) -> Table | None:
    record = progress.latest
    if record is None:
        return None
    table = _table("latest collection")
    for header in ("length", "reward", "reads"):
        table.add_column(header, justify="right")
    for length, each in sorted(record.by_length.items()):
        table.add_row(f"{length:,}", f"{each.reward:.3f}", f"{each.reads:,}")
    return table


def _speed(record: CollectionRecord) -> str:
    tokens = record.prompt_tokens + record.completion_tokens
    if not tokens or record.seconds <= 0:  # all taken from the log
        return ""
    cached = record.cached_tokens / max(record.prompt_tokens, 1)
    return f"; {tokens / record.seconds:,.0f} tokens/s, {cached:.0%} of prompts cached"


def _groups(record: CollectionRecord) -> str:
    others = f"{record.all_right} always right, {record.other_uniform} never or all alike, {record.failed} failed"
    return f"{record.groups} groups with variance, {others}"


def _training(progress: LoopProgress) -> Table | None:
    rows = list(_training_rows(progress))
    if progress.step is None or not rows:
        return None
    table = _table(f"training, step {progress.step}")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _training_rows(progress: LoopProgress) -> Iterator[tuple[str, str]]:
    """Names and values of what the trainer logged of the newest step; what it did not log is left out."""
    rate = progress.training_tokens_per_second
    if rate is not None:
        yield "tokens/s", f"{rate:,.0f}"
    for label, name, form in _SHOWN:
        value = progress.metric(name)
        if value is not None:
            yield label, f"{value:{form}}"


def _time(progress: LoopProgress, now: float) -> Table:
    times = progress.times(now)
    total = sum(times.values())
    table = _table("time")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for phase, seconds in times.items():
        table.add_row(phase.value, _duration(seconds), f"{seconds / total if total else 0:.0%}")
    return table


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim"
    )


@dataclass(frozen=True, slots=True)
class Sparkline:
    """Values as a row of bars, from their lowest to their highest; where there are too many, means of neighbours."""

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
    """Which weights those are that an iteration begins with."""
    if not iteration:
        return "before any training"
    return f"after {iteration} iteration{'' if iteration == 1 else 's'}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
