"""`memagent export` and `memagent import`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import report_failures
from memagent_graph.cli.options import JSONOption, LogOption
from memagent_graph.cli.output import format_size, print_json
from memagent_graph.cli.run_choice import RunChoice, open_log
from memagent_graph.errors import RunLogError
from memagent_graph.plain_text import format_count, make_one_line


@dataclass(frozen=True, kw_only=True)
class Export(RunChoice):
    """Export runs to one Parquet file, for training, for analysis, or to import into another log (extra `export`)."""

    examples: ClassVar = (
        "memagent export runs.parquet --for-training",
        "memagent export lighthouse.parquet --question lighthouse --newest 10",
    )
    destination: Annotated[Path, typer.Argument(help="The file to write.")]
    for_training: Annotated[
        bool, typer.Option("--for-training", help="Fail if a run has no token ids or log-probs.")
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False
    log: LogOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console
        from memagent_graph.run_log.exchange import export_runs

        selection = self.make_filter()
        with report_failures(as_json=self.as_json), Console().show_status("writing the runs"):
            report = export_runs(
                open_log(self.log),
                self.destination,
                selection=selection,
                for_training=self.for_training,
                overwrite=self.overwrite,
            )
        if self.as_json:
            print_json({"file": str(self.destination), **asdict(report)})
            return
        if not report.runs:
            typer.echo("no matching runs; list all runs with `memagent runs`", err=True)
        typer.echo(
            f"{format_count(report.runs, 'run')} with {format_count(report.conversations, 'conversation')} and "
            f"{format_count(report.rewards, 'reward')} in {make_one_line(str(self.destination))}, "
            f"{format_size(report.bytes)}",
            err=True,
        )


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
            help="Files written by `memagent export`, or run logs. Parts of the same run in several logs are merged.",
        ),
    ]
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace runs in the log that have the same id but other content.")
    ] = False
    log: LogOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console
        from memagent_graph.run_log import RunLog
        from memagent_graph.run_log.exchange import import_runs, is_sqlite_file, merge_logs
        from memagent_graph.storage.private_files import get_default_run_log

        with report_failures(as_json=self.as_json), Console().show_status("importing the runs"):
            if missing := next((source for source in self.sources if not source.exists()), None):
                raise RunLogError(f"there is no file {missing}", hint="Check the path of the file.")
            log = RunLog(self.log or get_default_run_log())
            logs = [source for source in self.sources if is_sqlite_file(source)]
            files = (source for source in self.sources if source not in logs)
            reports = [import_runs(log, source, replace=self.replace) for source in files]
            reports += [merge_logs(log, logs)] if logs else []
        total = {name: sum(getattr(report, name) for report in reports) for name in asdict(reports[0])}
        if self.as_json:
            print_json(total)
            return
        skipped = f"; {format_count(total['skipped'], 'run')} already there" if total["skipped"] else ""
        typer.echo(
            f"{format_count(total['runs'], 'run')} with {format_count(total['conversations'], 'conversation')} and "
            f"{format_count(total['rewards'], 'reward')} imported{skipped}",
            err=True,
        )
