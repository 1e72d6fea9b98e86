"""`memagent export`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import print_json, size
from memagent_graph.cli.run_choice import RunChoice, open_existing
from memagent_graph.plain_text import counted, in_one_line

if TYPE_CHECKING:
    from memagent_graph.run_log import RunFilter


@dataclass(frozen=True, kw_only=True)
class Export(RunChoice):
    """Export runs to one file, for training, for reading, or to import into another log."""

    examples: ClassVar = (
        "memagent export runs.parquet --for-training",
        "memagent export lighthouse.jsonl --question lighthouse --newest 10",
    )
    destination: Annotated[Path, typer.Argument(help="The file: .parquet (extra `export`) or .jsonl.")]
    format: Annotated[
        Literal["parquet", "jsonl"] | None, typer.Option(help="The file's format.", show_default="by its suffix")
    ] = None
    for_training: Annotated[
        bool, typer.Option("--for-training", help="Refuse runs without token ids and log-probs.")
    ] = False
    skip_incomplete: Annotated[
        bool, typer.Option("--skip-incomplete", help="With --for-training: leave such runs out instead.")
    ] = False
    no_superseded: Annotated[
        bool, typer.Option("--no-superseded", help="Leave out conversations that a resume or an edit replaced.")
    ] = False
    edits: Annotated[
        bool,
        typer.Option("--edits", help="Memories that people changed, as preference pairs: prompt, chosen, rejected."),
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False
    log: Log = None
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console
        from memagent_graph.run_log.exchange import export_runs

        if self.skip_incomplete and not self.for_training:
            raise typer.BadParameter("only with --for-training", param_hint="'--skip-incomplete'")
        if self.edits and (self.for_training or self.no_superseded):
            raise typer.BadParameter("not with --for-training or --no-superseded", param_hint="'--edits'")
        chosen = self.filter()
        if self.edits:
            self._export_edits(chosen)
            return
        with failures_told(as_json=self.as_json), Console().working("writing the runs"):
            report = export_runs(
                open_existing(self.log),
                self.destination,
                chosen=chosen,
                format=self.format,
                superseded=not self.no_superseded,
                for_training=self.for_training,
                skip_incomplete=self.skip_incomplete,
                overwrite=self.overwrite,
            )
        if self.as_json:
            print_json({"file": str(self.destination), **asdict(report)})
            return
        typer.echo(
            f"{counted(report.runs, 'run')} with {counted(report.conversations, 'conversation')} and "
            f"{counted(report.rewards, 'reward')} in {in_one_line(str(self.destination))}, {size(report.bytes)}",
            err=True,
        )
        if report.incomplete:
            named = ", ".join(map(in_one_line, report.incomplete))
            typer.echo(f"left out {len(report.incomplete)} that cannot be trained on: {named}", err=True)

    def _export_edits(self, chosen: RunFilter) -> None:
        from memagent_graph.run_log.exchange import export_edits
        from memagent_graph.timeline.run_views import store_of

        with failures_told(as_json=self.as_json):
            log = open_existing(self.log)
            report = export_edits(
                log,
                self.destination,
                lambda document: store_of(document, log.path),
                chosen=chosen,
                format=self.format,
                overwrite=self.overwrite,
            )
        if self.as_json:
            print_json({"file": str(self.destination), **asdict(report)})
            return
        typer.echo(
            f"{counted(report.pairs, 'pair')} in {in_one_line(str(self.destination))}, {size(report.bytes)}", err=True
        )
        if report.left_out:
            typer.echo(
                f"left out {counted(report.left_out, 'edit')} whose prompt cannot be put together again", err=True
            )
