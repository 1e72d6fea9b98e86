"""Does a policy forget? Accuracy against the number of chunks, before and after reinforcement learning.

    python -m benchmarks.length_figure work/figure --model before=memagent_graph/embedded --model after=work/rl/best

Each document is held-out prose with one planted fact of its own ("alone"), or with a foreign fact in most chunks
("foreign"). Each model reads it greedily and at temperature 1; whatever it writes becomes its memory; with --guarded it
reads a second time, and memories with invented words are refused. The last model also answers in one call, with the
--baselines. Every read is one line of a file (`benchmarks.length_reads`), so a run that was stopped continues. A table
and plots (PNG, SVG) are made from all lines:

- accuracy against chunks with 95 % Wilson intervals, one curve per model and temperature, and per baseline;
- loss per overwrite, along greedy reads: the mean probability that sampling at temperature 1 does not keep a value that
  is in memory;
- the fact's depth in the document against length, for the last model at temperature 1.

A fact that the edge between two chunks cuts counts too; the table has their number. Questions on one document share its
prose ("alone": as many as a quarter of its chunks, 4 to 40), each with a fact, and so a text, of its own.

More points: name more --chunks, --questions or another --seed. A process uses one core; several may fill one folder,
each with its own models.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.length_reads import GUARDED, READER, Cell, Read, fill, reads_in
from memagent_evaluation.statistics import Estimate, wilson

BASELINES = ("middle_truncation", "full_context", "retrieval")


def accuracy(reads: Sequence[Read]) -> Estimate | None:
    """The share that is right; None if no document fits. If some do, the others count as wrong."""
    if all(read.right is None for read in reads):
        return None
    return wilson(sum(bool(read.right) for read in reads), len(reads))


def loss_per_overwrite(reads: Sequence[Read]) -> float | None:
    """The mean risk of all steps that began with the value in memory.

    Only greedy reads are used, which continue where sampling might have lost the value: sampled reads with values that
    are hard to keep end early, and would count less.
    """
    reads = [read for read in reads if not read.temperature]
    overwrites = sum(read.overwrites for read in reads)
    return sum(read.risk for read in reads) / overwrites if overwrites else None


def line_of(cell: Cell, reads: Sequence[Read]) -> str:
    """One line of the table, in Markdown."""
    found, loss = accuracy(reads), loss_per_overwrite(reads)
    way = "greedy" if not cell.temperature else f"T={cell.temperature:g}"
    shown = "-" if loss is None else f"{loss:.1e}"
    share = "does not fit" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
    documents = len({(read.seed, read.document) for read in reads})
    counts = f"{len(reads)} | {documents} | {sum(read.depth is None for read in reads)}"
    return f"| {name_of(cell)} | {cell.setting} | {way} | {cell.chunks:,} | {share} | {counts} | {shown} |"


def name_of(cell: Cell) -> str:
    """The model and its rule, or a baseline and its model."""
    if cell.system == GUARDED:
        return f"{cell.model}, nothing invented"
    return cell.model if cell.system == READER else f"{cell.system.replace('_', ' ')} ({cell.model})"


def table(reads: Sequence[Read]) -> str:
    """Every cell, seeds together."""
    cells = gathered(reads)
    head = [
        "| model | facts | decoding | chunks | right | questions | on documents | facts cut | loss per overwrite |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(map(name_of, cells)))
    ordered = sorted(
        cells,
        key=lambda each: (
            each.setting,
            each.system != READER,
            each.temperature,
            names.index(name_of(each)),
            each.chunks,
        ),
    )
    return "\n".join([*head, *(line_of(cell, cells[cell]) for cell in ordered)])


def gathered(reads: Sequence[Read]) -> dict[Cell, list[Read]]:
    """Reads by cell, seeds together."""
    cells: dict[Cell, list[Read]] = defaultdict(list)
    for read in reads:
        cells[replace(read.cell, seed=0)].append(read)
    return cells


def draw(reads: Sequence[Read], folder: Path, longest_in_training: int | None = None) -> None:
    """Curves for each setting, and the heat map of the last model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    from memagent_evaluation.plots import STYLE

    style: Any = STYLE  # matplotlib's stub needs its keys as literals
    with mpl.rc_context(style):
        for setting in dict.fromkeys(read.setting for read in reads):
            figure, axes = pyplot.subplots(figsize=(10.5, 4.8), layout="constrained")
            _draw_curves(axes, [read for read in reads if read.setting == setting])
            if longest_in_training is not None:
                axes.axvline(longest_in_training, color="0.4", linestyle=":", label="longest in training")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.set_ylim(-0.02, 1.04)
            axes.set_xlabel("chunks of 256 tokens")
            axes.set_ylabel("right")
            figure.legend(fontsize="small", loc="outside right upper")
            figure.suptitle("One fact in prose" if setting == "alone" else "A foreign fact in most chunks")
            _save(figure, folder / f"lengths_{setting}")
            pyplot.close(figure)
        own = [read for read in reads if read.system == READER]
        for setting in dict.fromkeys(read.setting for read in own):
            sampled = [
                read
                for read in own
                if (read.model, read.setting, read.temperature) == (own[-1].model, setting, 1.0)
                and read.depth is not None
            ]
            if sampled:
                _draw_depths(own[-1].model, sampled, folder / f"depths_{setting}")


def _draw_curves(axes: Any, reads: Sequence[Read]) -> None:
    """A colour per model and per baseline; a solid line for greedy reads, others for temperatures."""
    from memagent_evaluation.plots import CURVE_COLOURS, MARKERS

    cells = gathered(reads)
    names = list(dict.fromkeys(map(name_of, sorted(cells, key=lambda cell: cell.system != READER))))
    for number, name in enumerate(names):
        colour, marker = CURVE_COLOURS[number % len(CURVE_COLOURS)], MARKERS[number % len(MARKERS)]
        for temperature, dashes in zip(sorted({cell.temperature for cell in cells}), cycle(("-", "--", ":", "-."))):
            points = list(
                _curve({c: r for c, r in cells.items() if (name_of(c), c.temperature) == (name, temperature)})
            )
            if not points:
                continue
            chunks, found = zip(*points, strict=True)
            label = f"{name}, {f'temperature {temperature:g}' if temperature else 'greedy'}"
            axes.plot(chunks, [e.mean for e in found], dashes, color=colour, marker=marker, label=label)
            axes.fill_between(chunks, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.12, lw=0)


def _curve(cells: dict[Cell, list[Read]]) -> Iterator[tuple[int, Estimate]]:
    for cell in sorted(cells, key=lambda each: each.chunks):
        if (found := accuracy(cells[cell])) is not None:
            yield cell.chunks, found


def _draw_depths(model: str, reads: Sequence[Read], path: Path) -> None:
    from matplotlib import pyplot

    lengths = sorted({read.chunks for read in reads})
    grid: list[list[float]] = []
    for band in range(10):
        row = []
        for chunks in lengths:
            inside = [r for r in reads if r.chunks == chunks and min(int((r.depth or 0.0) * 10), 9) == band]
            row.append(sum(bool(r.right) for r in inside) / len(inside) if inside else float("nan"))
        grid.append(row)
    figure, axes = pyplot.subplots(figsize=(8.0, 4.4), layout="constrained")
    image = axes.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="cividis")
    axes.set_xticks(range(len(lengths)), [f"{each:,}" for each in lengths])
    axes.set_yticks(range(10), [f"{10 * band} %" for band in range(10)])
    axes.set_xlabel("chunks")
    axes.set_ylabel("where the fact stands")
    axes.grid(visible=False)
    figure.colorbar(image, label="right")
    figure.suptitle(f"{model}, temperature 1")
    _save(figure, path)
    pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FOLDER", help="repeatable; none: only draw"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--questions", type=int, default=200, help="of each length, model and temperature")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--settings", choices=["alone", "foreign"], nargs="+", default=["alone"])
    parser.add_argument("--baselines", choices=BASELINES, nargs="*", default=list(BASELINES))
    parser.add_argument(
        "--guarded", action="store_true", help="read also as with `memagent read --on-invented keep_previous`"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest-in-training", type=int, metavar="CHUNKS", help="a line in the picture")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    models = [(name, Path(model)) for name, _, model in (pair.partition("=") for pair in given.model)]
    for chunks in given.chunks:  # short ones first, of every model
        for setting in given.settings:
            systems = [(READER, *model, given.temperatures) for model in models]
            systems += [(GUARDED, *model, given.temperatures) for model in models if given.guarded]
            systems += [(baseline, *models[-1], [0.0]) for baseline in given.baselines if models]
            for system, name, model, temperatures in systems:
                cells = [Cell(system, name, setting, temperature, chunks, given.seed) for temperature in temperatures]
                fill(given.folder, model, cells, given.questions)
                found = gathered([read for read in reads_in(given.folder) if read.cell in cells])
                for cell, reads in found.items():
                    print(line_of(cell, reads), flush=True)
    names = [name for name, _ in models]
    reads = sorted(reads_in(given.folder), key=lambda read: names.index(read.model) if read.model in names else -1)
    (given.folder / "table.md").write_text(table(reads) + "\n", encoding="utf-8")
    print(table(reads))
    draw(reads, given.folder, given.longest_in_training)


if __name__ == "__main__":
    main()
