"""The command line's part for the run log: `memagent runs | reward | export | import`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from memagent_graph.cli_json import print_json
from memagent_graph.cli_options import AsJSON, Log
from memagent_graph.errors import RunLogError
from memagent_graph.exit_codes import failures_told

if TYPE_CHECKING:
    from rich.table import Table

    from memagent_graph.run_log import RunFilter, RunLog, RunRecord, RunTotals
    from memagent_graph.run_log.exchange import ExportReport, ImportReport

_LISTED: Final = 20
"""How many runs are listed unless the user says otherwise."""
_SHOWN_CHARACTERS: Final = 60
_WIDTH_WITHOUT_TERMINAL: Final = 240
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def point_in_time(text: str) -> float:
    """Seconds since 1970 from an ISO date or time (local, unless it names a zone), or an age: 90m, 12h, 7d, 2w.

    Raises:
        typer.BadParameter: it is neither.
    """
    age = _AGE.fullmatch(text.strip().lower())
    if age:
        return time.time() - float(age[1]) * _SECONDS[age[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(f"{text!r} is neither an ISO date, as in 2026-11-21, nor an age, as in 7d") from None


Question = Annotated[str | None, typer.Option(help="Only runs with this in their question.")]
DocumentName = Annotated[str | None, typer.Option("--document", help="Only runs with this in their document's name.")]
Model = Annotated[str | None, typer.Option(help="Only runs with this in the name of a policy that wrote in them.")]
StopReason = Annotated[str | None, typer.Option(help="Only runs that ended so: answered, no_answer, max_chunks, ...")]
Unfinished = Annotated[bool, typer.Option("--unfinished", help="Only runs that have not ended.")]
WithReward = Annotated[str | None, typer.Option("--reward", metavar="NAME", help="Only runs with a reward so named.")]
Since = Annotated[
    float | None,
    typer.Option(parser=point_in_time, metavar="WHEN", help="Only runs begun since: an ISO date, or an age as in 7d."),
]
Until = Annotated[float | None, typer.Option(parser=point_in_time, metavar="WHEN", help="Only runs begun before.")]
Newest = Annotated[int | None, typer.Option(min=1, help="Only so many, the newest.", show_default="all")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("runs")(runs)
    # A value may be negative, and must not be taken for an option.
    app.command("reward", context_settings={"ignore_unknown_options": True})(reward)
    app.command("export")(export)
    app.command("import")(import_)


def runs(
    run_ids: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Only these.")] = None,
    question: Question = None,
    document: DocumentName = None,
    model: Model = None,
    stop_reason: StopReason = None,
    unfinished: Unfinished = False,
    with_reward: WithReward = None,
    since: Since = None,
    until: Until = None,
    newest: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many, the newest.", show_default=f"{_LISTED}; all for --json and --delete"),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete these runs and give the space back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    log: Log = None,
    as_json: AsJSON = False,
) -> None:
    """List the runs in the log, newest first, or delete them."""
    everything = as_json or delete or bool(run_ids)
    chosen = _filter(
        run_ids, question, document, model, stop_reason, unfinished, with_reward, since, until,
        newest or (None if everything else _LISTED),
    )  # fmt: skip
    with failures_told(as_json=as_json):
        opened = open_existing(log)
        for run_id in run_ids or ():
            opened.get(run_id)  # an unknown one is an error
        records = list(opened.runs(chosen))
        if delete:
            _delete(opened, records, ask=not yes, as_json=as_json)
            return
        totals = opened.totals(record.run_id for record in records)
        if as_json:
            values = [{**asdict(record), **asdict(totals[record.run_id])} for record in records]
            print_json({"log": str(opened.path), "bytes": opened.size_bytes, "runs": values})
        else:
            _print_table(opened, records, totals)


def reward(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    value: Annotated[float, typer.Argument(help="How good it was.")],
    name: Annotated[str, typer.Option(help="What was judged.")] = "reward",
    source: Annotated[str, typer.Option(help="Who judged.")] = "person",
    note: Annotated[str | None, typer.Option(help="Why.")] = None,
    conversation: Annotated[int | None, typer.Option(help="One of its conversations, by its id in the log.")] = None,
    log: Log = None,
    as_json: AsJSON = False,
) -> None:
    """Give a run, or one of its conversations, a reward."""
    with failures_told(as_json=as_json):
        open_existing(log).reward(run_id, value, name=name, source=source, conversation=conversation, note=note)
    if as_json:
        values = {"run_id": run_id, "conversation": conversation, "name": name, "value": value, "source": source}
        print_json({**values, "note": note})
    else:
        of = "run" if conversation is None else f"conversation {conversation} of run"
        typer.echo(f"{_plain(name)} of {of} {_plain(run_id)}: {value:g}", err=True)


def export(
    destination: Annotated[Path, typer.Argument(help="The file: .parquet (extra `export`) or .jsonl.")],
    question: Question = None,
    document: DocumentName = None,
    model: Model = None,
    stop_reason: StopReason = None,
    unfinished: Unfinished = False,
    with_reward: WithReward = None,
    since: Since = None,
    until: Until = None,
    newest: Newest = None,
    format: Annotated[  # noqa: A002  the option's name
        Literal["parquet", "jsonl"] | None, typer.Option(help="The file's format.", show_default="by its suffix")
    ] = None,
    for_training: Annotated[
        bool, typer.Option("--for-training", help="Refuse runs without token ids and log-probs.")
    ] = False,
    skip_incomplete: Annotated[
        bool, typer.Option("--skip-incomplete", help="With --for-training: leave such runs out instead.")
    ] = False,
    no_superseded: Annotated[
        bool, typer.Option("--no-superseded", help="Leave out what a resume or an edit replaced.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    log: Log = None,
    as_json: AsJSON = False,
) -> None:
    """Write runs to one file: to train on, to look at, or to import elsewhere."""
    from memagent_graph.run_log.exchange import export_runs  # noqa: PLC0415

    if skip_incomplete and not for_training:
        raise typer.BadParameter("only with --for-training", param_hint="'--skip-incomplete'")
    chosen = _filter(None, question, document, model, stop_reason, unfinished, with_reward, since, until, newest)
    with failures_told(as_json=as_json):
        report = export_runs(
            open_existing(log),
            destination,
            chosen=chosen,
            format=format,
            superseded=not no_superseded,
            for_training=for_training,
            skip_incomplete=skip_incomplete,
            overwrite=overwrite,
        )
    if as_json:
        print_json({"file": str(destination), **asdict(report)})
        return
    typer.echo(
        f"{_contents(report)} in {_plain(str(destination))}, {_size(report.bytes)}",
        err=True,
    )
    if report.incomplete:
        named = ", ".join(map(_plain, report.incomplete))
        typer.echo(f"left out {len(report.incomplete)} that cannot be trained on: {named}", err=True)


def import_(
    source: Annotated[Path, typer.Argument(help="A file that `memagent export` wrote.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace runs that the log has with other content.")
    ] = False,
    log: Log = None,
    as_json: AsJSON = False,
) -> None:
    """Enter the runs of an exported file into the log."""
    from memagent_graph.run_log import RunLog  # noqa: PLC0415
    from memagent_graph.run_log.exchange import import_runs  # noqa: PLC0415
    from memagent_graph.storage.paths import default_run_log  # noqa: PLC0415

    with failures_told(as_json=as_json):
        if not source.exists():
            raise RunLogError(f"there is no file {source}", hint="Check the path.")
        report = import_runs(RunLog(log or default_run_log()), source, replace=replace)
    if as_json:
        print_json(asdict(report))
    else:
        there = f"; {_count(report.skipped, 'run')} there already" if report.skipped else ""
        typer.echo(f"{_contents(report)} imported{there}", err=True)


def _filter(
    run_ids: Sequence[str] | None,
    question: str | None,
    document: str | None,
    model: str | None,
    stop_reason: str | None,
    unfinished: bool,
    with_reward: str | None,
    since: float | None,
    until: float | None,
    newest: int | None,
) -> RunFilter:
    from memagent_graph.run_log import RunFilter  # noqa: PLC0415

    if unfinished and stop_reason:
        raise typer.BadParameter("a run that has not ended has no stop reason", param_hint="'--unfinished'")
    return RunFilter(
        run_ids=run_ids or None,
        question=question,
        document=document,
        policy=model,
        stop_reason="unfinished" if unfinished else stop_reason,
        reward=with_reward,
        since=since,
        until=until,
        newest=newest,
    )


def open_existing(path: Path | None) -> RunLog:
    """The log, which is not made where there is none."""
    from memagent_graph.run_log import RunLog  # noqa: PLC0415
    from memagent_graph.storage.paths import default_run_log  # noqa: PLC0415

    path = path or default_run_log()
    if not path.exists():
        raise RunLogError(f"there is no run log at {path}", hint="`memagent read` writes one; --log names another.")
    return RunLog(path)


def _delete(log: RunLog, records: Sequence[RunRecord], *, ask: bool, as_json: bool) -> None:
    if records and ask:
        if not sys.stdin.isatty():
            raise typer.BadParameter("deleting asks first, and there is no terminal to ask", param_hint="'--yes'")
        named = f" ({_plain(records[0].run_id)})" if len(records) == 1 else ""
        typer.confirm(
            f"Delete {_count(len(records), 'run')}{named} from {_plain(str(log.path))}?", abort=True, err=True
        )
    before = log.size_bytes
    deleted = log.delete(record.run_id for record in records) if records else 0
    freed = max(before - log.size_bytes, 0)
    if as_json:
        print_json({"deleted": deleted, "bytes_freed": freed})
    else:
        typer.echo(f"{_count(deleted, 'run')} deleted, {_size(freed)} given back", err=True)
        if unused := log.unused_bytes if deleted else 0:
            typer.echo(
                f"{_size(unused)} could not be given back and are left for new runs: the next deletion tries again, "
                "with room on the disk for a copy of the log",
                err=True,
            )


def _print_table(log: RunLog, records: Sequence[RunRecord], totals: Mapping[str, RunTotals]) -> None:
    import rich.console  # noqa: PLC0415

    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    if records:
        console.print(_table(records, totals))
    count, conversations = log.counts()
    console.print(
        f"{len(records):,} of {_count(count, 'run')} with {_count(conversations, 'conversation')}, "
        f"{_size(log.size_bytes)}, in {_plain(str(log.path))}",
        markup=False,
        soft_wrap=True,
    )


def _table(records: Sequence[RunRecord], totals: Mapping[str, RunTotals]) -> Table:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("begun", no_wrap=True)
    table.add_column("document", overflow="ellipsis", no_wrap=True)
    table.add_column("question", overflow="ellipsis", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    for name in ("turns", "tokens in", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ids")
    table.add_column("rewards", overflow="ellipsis", no_wrap=True)
    for record in records:
        total = totals[record.run_id]
        cells = (
            record.run_id,
            datetime.fromtimestamp(record.began).strftime("%Y-%m-%d %H:%M"),
            record.document["name"],
            record.question,
            record.stop_reason or "not yet",
            f"{total.conversations:,}",
            f"{total.prompt_tokens:,}",
            f"{total.completion_tokens:,}",
            "yes" if total.conversations == total.with_ids > 0 else "some" if total.with_ids else "no",
            ", ".join(f"{name} {value:g}" for name, value in total.rewards.items()),
        )
        table.add_row(*(Text(_plain(cell, _SHOWN_CHARACTERS)) for cell in cells))
    return table


def _plain(text: str, longest: int | None = None) -> str:
    """A text in one line, without characters that move the cursor, colour, or turn the direction of writing."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if longest is None or len(shown) <= longest else shown[: longest - 1] + "…"


def _contents(report: ExportReport | ImportReport) -> str:
    return (
        f"{_count(report.runs, 'run')} with {_count(report.conversations, 'conversation')} and "
        f"{_count(report.rewards, 'reward')}"
    )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
