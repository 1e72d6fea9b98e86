"""The folder of an evaluation: the names of its files, and the files that can always be made again from its rows.

journal.jsonl              the truth, while it runs and afterwards (`result_journal`)
runs.sqlite                the run log, for `memagent show`, unless another one was named
results.parquet            the table (`result_table`)
report.md, *.png, *.svg    the report and its plots
standings.csv, .tex        its main table, for spreadsheets and papers
documents                  texts that were to be kept
checkpoints.sqlite, open-documents    only while it runs: what resuming needs, and what is being read
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.plots import draw_all
from memagent_evaluation.report import render_report
from memagent_evaluation.result_journal import load_results
from memagent_evaluation.result_table import TABLE, Results, write_table, writing
from memagent_evaluation.standings import SystemStanding, standings, standings_cells
from memagent_graph.prices import Prices
from memagent_graph.storage.whole_files import write_whole

REPORT: Final = "report.md"
RUNS: Final = "runs.sqlite"
CHECKPOINTS: Final = "checkpoints.sqlite"
KEPT_DOCUMENTS: Final = "documents"
OPEN_DOCUMENTS: Final = "open-documents"
_ESCAPED: Final = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "–": "--"}
)  # fmt: skip


def write_outputs(folder: Path, log: Path | None, prices: Prices | None = None) -> Results:
    """Write the table, the plots and the report of a folder's results, each file when it is complete.

    Args:
        folder: the folder, or the table of one.
        log: the run log, for the command that opens a run.
        prices: of tokens, if known.

    Raises:
        EvaluationError: there are no results, or a file cannot be written.
        MissingExtraError: the extra "eval" is not installed.
    """
    results = load_results(folder)
    folder = folder if folder.is_dir() else folder.parent
    if results.rows:
        write_table(results, folder / TABLE)
        lines = standings(results)
        report = render_report(results, plots=draw_all(results, folder), log=log, prices=prices)
        for name, text in ((REPORT, report), ("standings.csv", as_csv(lines)), ("standings.tex", as_latex(lines))):
            with writing(folder / name):
                write_whole(folder / name, text)
    return results


def as_csv(lines: Sequence[SystemStanding]) -> str:
    """Return a line for each standing, shares as 0 to 1; unknown values are empty."""
    file = io.StringIO()
    rows = [_flat(line) for line in lines]
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["system"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_latex(lines: Sequence[SystemStanding]) -> str:
    r"""Return a tabular for the package booktabs, with the cells that the report has."""
    head, *body = standings_cells(lines)
    rows = [" & ".join(cell.translate(_ESCAPED) for cell in row) + r" \\" for row in (head, *body)]
    return "\n".join(
        [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{'l' * len(head)}}}", r"\toprule", rows[0], r"\midrule",
         *rows[1:], r"\bottomrule", r"\end{tabular}", ""]
    )  # fmt: skip


_PARTS: Final = {
    "accuracy": ("mean", "low", "high"),
    "against_first": ("difference", "low", "high", "p_value"),
    "against_first_strict": ("difference", "low", "high", "p_value"),
}
"""Numbers of the fields that have several."""


def _flat(standing: SystemStanding) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in SystemStanding.__slots__:
        value = getattr(standing, name)
        if name in _PARTS:
            values |= {f"{name}_{part}": None if value is None else getattr(value, part) for part in _PARTS[name]}
        else:
            values[name] = value
    return values
