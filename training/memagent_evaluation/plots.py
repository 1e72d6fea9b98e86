"""Plots of an evaluation: accuracy against length, found facts by depth in the document, and cost against length.

PNG and SVG, without a display. Equal results give equal SVG files, to the byte.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final
from zlib import crc32

from memagent_evaluation.comparisons import accuracy
from memagent_evaluation.extra_modules import extra_module
from memagent_evaluation.markdown_tables import grouped, length_label
from memagent_evaluation.result_table import Outcome, Results, Row, can_be_pooled
from memagent_evaluation.written_files import written_whole

CURVE_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A7A7A")
"""Okabe and Ito's palette, which is distinguishable with every kind of colour vision; the reader is blue."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH, _HEIGHT = 8.0, 4.4
"""Inches; 100 pixels each in SVG, 200 in PNG."""
STYLE: Final = {
    "svg.hashsalt": "memagent",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "axes.titlesize": 10.0,
    "axes.titlecolor": "#444444",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "figure.facecolor": "white",
}
_DEPTH_BINS: Final = 10
_MOST_PANELS: Final = 4
"""How many lengths, the longest ones, are in one plot of accuracy against cost."""
_DODGE: Final = 0.004
"""The distance between systems with equal accuracy, as a share of the axis."""
_LABEL_SHARE: Final = 0.05
"""The share of a length axis that a label takes."""


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw all possible plots as PNG and SVG; return the PNG files' paths in the report's order.

    Args:
        results: what was measured.
        folder: an existing folder for the files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        EvaluationError: a file cannot be written.
    """
    drawn: list[Path] = []
    units = list(dict.fromkeys(row.unit for row in results.rows))
    for unit in units:
        rows = [row for row in results.rows if row.unit == unit]
        ending = unit if len(units) > 1 else ""
        parts = _together_and_by_task([row for row in rows if not row.scripted])
        for name, shown in parts:
            with _figure() as figure:
                draw_accuracy(figure, shown, unit)
                drawn.append(_save(figure, folder / file_stem("accuracy", name, ending)))
        for name, shown in parts if parts and parts[0][0] else parts[:1]:
            if len({row.system for row in shown if row.has_costs}) > 1:
                with _figure() as figure:
                    draw_tradeoff(figure, shown, unit)
                    drawn.append(_save(figure, folder / file_stem("tradeoff", name, ending)))
        with _figure() as figure:
            if draw_cost(figure, rows, unit):
                drawn.append(_save(figure, folder / file_stem("cost", ending)))
        for system in dict.fromkeys(row.system for row in rows):
            of_system = [row for row in rows if row.system == system and not row.scripted]
            if grid := depth_grid(of_system):
                with _figure() as figure:
                    draw_depths(figure, grid, system, unit, _tasks(of_system))
                    drawn.append(_save(figure, folder / file_stem("depth", system, ending)))
    return drawn


def _together_and_by_task(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """The groups with their own plots, each with its name: all tasks, if a mean over them is meaningful, and each task
    if there are several.
    """
    by_task: list[tuple[str, Sequence[Row]]] = list(grouped(rows, lambda row: row.task))
    if not rows or not can_be_pooled(rows):
        return by_task
    return [("", rows), *(by_task if len(by_task) > 1 else [])]


def draw_accuracy(figure: Any, rows: Sequence[Row], unit: str) -> None:
    """Accuracy against length: for each system lenient accuracy with its band, and strict accuracy dotted.

    There is no point at a length at which no document fits in a system's call.
    """
    axes = figure.subplots()
    count = len({row.system for row in rows})
    ratio = max(row.length for row in rows) / min(row.length for row in rows)
    for place, (system, of_system) in enumerate(grouped(rows, lambda row: row.system)):
        fitting = {row.length for row in of_system if row.outcome is not Outcome.DOES_NOT_FIT}
        groups = sorted(
            (length, group) for length, group in grouped(of_system, lambda row: row.length) if length in fitting
        )
        lengths = [length for length, _ in groups]
        lenient, strict = ([accuracy(group, score) for _, group in groups] for score in ("lenient", "strict"))
        look = {"color": CURVE_COLOURS[place % len(CURVE_COLOURS)], "zorder": 20 - place}
        low, high = [100 * each.low for each in lenient], [100 * each.high for each in lenient]
        beside = [length * ratio ** (_DODGE * (place - (count - 1) / 2)) for length in lengths]
        band = {"facecolor": (look["color"], 0.1), "edgecolor": (look["color"], 0.4), "linewidth": 0.7}
        axes.fill_between(beside, low, high, **band)
        axes.plot(beside, [100 * each.mean for each in strict], linestyle=(0, (1, 1.5)), linewidth=1.5, **look)
        label = system if groups else f"{system}\n(does not fit)"
        axes.plot(beside, [100 * each.mean for each in lenient], label=label, **_line(place), **look)
    _length_axis(axes, rows, unit)
    axes.set_ylim(-3, 103)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("questions answered right, %")
    figure.suptitle("Accuracy against length", x=0.01, ha="left")
    axes.set_title(f"{_tasks(rows)}, {_per_point(rows)}; lenient with 95 % bands, strict dotted")
    _legend_beside(figure, axes)


def draw_tradeoff(figure: Any, rows: Sequence[Row], unit: str) -> None:
    """Accuracy against cost, a panel for each length; the dashed line is the Pareto front: nothing cheaper is as
    good.
    """
    lengths = sorted({row.length for row in rows if row.has_costs})[-_MOST_PANELS:]
    known = all(row.flops for row in rows if row.has_costs)
    ticker = extra_module("matplotlib.ticker", "drawing results")
    panels = figure.subplots(1, max(1, len(lengths)), sharey=True, squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=False):
        points: list[tuple[float, float]] = []
        for place, (system, of_system) in enumerate(grouped(rows, lambda row: row.system)):
            there = [row for row in of_system if row.length == length]
            if not (costs := [cost for row in there if row.has_costs and (cost := _cost(row, known)) is not None]):
                continue
            told = accuracy(there, "lenient")
            at, mean = fmean(costs), 100 * told.mean
            points.append((at, mean))
            axes.errorbar(
                [at], [mean], yerr=[[mean - 100 * told.low], [100 * told.high - mean]], label=system, capsize=3,
                color=CURVE_COLOURS[place % len(CURVE_COLOURS)], zorder=20 - place, elinewidth=1.1,
                **{**_line(place), "linestyle": "none"},
            )  # fmt: skip
        front = [(a, b) for a, b in points if not any(x <= a and y >= b and (x, y) != (a, b) for x, y in points)]
        axes.plot(*zip(*sorted(front), strict=True), color="#999999", linestyle=(0, (4, 2)), linewidth=1.2, zorder=1)
        axes.set_xlim(0, 1.15 * max(at for at, _ in points) or 1.0)  # a server may report no tokens
        axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axes.set_title(f"{length_label(length, unit)} {unit}")
        axes.set_xlabel("floating-point operations" if known else "tokens, in and out")
        axes.set_ylim(-3, 103)
    panels[0].set_ylabel("questions answered right, %")
    title = f"Accuracy against cost: {_tasks(rows)}, {_per_point(rows)}"
    figure.suptitle(title, x=0.01, ha="left")
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=3, handlelength=1.8, fontsize=9)


def depth_grid(rows: Sequence[Row]) -> dict[tuple[int, int], list[bool]]:
    """By length and tenth of the document: for each fact there, whether the answer has it."""
    grid: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for row in rows:
        if row.outcome is not Outcome.DOES_NOT_FIT:
            for depth, found in zip(row.needle_depths, row.needles_found, strict=True):
                grid[row.length, min(int(depth * _DEPTH_BINS), _DEPTH_BINS - 1)].append(found)
    return dict(grid)


def draw_depths(figure: Any, grid: dict[tuple[int, int], list[bool]], system: str, unit: str, tasks: str) -> None:
    """A heat map: the share of facts in answers, by length and depth; cells without a fact stay empty."""
    axes = figure.subplots()
    lengths = sorted({length for length, _ in grid})
    shares = [
        [100 * fmean(grid[length, tenth]) if (length, tenth) in grid else float("nan") for length in lengths]
        for tenth in range(_DEPTH_BINS)
    ]
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for tenth in range(_DEPTH_BINS):
        for column, length in enumerate(lengths):
            if cell := grid.get((length, tenth)):
                share = shares[tenth][column]
                axes.text(
                    column, tenth, f"{share:.0f}", ha="center", va="center", fontsize=9,
                    color="white" if share < 55 else "black", alpha=1.0 if len(cell) > 1 else 0.75,
                )  # fmt: skip
    axes.grid(visible=False)
    axes.set_xticks(range(len(lengths)), [length_label(each, unit) for each in lengths])
    axes.set_yticks(range(_DEPTH_BINS), [f"{10 * each}–{10 * each + 10} %" for each in range(_DEPTH_BINS)])
    axes.set_xlabel(f"document length, {unit}")
    axes.set_ylabel("where the fact stands")
    count = sum(map(len, grid.values()))
    figure.suptitle(f"Facts found by {system}, %", x=0.01, ha="left")
    axes.set_title(f"by length and depth; {tasks}, {count:,} facts")
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.outline.set_visible(False)


def draw_cost(figure: Any, rows: Sequence[Row], unit: str) -> bool:
    """Arithmetic per question against length, if the model's size is known; otherwise its tokens.

    With arithmetic, the estimate for one call with the whole document is drawn too.
    """
    asked = [row for row in rows if row.has_costs]
    if not asked:
        return False
    known = any(row.flops for row in asked)
    axes = figure.subplots()
    for place, system in enumerate(dict.fromkeys(row.system for row in rows)):
        of_system = [row for row in asked if row.system == system]
        costs = _mean_by_length(of_system, lambda row: _cost(row, known))
        if costs:
            look = {"color": CURVE_COLOURS[place % len(CURVE_COLOURS)], "zorder": 20 - place}
            axes.plot(list(costs), list(costs.values()), label=system, **_line(place), **look)
    whole = _mean_by_length(asked, lambda row: row.full_context_flops)
    if known and whole:
        axes.plot(
            list(whole), list(whole.values()), color="#555555", linestyle=(0, (4, 2)),
            linewidth=1.8, label="one call with all\n(estimated, quadratic)",
        )  # fmt: skip
    _length_axis(axes, rows, unit)
    axes.set_yscale("log")
    axes.set_ylabel("floating-point operations" if known else "tokens, in and out")
    figure.suptitle("Cost of one question against length", x=0.01, ha="left")
    axes.set_title(f"{_tasks(rows)}; {'arithmetic estimated from the tokens measured' if known else 'tokens measured'}")
    _legend_beside(figure, axes)
    return True


def _mean_by_length(rows: Sequence[Row], cost: Callable[[Row], float | None]) -> dict[int, float]:
    """Means of the costs that are known, lengths in ascending order."""
    known = sorted((row.length, value) for row in rows if (value := cost(row)))
    return {length: fmean(value for _, value in group) for length, group in grouped(known, lambda each: each[0])}


def _cost(row: Row, as_flops: bool) -> float | None:
    return row.flops if as_flops else float(row.prompt_tokens + row.completion_tokens)


def _line(place: int) -> dict[str, Any]:
    marker = MARKERS[place % len(MARKERS)]
    return {"linewidth": 2.2, "marker": marker, "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.8}


def _length_axis(axes: Any, rows: Sequence[Row], unit: str) -> None:
    lengths = sorted({row.length for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, _labels_apart(lengths, unit))
    axes.minorticks_off()
    axes.set_xlabel(f"document length, {unit}")
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)


def _labels_apart(lengths: Sequence[int], unit: str) -> list[str]:
    """A label for each length, empty if it would overlap the previous one."""
    labels: list[str] = []
    labelled = -math.inf
    for length in lengths:
        has_room = math.log2(length) - labelled >= _LABEL_SHARE * math.log2(lengths[-1] / lengths[0])
        labels.append(length_label(length, unit) if has_room else "")
        labelled = math.log2(length) if has_room else labelled
    return labels


def _legend_beside(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", handlelength=1.8)


def _tasks(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row.task for row in rows))
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} tasks"


def _per_point(rows: Sequence[Row]) -> str:
    counts = {len(group) for _, group in grouped(rows, lambda row: (row.system, row.length))}
    return f"n = {min(counts)}" if len(counts) == 1 else f"n = {min(counts)} to {max(counts)}"


@contextmanager
def _figure() -> Iterator[Any]:
    """A figure without pyplot and its state."""
    matplotlib = extra_module("matplotlib", "drawing results")
    figures = extra_module("matplotlib.figure", "drawing results")
    with matplotlib.rc_context(STYLE):
        yield figures.Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")


def file_stem(*parts: str) -> str:
    """A file's name without its extension, from names with characters that file names must not have: "gated:stop=yes",
    a path.

    A changed name ends with a hash of the original, because two might become the same.
    """
    name = "_".join(filter(None, parts))
    safe = re.sub(r"[^\w+-]+", "-", name).strip("-")
    return safe if safe == name else f"{safe}-{crc32(name.encode()):08x}"


def _save(figure: Any, stem: Path) -> Path:
    """Write PNG and SVG; each appears when it is complete. Returns the PNG's path."""
    for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
        path = stem.with_name(stem.name + suffix)  # a task's options may have a point
        with written_whole(path) as new:
            figure.savefig(new, format=suffix[1:], metadata=metadata)
    return stem.with_name(f"{stem.name}.png")
