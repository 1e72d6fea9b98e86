"""`memagent import`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import counted, print_json
from memagent_graph.errors import RunLogError


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import the runs of an exported file into the log."""

    examples: ClassVar = ("memagent import runs.parquet",)
    source: Annotated[Path, typer.Argument(help="A file that `memagent export` wrote.")]
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs that are in the log with other content.")] = (
        False
    )
    log: Log = None
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.run_log import RunLog  # noqa: PLC0415
        from memagent_graph.run_log.exchange import import_runs  # noqa: PLC0415
        from memagent_graph.storage.paths import default_run_log  # noqa: PLC0415

        with failures_told(as_json=self.as_json), Console().working("importing the runs"):
            if not self.source.exists():
                raise RunLogError(f"there is no file {self.source}", hint="Check the path.")
            report = import_runs(RunLog(self.log or default_run_log()), self.source, replace=self.replace)
        if self.as_json:
            print_json(asdict(report))
            return
        there = f"; {counted(report.skipped, 'run')} already there" if report.skipped else ""
        typer.echo(
            f"{counted(report.runs, 'run')} with {counted(report.conversations, 'conversation')} and "
            f"{counted(report.rewards, 'reward')} imported{there}",
            err=True,
        )
