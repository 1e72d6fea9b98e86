"""Does a policy forget? Accuracy against the number of chunks, before and after reinforcement learning.

    python -m benchmarks.length_figure work/figure --model before=memagent_graph/embedded --model after=work/rl/best

Each document is held-out prose with one planted fact of its own ("alone"), or with a foreign fact in most chunks
("foreign"); it is read greedily and at temperature 1 by the readers of `memagent_training.embedded.evaluate`, which
compute what the graph and a server compute, many documents at once. Every read is one line of OUTCOMES, so a run that
was stopped goes on. A table and pictures (PNG, SVG) come of all lines that are there:

- accuracy against chunks with 95 % Wilson intervals, one curve per model and temperature;
- loss per overwrite: the mean probability that sampling at temperature 1 does not keep a value that is in memory;
- where in the document the fact stood against length, for the last model.

More points: name more --chunks, --questions or another --seed; one process per model uses both cores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memagent_graph.evaluation.statistics import Estimate, wilson

OUTCOMES = "outcomes.jsonl"
QUESTIONS_PER_DOCUMENT = 40
"""Questions that share their prose, each with its own fact in it, in the setting "alone"."""


@dataclass(frozen=True, slots=True)
class Read:
    """One document read for one question."""

    model: str
    weights: str
    """Their fingerprint."""
    setting: str
    temperature: float
    chunks: int
    seed: int
    document: int
    """Whose prose it shares with the questions of the same number."""
    depth: float | None
    """Where the fact stood, 0 to 1; None where an edge between two chunks cut it."""
    right: bool
    overwrites: int
    risk: float
    lost_at: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured together: reads of one length by one model in one way."""

    model: str
    setting: str
    temperature: float
    chunks: int
    seed: int


def measure(folder: Path, name: str, model: Path, cells: Sequence[Cell], questions: int) -> None:
    """Add the reads that are missing."""
    import torch

    from memagent_graph.evaluation.planted_facts import PlantedFacts
    from memagent_graph.model_info import weights_version
    from memagent_training.embedded.documents import Setting, questions_alone, questions_with_foreign_facts
    from memagent_training.embedded.evaluate import Reader, default_prose

    torch.set_num_threads(1)
    weights = weights_version(model)
    profile = json.loads((model / "memagent.json").read_text(encoding="utf-8"))
    there = defaultdict(list)
    for read in outcomes_in(folder):
        if read.model == name and read.weights != weights:
            raise SystemExit(f"{folder} has reads of another {name}; name this one otherwise, or take another folder")
        there[Cell(read.model, read.setting, read.temperature, read.chunks, read.seed)].append(read)
    prose = default_prose()
    for cell in cells:
        found = len(there[cell])
        document = max((read.document for read in there[cell]), default=-1) + 1
        while found < questions:
            source = f"{cell.seed}/{cell.chunks}/{cell.setting}/{document}"
            facts = PlantedFacts(random.Random(source), held_out=True, number_share=1.0)
            setting = Setting(
                cell.chunks, cell.setting == "foreign", profile["chunk_tokens"], 1.0, profile.get("boundary", "token")
            )
            reader = Reader(model, cell.temperature, seed=hash_of(source))
            if setting.foreign:
                asked = questions_with_foreign_facts(reader.tokenizer, prose, setting, facts, 0)
            else:
                count = min(QUESTIONS_PER_DOCUMENT, questions - found)
                asked = questions_alone(reader.tokenizer, prose, setting, facts, count)
            asked = asked[: questions - found]
            reads = [
                Read(
                    model=name,
                    weights=weights,
                    setting=cell.setting,
                    temperature=cell.temperature,
                    chunks=cell.chunks,
                    seed=cell.seed,
                    document=document,
                    depth=None if each.question.fact_chunk is None else each.question.fact_chunk / cell.chunks,
                    right=each.right,
                    overwrites=each.overwrites,
                    risk=each.risk,
                    lost_at=each.lost_at,
                )
                for each in reader.read(asked)
            ]
            with (folder / OUTCOMES).open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(read)) + "\n" for read in reads))
            found += len(reads)
            document += 1
        there[cell] = [read for read in outcomes_in(folder) if cell_of(read) == cell]
        print(line_of(cell, there[cell]), flush=True)


def hash_of(text: str) -> int:
    """A seed, the same in every process."""
    return random.Random(text).randrange(2**31)


def cell_of(read: Read) -> Cell:
    return Cell(read.model, read.setting, read.temperature, read.chunks, read.seed)


def outcomes_in(folder: Path) -> Iterator[Read]:
    """All reads that are there; a last line that is torn does not count."""
    path = folder / OUTCOMES
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Read(**json.loads(line))
        except ValueError:
            continue


def accuracy(reads: Sequence[Read]) -> Estimate:
    return wilson(sum(read.right for read in reads), len(reads))


def loss_per_overwrite(reads: Sequence[Read]) -> float | None:
    """At temperature 1, over all steps that began with the value in memory."""
    overwrites = sum(read.overwrites for read in reads)
    return sum(read.risk for read in reads) / overwrites if overwrites else None


def line_of(cell: Cell, reads: Sequence[Read]) -> str:
    """One line of the table, in Markdown."""
    found, loss = accuracy(reads), loss_per_overwrite(reads)
    way = "greedy" if not cell.temperature else f"T={cell.temperature:g}"
    shown = "-" if loss is None else f"{loss:.1e}"
    share = f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
    return f"| {cell.model} | {cell.setting} | {way} | {cell.chunks:,} | {share} | {found.n} | {shown} |"


def table(reads: Sequence[Read]) -> str:
    """Every cell, seeds together."""
    cells: dict[Cell, list[Read]] = defaultdict(list)
    for read in reads:
        cells[Cell(read.model, read.setting, read.temperature, read.chunks, 0)].append(read)
    head = [
        "| model | foreign facts | decoding | chunks | right | documents | loss per overwrite |",
        "|---|---|---|---|---|---|---|",
    ]
    models = list(dict.fromkeys(read.model for read in reads))
    ordered = sorted(cells, key=lambda each: (each.setting, each.temperature, models.index(each.model), each.chunks))
    return "\n".join([*head, *(line_of(cell, cells[cell]) for cell in ordered)])


def draw(reads: Sequence[Read], folder: Path) -> None:
    """Curves for each setting, and the heat map of the last model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    from memagent_graph.evaluation.plots import CURVE_COLOURS, MARKERS, STYLE

    models = list(dict.fromkeys(read.model for read in reads))
    style: Any = STYLE  # matplotlib's stub wants its keys as literals
    with mpl.rc_context(style):
        for setting in dict.fromkeys(read.setting for read in reads):
            figure, axes = pyplot.subplots(figsize=(8.0, 4.4), layout="constrained")
            for number, model in enumerate(models):
                for temperature, dashes in ((0.0, "-"), (1.0, "--")):
                    curve = _curve(
                        [r for r in reads if (r.model, r.setting, r.temperature) == (model, setting, temperature)]
                    )
                    if not curve:
                        continue
                    chunks = [each[0] for each in curve]
                    colour = CURVE_COLOURS[number % len(CURVE_COLOURS)]
                    label = f"{model}, {'greedy' if not temperature else 'temperature 1'}"
                    axes.plot(
                        chunks, [e.mean for _, e in curve], dashes, color=colour, marker=MARKERS[number], label=label
                    )
                    axes.fill_between(
                        chunks, [e.low for _, e in curve], [e.high for _, e in curve], color=colour, alpha=0.12, lw=0
                    )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.set_ylim(-0.02, 1.04)
            axes.set_xlabel("chunks of 256 tokens")
            axes.set_ylabel("right")
            axes.legend()
            figure.suptitle("One fact in prose" if setting == "alone" else "A foreign fact in most chunks")
            _save(figure, folder / f"lengths_{setting}")
            pyplot.close(figure)
        _draw_depths(models[-1], [read for read in reads if read.model == models[-1]], folder)


def _curve(reads: Sequence[Read]) -> list[tuple[int, Estimate]]:
    by_length: dict[int, list[Read]] = defaultdict(list)
    for read in reads:
        by_length[read.chunks].append(read)
    return [(chunks, accuracy(by_length[chunks])) for chunks in sorted(by_length)]


def _draw_depths(model: str, reads: Sequence[Read], folder: Path) -> None:
    from matplotlib import pyplot

    with_depth = [read for read in reads if read.depth is not None and read.temperature]
    lengths = sorted({read.chunks for read in with_depth})
    if not lengths:
        return
    grid: list[list[float]] = []
    for band in range(10):
        row = []
        for chunks in lengths:
            inside = [r for r in with_depth if r.chunks == chunks and min(int((r.depth or 0.0) * 10), 9) == band]
            row.append(sum(r.right for r in inside) / len(inside) if inside else float("nan"))
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
    _save(figure, folder / "depths")
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
    parser.add_argument("--questions", type=int, default=200, help="documents of each length, model and temperature")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--settings", choices=["alone", "foreign"], nargs="+", default=["alone"])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for chunks in given.chunks:  # short ones first, of every model
        for pair in given.model:
            name, _, model = pair.partition("=")
            cells = [
                Cell(name, setting, temperature, chunks, given.seed)
                for setting in given.settings
                for temperature in given.temperatures
            ]
            measure(given.folder, name, Path(model), cells, given.questions)
    reads = list(outcomes_in(given.folder))
    (given.folder / "table.md").write_text(table(reads) + "\n", encoding="utf-8")
    print(table(reads))
    draw(reads, given.folder)


if __name__ == "__main__":
    main()
