"""Imports of runs into a log, from an exported file or from other logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange import parquet
from memagent_graph.run_log.exchange.logged_run import is_same, load_run, merge_parts, with_arrays
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import LoggedRun
from memagent_graph.storage.bounded_files import open_regular

_SQLITE: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import: counts of what it added."""

    runs: int
    conversations: int
    rewards: int
    skipped: int
    """Runs that were in the log already, with the same content."""


def import_runs(log: RunLog, source: Path | str, *, replace: bool = False) -> ImportReport:
    """Add the runs of an exported file to a log, each in one transaction.

    A run that the log has with the same content is skipped. One run at a time is in memory. Texts are added
    unchanged; the log's redaction hook is not called.

    Args:
        log: the log.
        source: a file written by `export_runs`.
        replace: whether to replace runs in the log that have the same id but other content.

    Raises:
        RunLogError: the file does not exist, is not an export, is of another version or damaged; or the log has a run
            with the same id but other content. The runs before this one were imported.
        MissingExtraError: the extra `export` is not installed.
    """
    source = Path(source)
    run_ids: set[str] = set()
    conversations = rewards = skipped = 0
    try:
        with open_regular(source) as file:
            for run in parquet.read(source, file):
                run_id = run.record.run_id
                if run_id in run_ids:
                    raise RunLogError(
                        f"the rows of run {run_id!r} in {source} are not together",
                        hint="Import the original export. This file may have been sorted or shuffled.",
                    )
                run_ids.add(run_id)
                present = load_run(log, run_id)
                if present is not None and is_same(present, run):
                    skipped += 1
                    continue
                if present is not None and not replace:
                    raise RunLogError(
                        f"{log.path} has run {run_id!r} with other content than {source}",
                        hint="Replace the run in the log with --replace, or import into another log. The runs before "
                        "this one were imported.",
                    )
                _add(log, run, replacing=present is not None)
                conversations += len(list(run.conversations))
                rewards += len(run.rewards)
    except OSError as error:
        raise RunLogError(
            f"{source} cannot be read: {error.strerror or error}", hint="Check the path and its permissions."
        ) from error
    return ImportReport(len(run_ids) - skipped, conversations, rewards, skipped)


def is_log(path: Path) -> bool:
    """Return whether a file is a run log, not an export."""
    try:
        with open_regular(path) as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def merge_logs(log: RunLog, sources: Sequence[Path | str]) -> ImportReport:
    """Add the runs of other logs to a log, each in one transaction.

    Parts of the same run in several logs are merged; see `merge_parts`. Runs that the log has already are skipped, so
    a merge can be repeated: after it was killed, or when another log has got more, such as a reward.

    Args:
        log: the log.
        sources: the files of the other logs; nothing may write to them during the merge.

    Returns:
        The counts of what was added. A run to which something was added counts as a run.

    Raises:
        RunLogError: a file is not a log, or a log cannot be read or written.
    """
    began: dict[str, list[tuple[float, int]]] = {}
    runs = conversations = rewards = 0
    with ExitStack() as stack:
        logs = []
        for number, source in enumerate(map(Path, sources)):
            if not is_log(source):
                raise RunLogError(
                    f"{source} is not a log of runs", hint="Pass only run logs, which `memagent read` writes."
                )
            logs.append(stack.enter_context(closing(RunLog(source))))
            for record in logs[-1].runs():
                began.setdefault(record.run_id, []).append((record.began, number))
        for run_id in sorted(began, key=lambda run_id: min(began[run_id])):
            parts = [
                _load_whole(log, run_id),
                *(_load_whole(logs[number], run_id) for _, number in sorted(began[run_id])),
            ]
            present, run = parts[0], merge_parts([part for part in parts if part is not None])
            if present is not None and is_same(present, run):
                continue
            _add(log, run, replacing=present is not None)
            runs += 1
            conversations += len(list(run.conversations)) - (len(list(present.conversations)) if present else 0)
            rewards += max(0, len(run.rewards) - (len(present.rewards) if present else 0))
    return ImportReport(runs, conversations, rewards, len(began) - runs)


def _load_whole(log: RunLog, run_id: str) -> LoggedRun | None:
    """Return a run with its conversations as a list, and their numbers as arrays; None if the log does not have it."""
    run = load_run(log, run_id)
    return run and dataclasses.replace(run, conversations=list(map(with_arrays, run.conversations)))


def _add(log: RunLog, run: LoggedRun, *, replacing: bool) -> None:
    log.add(
        run.record,
        list(run.conversations),
        events=run.events,
        rewards=run.rewards,
        templates=run.templates,
        replacing=replacing,
    )
