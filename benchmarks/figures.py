"""A measured figure, and functions that print and store figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import rich.box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric, its value, and its goal, if it has one."""

    metric: str
    value: float
    unit: str = ""
    goal: str = ""
    """The goal as text, such as "<= 0.5"; empty if there is none."""
    met: bool = True
    """Whether the value meets the goal; True if there is no goal."""

    @classmethod
    def at_most(cls, metric: str, value: float, unit: str, bound: float) -> Self:
        """Return a figure whose goal is a value of at most `bound`."""
        return cls(metric, value, unit, f"<= {bound:g}", value <= bound)

    @classmethod
    def below(cls, metric: str, value: float, unit: str, bound: float) -> Self:
        """Return a figure whose goal is a value below `bound`."""
        return cls(metric, value, unit, f"< {bound:g}", value < bound)

    @classmethod
    def exactly(cls, metric: str, value: float, goal: float) -> Self:
        """Return a figure for a count, whose goal is exactly `goal`."""
        return cls(metric, value, "", f"{goal:g}", value == goal)

    @classmethod
    def at_least(cls, metric: str, value: float, unit: str, bound: float) -> Self:
        """Return a figure whose goal is a value of at least `bound`."""
        return cls(metric, value, unit, f">= {bound:g}", value >= bound)


def print_table(figures: Sequence[Figure]) -> None:
    """Print figures as a table that can be pasted into Markdown."""
    table = Table(box=rich.box.MARKDOWN)
    for column in ("figure", "measured", "goal", ""):
        table.add_column(column, justify="right" if column == "measured" else "left", no_wrap=True)
    for figure in figures:
        verdict = "" if not figure.goal else "met" if figure.met else "MISSED"
        table.add_row(figure.metric, f"{figure.value:.3g} {figure.unit}".strip(), figure.goal, verdict)
    Console(width=140).print(table)


def write_json(figures: Sequence[Figure], path: Path) -> None:
    """Write figures as JSON: a list of objects with metric, value, unit, goal and met."""
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
