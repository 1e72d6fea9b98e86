"""The main table of an evaluation, with all systems, for spreadsheets (CSV, plain numbers) and papers (LaTeX)."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.paired_tests import Comparison
from memagent_evaluation.standings import Standing, standings_cells
from memagent_evaluation.statistics import Estimate
from memagent_evaluation.written_files import written_whole

CSV_FILE: Final = "standings.csv"
LATEX_FILE: Final = "standings.tex"
_ESCAPED: Final = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "–": "--"}
)  # fmt: skip
_ACCURACY: Final = ("mean", "low", "high")
_AGAINST: Final = ("difference", "low", "high", "p_value")


def write_standings(found: Sequence[Standing], folder: Path) -> None:
    """Write both files; each appears when it is complete.

    Raises:
        EvaluationError: one cannot be written.
    """
    for name, text in ((CSV_FILE, as_csv(found)), (LATEX_FILE, as_latex(found))):
        with written_whole(folder / name) as new:
            new.write_text(text, encoding="utf-8", newline="")


def as_csv(found: Sequence[Standing]) -> str:
    """A line for each standing, shares as 0 to 1; unknown values are empty."""
    file = io.StringIO()
    rows = [_flat(each) for each in found]
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["system"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_latex(found: Sequence[Standing]) -> str:
    r"""A tabular for the package booktabs, with the cells that the report has."""
    head, *body = standings_cells(found)
    lines = [" & ".join(cell.translate(_ESCAPED) for cell in row) + r" \\" for row in (head, *body)]
    return "\n".join(
        [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{'l' * len(head)}}}", r"\toprule", lines[0], r"\midrule",
         *lines[1:], r"\bottomrule", r"\end{tabular}", ""]
    )  # fmt: skip


def _flat(standing: Standing) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for each in fields(Standing):
        value = getattr(standing, each.name)
        if each.name == "accuracy":
            flat |= _numbers(value, each.name, _ACCURACY)
        elif each.name == "against_first":
            flat |= _numbers(value, each.name, _AGAINST)
        else:
            flat[each.name] = value
    return flat


def _numbers(value: Estimate | Comparison | None, prefix: str, names: Sequence[str]) -> dict[str, float | None]:
    return {f"{prefix}_{name}": None if value is None else getattr(value, name) for name in names}
