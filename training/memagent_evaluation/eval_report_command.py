"""Write the report of one evaluation, or of several."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import report_failures
from memagent_graph.cli.options import JSONOption, PriceInOption, PriceOutOption
from memagent_graph.cli.output import print_json

if TYPE_CHECKING:
    from memagent_evaluation.result_table import Results
    from memagent_graph.results import Prices


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Make the tables and plots of an evaluation again, finished or not, or compare two evaluations."""

    examples: ClassVar = (
        "memagent eval-report results",
        "memagent eval-report results other-results",
    )
    folder: Annotated[Path, typer.Argument(help="A folder that `memagent eval` wrote to.")]
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare on the questions that both have.")] = (
        None
    )
    price_in: PriceInOption = None
    price_out: PriceOutOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_evaluation.report import render_comparison, write_outputs  # noqa: PLC0415
        from memagent_evaluation.result_journal import RUNS, load_results  # noqa: PLC0415
        from memagent_evaluation.standings import compare_evaluations  # noqa: PLC0415
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.results import Prices  # noqa: PLC0415

        folder, other = self.folder, self.other
        with report_failures(as_json=self.as_json):
            if other is None:
                log = folder / RUNS if (folder / RUNS).exists() else None
                prices = Prices.of(self.price_in, self.price_out)
                with Console().show_status("drawing tables and plots"):
                    results = write_outputs(folder, log, prices)
                ended = "unfinished" if results.missing else "done"
                print_results(results, folder, log, ended, prices, as_json=self.as_json)
                return
            with Console().show_status("comparing the evaluations"):
                first, second = load_results(folder), load_results(other)
            names = (str(folder), str(other))
            if self.as_json:
                by_system = compare_evaluations(first, second, names)
                standings = {system: [line.to_dict() for line in lines] for system, lines in by_system.items()}
                print_json({"first": names[0], "second": names[1], "standings": standings})
            else:
                sys.stdout.write(render_comparison(first, second, names))


def print_results(
    results: Results, folder: Path, log: Path | None, ended: str, prices: Prices | None, *, as_json: bool
) -> None:
    """Print the report, or the figures as JSON."""
    from memagent_evaluation.report import render_report, summarize  # noqa: PLC0415
    from memagent_evaluation.standings import compare_systems  # noqa: PLC0415
    from memagent_evaluation.suites import compute_suite_scores  # noqa: PLC0415

    if as_json:
        values = {
            "evaluation": results.evaluation,
            "folder": str(folder),
            "ended": ended,
            "rows": len(results.rows),
            "missing": results.missing,
            "settings": results.settings,
            "results": summarize(results, prices),
            "suites": [asdict(score) for score in compute_suite_scores(results.rows)],
            "standings": [line.to_dict() for line in compare_systems(results)],
        }
        print_json(values)
        return
    sys.stdout.write(render_report(results, log=log, prices=prices))
    typer.echo(f"table, report and plots are in {folder}", err=True)
