"""Plots of an evaluation: accuracy against length, and recall of facts by length and depth in the document.

PNG and SVG, without a display. Equal results give equal SVG files, to the byte.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final
from zlib import crc32

from memagent_evaluation.markdown_tables import format_length, group_items
from memagent_evaluation.result_table import QuestionOutcome, ResultRow, Results, can_be_pooled, translate_write_errors
from memagent_evaluation.standings import compute_accuracy
from memagent_graph.errors import load_extra
from memagent_graph.storage.private_files import open_atomically

MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDTH, _HEIGHT = 8.0, 4.4
"""The size in inches. An inch has 100 pixels in SVG, and 200 in PNG."""
_STYLE: Final = (
    "seaborn-v0_8-whitegrid",
    "seaborn-v0_8-colorblind",
    {"svg.hashsalt": "memagent", "figure.dpi": 100, "savefig.dpi": 200, "figure.titleweight": "bold"},
)
_DEPTH_BINS: Final = 10


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw all possible plots as PNG and SVG; return the PNG files' paths in the report's order.

    Args:
        results: the results of the evaluation.
        folder: an existing folder for the files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        EvaluationError: a file cannot be written.
    """
    style_module = load_extra("matplotlib.style", "eval", "drawing results")
    figure_module = load_extra("matplotlib.figure", "eval", "drawing results")
    paths: list[Path] = []

    def draw(stem: str, draw_content: Callable[..., None], *arguments: Any) -> None:
        with style_module.context(_STYLE):
            figure = figure_module.Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            draw_content(figure, *arguments)
            paths.append(_save(figure, folder / stem))

    units = list(dict.fromkeys(row.unit for row in results.rows))
    for unit in units:
        rows = [row for row in results.rows if row.unit == unit and not row.scripted]
        unit_suffix = unit if len(units) > 1 else ""
        for task, group in _group_rows(rows):
            draw(make_file_stem("accuracy", task, unit_suffix), draw_accuracy, group, unit)
        for system, group in group_items(rows, lambda row: row.system):
            if grid := compute_depth_grid(group):
                draw(
                    make_file_stem("depth", system, unit_suffix),
                    draw_depths,
                    grid,
                    system,
                    unit,
                    _format_task_names(group),
                )
    return paths


def _group_rows(rows: Sequence[ResultRow]) -> list[tuple[str, Sequence[ResultRow]]]:
    """Return the task and the rows of each plot; the task "" means all tasks, if a mean over them is meaningful."""
    by_task: list[tuple[str, Sequence[ResultRow]]] = list(group_items(rows, lambda row: row.task))
    if not rows or not can_be_pooled(rows):
        return by_task
    return [("", rows), *(by_task if len(by_task) > 1 else [])]


def draw_accuracy(figure: Any, rows: Sequence[ResultRow], unit: str) -> None:
    """Draw accuracy against length: for each system lenient accuracy with its interval, and strict accuracy dotted.

    A length at which no document fits in a system's context window has no point.
    """
    axes = figure.subplots()
    for index, (system, group) in enumerate(group_items(rows, lambda row: row.system)):
        cells = dict(sorted(group_items(group, lambda row: row.length)))
        lenient, strict = (
            {length: estimate for length, cell in cells.items() if (estimate := compute_accuracy(cell, score))}
            for score in ("lenient", "strict")
        )
        lengths = list(lenient)
        colour = f"C{index}"
        low = [100 * estimate.low for estimate in lenient.values()]
        high = [100 * estimate.high for estimate in lenient.values()]
        axes.fill_between(lengths, low, high, facecolor=(colour, 0.1), edgecolor=(colour, 0.4), linewidth=0.7)
        axes.plot(lengths, [100 * estimate.mean for estimate in strict.values()], linestyle=(0, (1, 1.5)), color=colour)
        name = _escape(system)
        label = name if lengths else f"{name}\n(does not fit)"
        means = [100 * estimate.mean for estimate in lenient.values()]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(lengths, means, label=label, color=colour, zorder=20 - index, linewidth=2.2, marker=marker)
    _set_length_axis(axes, rows, unit)
    axes.set_ylim(-3, 103)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("questions answered right, %")
    figure.suptitle("Accuracy against length", x=0.01, ha="left")
    axes.set_title(f"{_format_task_names(rows)}, {_format_counts(rows)}; lenient with 95 % bands, strict dotted")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", handlelength=1.8)


def compute_depth_grid(rows: Sequence[ResultRow]) -> dict[tuple[int, int], list[bool]]:
    """Return whether each fact is in its answer, by length and by tenth of the document."""
    grid: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for row in rows:
        if row.outcome is not QuestionOutcome.DOES_NOT_FIT:
            for depth, is_found in zip(row.needle_depths, row.needles_found, strict=True):
                grid[row.length, min(int(depth * _DEPTH_BINS), _DEPTH_BINS - 1)].append(is_found)
    return dict(grid)


def draw_depths(figure: Any, grid: dict[tuple[int, int], list[bool]], system: str, unit: str, tasks: str) -> None:
    """Draw a heat map of the percentage of facts in answers, by length and depth. Cells without facts stay empty."""
    axes = figure.subplots()
    lengths = sorted({length for length, _ in grid})
    tenths = range(_DEPTH_BINS)
    percentages = [[100 * fmean(grid.get((length, tenth), [math.nan])) for length in lengths] for tenth in tenths]
    image = axes.imshow(percentages, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for length, tenth in grid:
        column = lengths.index(length)
        percentage = percentages[tenth][column]
        colour = "white" if percentage < 55 else "black"
        axes.text(column, tenth, f"{percentage:.0f}", ha="center", va="center", fontsize=9, color=colour)
    axes.grid(visible=False)
    axes.set_xticks(range(len(lengths)), [format_length(length, unit) for length in lengths])
    axes.set_yticks(tenths, [f"{10 * tenth}–{10 * tenth + 10} %" for tenth in tenths])
    axes.set_xlabel(f"document length, {unit}")
    axes.set_ylabel("depth of the fact")
    figure.suptitle(f"Facts found by {_escape(system)}, %", x=0.01, ha="left")
    axes.set_title(f"by length and depth; {tasks}, {sum(map(len, grid.values())):,} facts")
    figure.colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)


def _set_length_axis(axes: Any, rows: Sequence[ResultRow], unit: str) -> None:
    lengths = sorted({row.length for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_length(length, unit) for length in lengths], rotation=40, ha="right")
    axes.minorticks_off()
    axes.set_xlabel(f"document length, {unit}")
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)


def _format_task_names(rows: Sequence[ResultRow]) -> str:
    names = list(dict.fromkeys(_escape(row.task) for row in rows))
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} tasks"


def _escape(name: str) -> str:
    """Return a name in which a dollar does not begin a formula."""
    return name.replace("$", r"\$")


def _format_counts(rows: Sequence[ResultRow]) -> str:
    counts = {len(group) for _, group in group_items(rows, lambda row: (row.system, row.length))}
    return f"n = {min(counts)}" if len(counts) == 1 else f"n = {min(counts)} to {max(counts)}"


def make_file_stem(*parts: str) -> str:
    """Join names to the stem of a file name. Characters that are not allowed, as in "gated:stop=yes", become "-".

    A changed stem ends with a hash of the original, because two originals might become the same stem.
    """
    name = "_".join(filter(None, parts))
    safe_name = re.sub(r"[^\w+-]+", "-", name).strip("-")
    return safe_name if safe_name == name else f"{safe_name}-{crc32(name.encode()):08x}"


def _save(figure: Any, stem: Path) -> Path:
    """Write a figure as PNG and SVG, each atomically. Return the PNG's path."""
    for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
        path = stem.with_name(stem.name + suffix)  # the stem may have dots
        with translate_write_errors(path), open_atomically(path) as file:
            figure.savefig(file, format=suffix[1:], metadata=metadata)
    return stem.with_name(f"{stem.name}.png")
