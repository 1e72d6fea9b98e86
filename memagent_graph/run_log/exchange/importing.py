"""From a file to a log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange import json_lines, parquet
from memagent_graph.run_log.exchange.logged_run import LoggedRun, same, stored_run
from memagent_graph.run_log.log import RunLog

_PARQUET_MAGIC: Final = b"PAR1"


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import added."""

    runs: int
    conversations: int
    rewards: int
    skipped: int
    """How many runs were already in the log with the same content."""


def import_runs(log: RunLog, source: Path | str, *, replace: bool = False) -> ImportReport:
    """Add the runs of an exported file to a log, each in one transaction.

    A run that the log has with the same content is skipped. One run at a time is in memory. Texts are added
    unchanged; the log's redaction hook is not called.

    Args:
        log: the log.
        source: a file that `export_runs` wrote.
        replace: replace runs that the log has with the same id and other content.

    Raises:
        RunLogError: the file does not exist, is not an export, is newer or damaged; or the log has a run with
            the same id and other content. The runs before it are in the log.
        MissingExtraError: Parquet without the extra `export`.
    """
    source = Path(source)
    seen: set[str] = set()
    conversations = rewards = skipped = 0
    for run in _read(source):
        run_id = run.record.run_id
        if run_id in seen:
            raise RunLogError(
                f"the rows of run {run_id!r} in {source} are not together",
                hint="Was it sorted or shuffled? Import the file that was exported.",
            )
        seen.add(run_id)
        held = list(run.conversations)
        run = LoggedRun(run.record, held, run.events, run.rewards, run.templates)  # noqa: PLW2901  now with a list
        there = stored_run(log, run_id)
        if there is not None and same(there, run):
            skipped += 1
            continue
        if there is not None and not replace:
            raise RunLogError(
                f"{log.path} has run {run_id!r} with other content than {source}",
                hint="Use the file's with --replace, or import into another log. The runs before it were imported.",
            )
        log.add(
            run.record,
            held,
            events=run.events,
            rewards=run.rewards,
            templates=run.templates,
            replacing=there is not None,
        )
        conversations += len(held)
        rewards += len(run.rewards)
    return ImportReport(len(seen) - skipped, conversations, rewards, skipped)


def _read(source: Path) -> Iterator[LoggedRun]:
    try:
        with source.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC or source.suffix.lower() == ".parquet"
            file.seek(0)
            yield from (parquet if is_parquet else json_lines).read(source, file)
    except OSError as error:
        raise RunLogError(f"{source} cannot be read: {error.strerror or error}", hint="Check the path.") from error
