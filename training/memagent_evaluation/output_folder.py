"""The folder of an evaluation: the names of its files, and the files that can always be made again from its rows.

journal.jsonl              the truth, while it runs and afterwards (`result_journal`)
runs.sqlite                the run log, for `memagent show`, unless another one was named
results.parquet            the table (`result_table`)
report.md, *.png, *.svg    the report and its plots
standings.csv, .tex        its main table (`standings_files`)
documents                  texts that were to be kept
checkpoints.sqlite, open-documents    only while it runs: what resuming needs, and what is being read
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from memagent_evaluation.plots import draw_all
from memagent_evaluation.report import render_report
from memagent_evaluation.result_journal import load_results
from memagent_evaluation.result_table import TABLE, Results, write_table
from memagent_evaluation.standings import standings
from memagent_evaluation.standings_files import write_standings
from memagent_evaluation.written_files import written_whole
from memagent_graph.prices import Prices

REPORT: Final = "report.md"
RUNS: Final = "runs.sqlite"
CHECKPOINTS: Final = "checkpoints.sqlite"
KEPT_DOCUMENTS: Final = "documents"
OPEN_DOCUMENTS: Final = "open-documents"


def write_outputs(folder: Path, log: Path | None, prices: Prices | None = None) -> Results:
    """Write the table, the plots and the report of a folder's results.

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
        write_standings(standings(results), folder)
        report = render_report(results, plots=draw_all(results, folder), log=log, prices=prices)
        with written_whole(folder / REPORT) as new:
            new.write_text(report, encoding="utf-8")
    return results
