"""`memagent diff`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import Log
from memagent_graph.cli.output import console
from memagent_graph.cli.run_choice import open_existing, run_named
from memagent_graph.cli.show import view_of


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two runs: settings, answers, where their memories begin to differ, and cost."""

    examples: ClassVar = ("memagent diff 20261121-08 20261121-09",)
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="One run.")]
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The other.")]
    log: Log = None

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.timeline import compare_runs, render_comparison

        with failures_told():
            log = open_existing(self.log)
            one, other = run_named(log, self.run_a), run_named(log, self.run_b)
            comparison = compare_runs(
                view_of(log, one),
                view_of(log, other),
                settings_a=dict(log.get(one).settings),
                settings_b=dict(log.get(other).settings),
            )
            console().print(render_comparison(comparison))
