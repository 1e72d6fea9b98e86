"""`memagent import`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import print_json
from memagent_graph.errors import RunLogError
from memagent_graph.plain_text import counted


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import the runs of exported files, or of other logs, into the log."""

    examples: ClassVar = (
        "memagent import runs.parquet",
        "memagent import node-1.sqlite node-2.sqlite --log all.sqlite",
    )
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files that `memagent export` wrote, or logs. A run that several logs have a part of is put together.",
        ),
    ]
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs that are in the log with other content.")] = (
        False
    )
    log: Log = None
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console
        from memagent_graph.run_log import RunLog
        from memagent_graph.run_log.exchange import import_runs, is_log, merge_logs
        from memagent_graph.storage.paths import default_run_log

        with failures_told(as_json=self.as_json), Console().working("importing the runs"):
            if missing := next((each for each in self.sources if not each.exists()), None):
                raise RunLogError(f"there is no file {missing}", hint="Check the path.")
            log, logs = RunLog(self.log or default_run_log()), [each for each in self.sources if is_log(each)]
            reports = [import_runs(log, each, replace=self.replace) for each in self.sources if each not in logs]
            reports += [merge_logs(log, logs)] if logs else []
        total = {name: sum(getattr(each, name) for each in reports) for name in asdict(reports[0])}
        if self.as_json:
            print_json(total)
            return
        there = f"; {counted(total['skipped'], 'run')} already there" if total["skipped"] else ""
        typer.echo(
            f"{counted(total['runs'], 'run')} with {counted(total['conversations'], 'conversation')} and "
            f"{counted(total['rewards'], 'reward')} imported{there}",
            err=True,
        )
