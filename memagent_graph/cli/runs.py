"""The commands on logged runs: `memagent runs`, `show`, `reward`, `export` and `import`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer
from rich import filesize

from memagent_graph.cli.options import JSONOption, LogOption, StoreOption, print_json
from memagent_graph.cli.run_choice import LATEST, LISTED_RUNS, RunArgument, RunChoice, find_run, open_log
from memagent_graph.errors import RunLogError
from memagent_graph.plain_text import format_count, make_one_line
from memagent_graph.storage.private_files import get_default_checkpoints_path, get_default_run_log_path

if TYPE_CHECKING:
    from rich.table import Table

    from memagent_graph.provenance.evidence import LineOrigin, LostLine
    from memagent_graph.run_log import RunLog, RunRecord, RunTotals
    from memagent_graph.timeline.view import RunView

_MAX_CELL_CHARS: Final = 60
_WIDTH_WITHOUT_TERMINAL: Final = 240
_WIDTH_WITH_TOKENS: Final = 150
_WIDTH_WITH_DETAILS: Final = 80
"""Minimum terminal widths for more columns. On narrower terminals, the other cells need not be cut."""


@dataclass(frozen=True, kw_only=True)
class Runs(RunChoice):
    """List the runs in the log, newest first, or delete them."""

    examples: ClassVar = (
        "memagent runs",
        "memagent runs --since 7d --unfinished",
        "memagent runs --until 2w --delete",
    )
    run_ids: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Only these runs.")] = None
    delete: Annotated[bool, typer.Option("--delete", help="Delete these runs and free their disk space.")] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False
    log: LogOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        log = open_log(self.log)
        run_ids = [find_run(log, name) for name in self.run_ids or ()]
        newest = None if self.as_json or self.delete or run_ids else LISTED_RUNS
        records = list(log.runs(self.make_filter(run_ids, newest=newest)))
        if self.delete:
            _delete_runs(log, records, self)
            return
        totals = log.totals(record.run_id for record in records)
        if self.as_json:
            values = [{**asdict(record), **asdict(totals[record.run_id])} for record in records]
            print_json({"log": str(log.path), "bytes": log.size_bytes, "runs": values})
        else:
            _print_table(log, records, totals)


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show how a run's memory was built, chunk by chunk, and the quotes that support its answer."""

    examples: ClassVar = (
        "memagent show",
        "memagent show latest --chunk 3",
        "memagent show 20261121 --html run.html",
    )
    run_id: RunArgument = LATEST
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a self-contained page to this file instead. An earlier page is replaced; "
            "other files and links only with --force."
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="With --html: replace any file or link.")] = False
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Show only this chunk, in full. Chunks are counted from 1.")
    ] = None
    log: LogOption = None
    store: StoreOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        import rich.console

        from memagent_graph.cli.console import Console
        from memagent_graph.documents import find_store, open_store
        from memagent_graph.timeline.model import build_timeline
        from memagent_graph.timeline.page import render_page, write_page
        from memagent_graph.timeline.terminal import render_timeline
        from memagent_graph.timeline.view import load_run_view

        if bool(self.html) + bool(self.chunk) + self.as_json > 1:
            raise typer.BadParameter("choose one of --json, --html and --chunk")
        log = open_log(self.log)
        with Console().show_status("loading the run"):
            run_id = find_run(log, self.run_id)
            # The default is the store of the run.
            store = open_store(self.store) if self.store else find_store(log.get(run_id).document, log.path)
            view = load_run_view(log, run_id, store)
        if self.as_json:
            _print_view_as_json(view)
        elif self.html is None:
            rich.console.Console(highlight=False, emoji=False).print(
                render_timeline(build_timeline(view), chunk=self.chunk)
            )
        else:
            page = render_page(build_timeline(view))
            write_page(page, self.html, force=self.force)
            typer.echo(f"wrote {self.html} ({len(page.encode()) / 1000:,.0f} kB); open it in a browser", err=True)


@dataclass(frozen=True, kw_only=True)
class GiveReward:
    """Add a reward for a run, or for one of its conversations."""

    examples: ClassVar = (
        "memagent reward latest 1.0 --name correct",
        'memagent reward 20261121-08 -0.5 --note "wrong year"',
    )
    context_settings: ClassVar = {"ignore_unknown_options": True}  # a number may be negative
    run_id: RunArgument
    value: Annotated[float, typer.Argument(help="The reward's value.")]
    name: Annotated[str, typer.Option(help="The reward's name.")] = "reward"
    source: Annotated[str, typer.Option(help="The person or program that gives the reward.")] = "person"
    note: Annotated[str | None, typer.Option(help="The reason for the reward.")] = None
    conversation: Annotated[int | None, typer.Option(help="Reward only the conversation with this id.")] = None
    log: LogOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        log = open_log(self.log)
        run_id = find_run(log, self.run_id)
        names = ("conversation", "name", "value", "source", "note")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        log.reward(run_id, **values)
        if self.as_json:
            print_json({"run_id": run_id, **values})
        else:
            target = "run" if self.conversation is None else f"conversation {self.conversation} of run"
            typer.echo(f"{make_one_line(self.name)} of {target} {make_one_line(run_id)}: {self.value:g}", err=True)


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
        with Console().show_status("writing the runs"):
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
            f"{filesize.decimal(report.bytes)}",
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

        with Console().show_status("importing the runs"):
            if missing := next((source for source in self.sources if not source.exists()), None):
                raise RunLogError(f"there is no file {missing}", hint="Check the path of the file.")
            log = RunLog(self.log or get_default_run_log_path())
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


def _print_view_as_json(view: RunView) -> None:
    def pack_line(line: LineOrigin | LostLine) -> dict[str, Any]:
        return asdict(line) | {"first_chunk": view.trace.updates[line.update].chunk_index}

    text_fields = ("run_id", "question", "model", "strategy", "stop_reason", "answer", "raw_answer")
    print_json(
        {
            **{name: getattr(view, name) for name in text_fields},
            "document": dict(view.document),
            "memory": view.trace.final_memory,
            "lines": list(map(pack_line, view.provenance.lines)),
            "lost": list(map(pack_line, view.provenance.lost)),
            "evidence": list(map(asdict, view.evidence)),
            "rewards": list(map(asdict, view.rewards)),
            "updates": list(map(asdict, view.trace.updates)),
        }
    )


def _delete_runs(log: RunLog, records: Sequence[RunRecord], command: Runs) -> None:
    if records and not command.yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                "there is no terminal to confirm on; use --yes to delete without confirmation", param_hint="'--yes'"
            )
        names = f" ({make_one_line(records[0].run_id)})" if len(records) == 1 else ""
        typer.confirm(
            f"Delete {format_count(len(records), 'run')}{names} from {make_one_line(str(log.path))}?",
            abort=True,
            err=True,
        )
    open_runs = [run.run_id for run in records if run.stop_reason is None and _is_being_read(log, run.run_id)]
    records = [run for run in records if run.run_id not in open_runs]
    if open_runs and not command.as_json:
        names = ", ".join(map(make_one_line, open_runs))
        typer.echo(f"not deleted, because it is being read: {names}", err=True)
    bytes_before = log.size_bytes
    deleted_count = log.delete(record.run_id for record in records) if records else 0
    freed_bytes = max(bytes_before - log.size_bytes, 0)
    if command.as_json:
        print_json({"deleted": deleted_count, "bytes_freed": freed_bytes, "being_read": open_runs})
        return
    typer.echo(f"{format_count(deleted_count, 'run')} deleted, {filesize.decimal(freed_bytes)} freed", err=True)


def _is_being_read(log: RunLog, run_id: str) -> bool:
    """Return whether a reader holds a run, by the default checkpoint file and the one in the log's folder."""
    from memagent_graph.storage.checkpoints import is_being_read

    files = {get_default_checkpoints_path(), log.path.with_name(get_default_checkpoints_path().name)}
    return any(is_being_read(checkpoints, run_id) for checkpoints in files)


def _print_table(log: RunLog, records: Sequence[RunRecord], totals: Mapping[str, RunTotals]) -> None:
    from rich.console import Console

    terminal = Console(highlight=False, emoji=False)
    if not terminal.is_terminal:
        terminal.width = _WIDTH_WITHOUT_TERMINAL
    if records:
        terminal.print(_make_table(records, totals, terminal.width))
    run_count, conversations = log.counts()
    terminal.print(
        f"{len(records):,} of {format_count(run_count, 'run')} with {format_count(conversations, 'conversation')}, "
        f"{filesize.decimal(log.size_bytes)}, in {make_one_line(str(log.path))}",
        markup=False,
        soft_wrap=True,
    )


def _describe_ids(totals: RunTotals) -> str:
    """Return whether all, some or none of a run's conversations have token ids."""
    if totals.conversations == totals.with_ids > 0:
        return "yes"
    return "some" if totals.with_ids else "no"


def _make_table(records: Sequence[RunRecord], totals: Mapping[str, RunTotals], width: int) -> Table:
    """Return a table with the columns that fit the terminal."""
    from rich.table import Table
    from rich.text import Text

    names = ["run", "ended", "question"]
    if width >= _WIDTH_WITH_DETAILS:
        strategy_column = ["strategy"] if any(record.strategy != "overwrite" for record in records) else []
        count_columns = ["turns", "tokens in", "out", "ids"] if width >= _WIDTH_WITH_TOKENS else []
        names = ["run", "begun", "document", "question", *strategy_column, "ended", *count_columns, "rewards"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(
            name,
            justify="right" if name in {"turns", "tokens in", "out"} else "left",
            overflow="ellipsis",
            no_wrap=True,
            min_width=max(len(make_one_line(run.run_id)) for run in records) if name == "run" else None,
        )
    for record in records:
        run_totals = totals[record.run_id]
        cells = {
            "begun": datetime.fromtimestamp(record.began).strftime("%Y-%m-%d %H:%M"),
            "document": record.document["name"],
            "question": record.question,
            "strategy": record.strategy,
            "ended": record.stop_reason or "not yet",
            "turns": f"{run_totals.conversations:,}",
            "tokens in": f"{run_totals.prompt_tokens:,}",
            "out": f"{run_totals.completion_tokens:,}",
            "ids": _describe_ids(run_totals),
            "rewards": ", ".join(f"{name} {value:g}" for name, value in run_totals.rewards.items()),
        }
        row = (make_one_line(cells[name], _MAX_CELL_CHARS) for name in names[1:])
        table.add_row(Text(make_one_line(record.run_id)), *map(Text, row))
    return table
