"""Exports runs to a Parquet file, imports them, and merges logs, without loss.

logged_run  a run with all of its records; merges the parts of a run from several logs
parquet     reads and writes the files (the extra `export`)

One run at a time is in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.grouping import group_values
from memagent_graph.plain_text import list_names
from memagent_graph.run_log.exchange import parquet
from memagent_graph.run_log.exchange.logged_run import have_same_content, load_run, merge_parts
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import LoggedRun, RunFilter
from memagent_graph.storage.bounded_files import open_regular_file
from memagent_graph.storage.private_files import open_atomically

_MAX_NAMES: Final = 3
"""Maximum number of runs that an error names."""
_SQLITE_MAGIC: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export: the counts of written records."""

    runs: int = 0
    conversations: int = 0
    rewards: int = 0
    events: int = 0
    bytes: int = 0


def export_runs(
    log: RunLog,
    destination: Path | str,
    *,
    selection: RunFilter | None = None,
    for_training: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write runs to one Parquet file, oldest first. The file appears under its name when it is complete.

    One run at a time is in memory. The log may be written to meanwhile.

    Args:
        log: the log.
        destination: the file.
        selection: the runs to export, by default all.
        for_training: whether to refuse runs with missing conversations, token ids or log-probs.
        overwrite: whether to replace an existing file.

    Raises:
        RunLogError: the destination exists, has no folder or no space; runs cannot be trained on; or the log cannot be
            read.
        MissingExtraError: the extra `export` is not installed.
    """
    destination = Path(destination)
    _require_writable(log, destination, overwrite=overwrite)
    run_ids = [record.run_id for record in log.runs(selection)][::-1]
    totals = log.totals(run_ids) if for_training else {}
    if incomplete_run_ids := [name for name, total in totals.items() if not total.conversations == total.with_ids > 0]:
        raise RunLogError(
            f"{len(incomplete_run_ids)} of {len(run_ids)} runs cannot be trained on, because token ids or log-probs "
            f"are missing: {list_names([*map(repr, incomplete_run_ids)], _MAX_NAMES)}",
            hint="Read with a policy that returns them (vLLM with --logprobs, or a local one), or choose other runs.",
        )
    counts: Counter[str] = Counter()

    def load_runs() -> Iterator[LoggedRun]:
        for run_id in run_ids:
            if (run := load_run(log, run_id)) is not None:  # it may have been deleted meanwhile
                events = len(run.events) + sum(len(conversation.events) for conversation in run.conversations)
                counts.update(Counter(runs=1, events=events) + _count_records(run))
                yield run

    try:
        with open_atomically(destination) as file:
            parquet.write(file, load_runs())
            size = file.tell()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunLogError(f"{destination} cannot be written: {reason}", hint="Choose a file elsewhere.") from error
    return ExportReport(**counts, bytes=size)


def _count_records(run: LoggedRun | None) -> Counter[str]:
    return Counter(conversations=len(run.conversations), rewards=len(run.rewards)) if run else Counter()


def _require_writable(log: RunLog, destination: Path, *, overwrite: bool) -> None:
    """Require that a file can be written, and may be replaced if it exists.

    Raises:
        RunLogError: the file cannot be written, or must not be replaced.
    """
    if destination.suffix.lower() in {".jsonl", ".ndjson", ".json", ".csv"}:
        raise RunLogError(f"runs are exported as Parquet, not as {destination.suffix}", hint="Use the suffix .parquet.")
    if not destination.parent.is_dir():
        raise RunLogError(f"there is no folder {destination.parent}", hint="Create it first.")
    if destination.is_dir():
        raise RunLogError(f"{destination} is a folder", hint="Choose a file in it.")
    if destination.exists() and destination.samefile(log.path):
        raise RunLogError(f"{destination} is the run log itself", hint="Choose another file.")
    if destination.exists() and not overwrite:
        raise RunLogError(f"{destination} exists", hint="Choose another file, or replace it with --overwrite.")


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import or merge: the counts of added records."""

    runs: int = 0
    conversations: int = 0
    rewards: int = 0
    skipped: int = 0
    """The number of runs that the log already had with the same content."""


def import_runs(log: RunLog, source: Path | str, *, replace: bool = False) -> ImportReport:
    """Add the runs of an exported file to a log, with one transaction per run.

    Runs that the log has with the same content are skipped. One run at a time is in memory. The redaction hook of the
    log is not called.

    Args:
        log: the log.
        source: a file from `export_runs`.
        replace: whether to replace runs in the log that have the same id but other content.

    Raises:
        RunLogError: the file does not exist, is not an export, has another version, or is damaged; or the log has a run
            with the same id but other content. Earlier runs in the file were imported.
        MissingExtraError: the extra `export` is not installed.
    """
    source = Path(source)
    counts: Counter[str] = Counter()
    try:
        with open_regular_file(source) as file:
            for run in parquet.read(source, file):
                run_id = run.record.run_id
                existing = load_run(log, run_id)
                if existing is not None and have_same_content(existing, run):
                    counts["skipped"] += 1
                    continue
                if existing is not None and not replace:
                    raise RunLogError(
                        f"{log.path} has run {run_id!r} with other content than {source}",
                        hint="Replace the run in the log with --replace, or import into another log. The runs before "
                        "this one were imported.",
                    )
                log.add(run, replace_existing=existing is not None)
                counts += Counter(runs=1) + _count_records(run)
    except OSError as error:
        raise RunLogError(
            f"{source} cannot be read: {error.strerror or error}", hint="Check the path and its permissions."
        ) from error
    return ImportReport(**counts)


def is_sqlite_file(path: Path) -> bool:
    """Return whether a file is an SQLite database, as logs are, and not an export."""
    try:
        with open_regular_file(path) as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def merge_logs(log: RunLog, sources: Sequence[Path | str], *, is_own: bool = False) -> ImportReport:
    """Add the runs of other logs to a log, with one transaction per run.

    Parts of the same run in several logs are merged; see `merge_parts`. Runs that the log already has are skipped, so a
    merge can be repeated after a kill, or when another log has new records.

    Args:
        log: the log.
        sources: the files of the other logs. Nothing may write to them during the merge.
        is_own: whether the sources are part of this log. Runs of others are marked as imported, unless they began here.

    Returns:
        The counts of added records. A run counts if records were added to it.

    Raises:
        RunLogError: a file is not a log, or a log cannot be read or written.
    """
    counts: Counter[str] = Counter()
    for source in sources:
        if not is_sqlite_file(Path(source)):
            raise RunLogError(
                f"{source} is not a log of runs", hint="Pass only run logs, which `memagent read` writes."
            )
    with ExitStack() as stack:
        logs = [stack.enter_context(closing(RunLog(source))) for source in sources]
        starts_by_run = group_values(
            (record.run_id, (record.began, index))
            for index, other_log in enumerate(logs)
            for record in other_log.runs()
        )
        for run_id in sorted(starts_by_run, key=lambda run_id: min(starts_by_run[run_id])):
            existing = load_run(log, run_id)
            parts = [existing, *(load_run(logs[log_index], run_id) for _, log_index in sorted(starts_by_run[run_id]))]
            run = merge_parts([part for part in parts if part is not None])
            if existing is not None and have_same_content(existing, run):
                counts["skipped"] += 1
                continue
            own_records = list(log.runs(RunFilter(run_ids=[run_id], is_own=True)))
            for record in own_records:  # only these have the paths of their documents
                run = replace_fields(run, record=replace_fields(run.record, document=record.document))
            log.add(
                run, replace_existing=existing is not None, is_own=is_own if existing is None else bool(own_records)
            )
            counts += Counter(runs=1) + _count_records(run) - _count_records(existing)
    return ImportReport(**counts)
