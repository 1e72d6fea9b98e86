"""`memagent export`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import counted, plain, print_json, size
from memagent_graph.cli.run_choice import RunChoice, open_existing


@dataclass(frozen=True, kw_only=True)
class Export(RunChoice):
    """What `memagent export` is asked for."""

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
        bool, typer.Option("--no-superseded", help="Leave out what a resume or an edit replaced.")
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False
    log: Log = None
    as_json: AsJSON = False


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    add_command(app, "export", Export, export)


def export(request: Export) -> None:
    """Write runs to one file: to train on, to look at, or to import elsewhere."""
    from memagent_graph.run_log.exchange import export_runs  # noqa: PLC0415

    if request.skip_incomplete and not request.for_training:
        raise typer.BadParameter("only with --for-training", param_hint="'--skip-incomplete'")
    chosen = request.filter()
    with failures_told(as_json=request.as_json):
        report = export_runs(
            open_existing(request.log),
            request.destination,
            chosen=chosen,
            format=request.format,
            superseded=not request.no_superseded,
            for_training=request.for_training,
            skip_incomplete=request.skip_incomplete,
            overwrite=request.overwrite,
        )
    if request.as_json:
        print_json({"file": str(request.destination), **asdict(report)})
        return
    typer.echo(
        f"{counted(report.runs, 'run')} with {counted(report.conversations, 'conversation')} and "
        f"{counted(report.rewards, 'reward')} in {plain(str(request.destination))}, {size(report.bytes)}",
        err=True,
    )
    if report.incomplete:
        named = ", ".join(map(plain, report.incomplete))
        typer.echo(f"left out {len(report.incomplete)} that cannot be trained on: {named}", err=True)
