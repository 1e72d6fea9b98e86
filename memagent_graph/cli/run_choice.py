"""Options that choose runs of the log."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from memagent_graph.errors import RunLogError, RunNotFoundError
from memagent_graph.events import StopReason
from memagent_graph.storage.private_files import get_default_run_log_path

if TYPE_CHECKING:
    from memagent_graph.run_log import RunFilter, RunLog

_AGE_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
LISTED_RUNS: Final = 20
"""The number of runs to list by default."""
_SECONDS_PER_UNIT: Final = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_time(text: str) -> float:
    """Return seconds since 1970 for an ISO date or time (local if it has no zone), or an age: 90m, 12h, 7d, 2w.

    Raises:
        typer.BadParameter: the text is neither a time nor an age.
    """
    age = _AGE_PATTERN.fullmatch(text.strip().lower())
    if age:
        return time.time() - float(age[1]) * _SECONDS_PER_UNIT[age[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"the time must be an ISO date such as 2026-11-21 or an age such as 7d, got {text!r}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """Options that choose runs. A run must match all of them."""

    question: Annotated[str | None, typer.Option(help="Only runs whose question contains this text.")] = None
    document: Annotated[str | None, typer.Option(help="Only runs whose document name contains this text.")] = None
    model: Annotated[str | None, typer.Option(help="Only runs whose policy name contains this text.")] = None
    stop_reason: Annotated[
        str | None, typer.Option(help="Only runs with this stop reason: answered, no_answer, max_chunks, ...")
    ] = None
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only runs that have not ended.")] = False
    with_reward: Annotated[
        str | None, typer.Option("--reward", metavar="NAME", help="Only runs that have a reward with this name.")
    ] = None
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_time,
            metavar="WHEN",
            help="Only runs started after this time: an ISO date, or an age such as 7d.",
        ),
    ] = None
    until: Annotated[
        float | None, typer.Option(parser=parse_time, metavar="WHEN", help="Only runs started before this time.")
    ] = None
    newest: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only this many of the newest runs.", show_default=f"all; {LISTED_RUNS} where runs are listed"
        ),
    ] = None

    def make_filter(self, run_ids: Sequence[str] = (), *, newest: int | None = None) -> RunFilter:
        """Return the filter for the log.

        Args:
            run_ids: the ids of the runs; empty for any run.
            newest: the maximum number of runs, if the user sets none.
        """
        from memagent_graph.run_log import RunFilter

        if self.unfinished and self.stop_reason:
            raise typer.BadParameter(
                "an unfinished run has no stop reason; use either --unfinished or --stop-reason",
                param_hint="'--unfinished'",
            )
        return RunFilter(
            run_ids=run_ids or None,
            question=self.question,
            document=self.document,
            policy=self.model,
            stop_reason="unfinished" if self.unfinished else self.stop_reason,
            reward=self.with_reward,
            since=self.since,
            until=self.until,
            newest=self.newest or newest,
        )


LATEST: Final = "latest"
RunArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="The id of a run, the beginning of its id, or `latest`.")
]


def find_run(log: RunLog, name: str) -> str:
    """Return the id of a run from its id, the beginning of its id, or "latest".

    Imported runs are ignored for "latest", because their timestamps cannot be trusted.

    Raises:
        RunNotFoundError: no run matches, or several runs do.
    """
    from memagent_graph.run_log import RunFilter

    if name != LATEST and list(log.runs(RunFilter(run_ids=[name]))):
        return name
    selection = RunFilter(newest=1, is_own=True) if name == LATEST else RunFilter(run_id_prefix=name, newest=_MAX_NAMES)
    run_ids = [record.run_id for record in log.runs(selection)]
    if len(run_ids) == 1:
        return run_ids[0]
    if name == LATEST:
        raise RunNotFoundError(
            f"{log.path} holds no run that was read here",
            hint="Read a document first: memagent read FILE -q QUESTION",
        )
    if not run_ids:
        return log.get(name).run_id  # raises the error for a missing run
    raise RunNotFoundError(
        f"several runs begin with {name!r}", hint=f"Use a longer part of the id: {', '.join(run_ids)}."
    )


def find_runs_to_resume(log: RunLog, name: str) -> list[str]:
    """Return the run with a name as for `find_run`, or all unfinished runs of a read of several questions.

    The name of a read of several questions is the common prefix of its run ids, or "latest".
    """
    try:
        run_id = find_run(log, name)
    except RunNotFoundError:
        if open_runs := list_open_questions(log, name):
            return open_runs
        raise
    return (list_open_questions(log, find_read_id(run_id)) if name == LATEST else []) or [run_id]


def find_read_id(run_id: str) -> str:
    """Return the common prefix of the run ids of a read of several questions; empty for other runs."""
    read_id, _, question_index = run_id.rpartition("-")
    return read_id if _QUESTION_INDEX.fullmatch(question_index) else ""


def list_open_questions(log: RunLog, read_id: str) -> list[str]:
    """Return the unfinished runs with this prefix, in the order of their questions."""
    from memagent_graph.run_log import RunFilter

    prefix = f"{read_id}-"
    runs_with_prefix = log.runs(RunFilter(run_id_prefix=prefix, is_own=True))
    runs = [run for run in runs_with_prefix if _QUESTION_INDEX.fullmatch(run.run_id.removeprefix(prefix))]
    runs = [run for run in runs if run.document["key"] == runs[0].document["key"]]  # of the newest read with this id
    if f"{prefix}0" not in {run.run_id for run in runs}:  # separate reads with chosen ids: report-2023, report-2024
        return []
    run_ids = [run.run_id for run in runs if not run.stop_reason or StopReason(run.stop_reason).resumable]
    return sorted(run_ids, key=lambda run_id: (len(run_id), run_id))


_QUESTION_INDEX: Final = re.compile(r"\d{1,7}")
"""The index of the question at the end of a run id. The suffix of a generated id is longer."""
_MAX_NAMES: Final = 8
"""Maximum number of runs with the same prefix in an error."""


def open_log(path: Path | None) -> RunLog:
    """Return the log, which must exist."""
    from memagent_graph.run_log import RunLog

    path = path or get_default_run_log_path()
    with suppress(PermissionError):  # the log reports it with a hint
        if not path.exists():
            raise RunLogError(
                f"there is no run log at {path}",
                hint="Run `memagent read` to create it, or pass another log with --log.",
            )
    return RunLog(path)
