"""From a log to a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange.logged_run import load_run
from memagent_graph.run_log.exchange.parquet import ParquetWriter
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedRun, RunFilter
from memagent_graph.storage.private_files import whole_file

_MAX_NAMES: Final = 3
"""How many runs an error names."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export: counts of what it wrote."""

    runs: int
    conversations: int
    rewards: int
    events: int
    bytes: int


def export_runs(
    log: RunLog,
    destination: Path | str,
    *,
    selection: RunFilter | None = None,
    for_training: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write runs to one Parquet file, oldest first. The file appears under its name when it is complete.

    One run at a time is read from the log, which may be written to meanwhile; this needs some megabytes of memory.

    Args:
        log: the log.
        destination: the file.
        selection: which runs; all if left out.
        for_training: refuse runs without conversations, or with one that counts and has no token ids or log-probs.
        overwrite: replace an existing file.

    Raises:
        RunLogError: the destination exists, has no folder or no space; runs cannot be trained on; or the log cannot be
            read.
        MissingExtraError: the extra `export` is not installed.
    """
    destination = Path(destination)
    _check_destination(log, destination, overwrite=overwrite)
    run_ids = [record.run_id for record in log.runs(selection)][::-1]
    if for_training and (incomplete := _incomplete_runs(log, run_ids)):
        raise RunLogError(
            f"{len(incomplete)} of {len(run_ids)} runs cannot be trained on, because token ids or log-probs are "
            f"missing: {_list_names(incomplete)}",
            hint="Read with a policy that returns them (vLLM with --logprobs, or a local one), or choose other runs.",
        )
    tally = dict.fromkeys(("runs", "conversations", "rewards", "events"), 0)
    try:
        with whole_file(destination) as file:
            with closing(ParquetWriter(file)) as writer:
                for run_id in run_ids:
                    if (run := load_run(log, run_id)) is not None:  # it may have been deleted meanwhile
                        writer.write(replace(run, conversations=_count(run, tally)))
            size = file.tell()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunLogError(f"{destination} cannot be written: {reason}", hint="Name a file elsewhere.") from error
    return ExportReport(**tally, bytes=size)


def _count(run: LoggedRun, tally: dict[str, int]) -> Iterator[Conversation]:
    """Yield the run's conversations, and count them, its events and its rewards."""
    rewarded = [reward.conversation for reward in run.rewards]
    tally["runs"] += 1
    tally["events"] += len(run.events)
    tally["rewards"] += rewarded.count(None)
    for conversation in run.conversations:
        tally["conversations"] += 1
        tally["events"] += len(conversation.events)
        tally["rewards"] += rewarded.count(conversation.id)
        yield conversation


def _check_destination(log: RunLog, destination: Path, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or must not be.

    Raises:
        RunLogError: with the remedy.
    """
    if destination.suffix.lower() in {".jsonl", ".ndjson", ".json", ".csv"}:
        raise RunLogError(f"runs are exported as Parquet, not as {destination.suffix}", hint="Name it .parquet.")
    if not destination.parent.is_dir():
        raise RunLogError(f"there is no folder {destination.parent}", hint="Make it first.")
    if destination.is_dir():
        raise RunLogError(f"{destination} is a folder", hint="Name a file in it.")
    if destination.exists() and destination.samefile(log.path):
        raise RunLogError(f"{destination} is the run log itself", hint="Name another file.")
    if destination.exists() and not overwrite:
        raise RunLogError(f"{destination} exists", hint="Name another file, or replace it with --overwrite.")


def _incomplete_runs(log: RunLog, run_ids: Sequence[str]) -> list[str]:
    totals = log.totals(run_ids)
    return [run_id for run_id in run_ids if not totals[run_id].conversations == totals[run_id].with_ids > 0]


def _list_names(run_ids: Sequence[str]) -> str:
    more = len(run_ids) - _MAX_NAMES
    return ", ".join(map(repr, run_ids[:_MAX_NAMES])) + (f" and {more} more" if more > 0 else "")
