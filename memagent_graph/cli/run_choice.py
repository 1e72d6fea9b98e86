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

if TYPE_CHECKING:
    from memagent_graph.run_log import RunFilter, RunLog

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def point_in_time(text: str) -> float:
    """Return seconds since 1970 for an ISO date or time (local, unless it names a zone), or an age: 90m, 12h, 7d, 2w.

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


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """Options that choose runs; a run must fulfil all of them."""

    question: Annotated[str | None, typer.Option(help="Only runs with this text in their question.")] = None
    document: Annotated[str | None, typer.Option(help="Only runs with this text in their document's name.")] = None
    model: Annotated[str | None, typer.Option(help="Only runs with this text in the name of their policy.")] = None
    stop_reason: Annotated[
        str | None, typer.Option(help="Only runs with this end: answered, no_answer, max_chunks, ...")
    ] = None
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only runs that have not ended.")] = False
    with_reward: Annotated[
        str | None, typer.Option("--reward", metavar="NAME", help="Only runs with a reward of this name.")
    ] = None
    since: Annotated[
        float | None,
        typer.Option(
            parser=point_in_time,
            metavar="WHEN",
            help="Only runs that began after this: an ISO date, or an age such as 7d.",
        ),
    ] = None
    until: Annotated[
        float | None, typer.Option(parser=point_in_time, metavar="WHEN", help="Only runs that began before this.")
    ] = None
    newest: Annotated[
        int | None, typer.Option(min=1, help="At most this many runs, the newest.", show_default="all")
    ] = None

    def filter(self, run_ids: Sequence[str] = (), *, newest: int | None = None) -> RunFilter:
        """Return the filter for the log.

        Args:
            run_ids: only these runs, if there are any.
            newest: how many, if the user does not say.
        """
        from memagent_graph.run_log import RunFilter

        if self.unfinished and self.stop_reason:
            raise typer.BadParameter("a run that has not ended has no stop reason", param_hint="'--unfinished'")
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
    str, typer.Argument(metavar="RUN", help="The run: its id, the beginning of its id, or latest.")
]


def find_run(log: RunLog, name: str) -> str:
    """Return the id of the run that a user names by its id, by the beginning of its id, or as "latest".

    The latest is one of those that were read here: the time in an imported run is somebody else's word.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
    """
    from memagent_graph.run_log import RunFilter

    selection = RunFilter(newest=1, is_own=True) if name == LATEST else RunFilter(run_id_begins=name, newest=_MAX_NAMES)
    run_ids = [record.run_id for record in log.runs(selection)]
    if name in run_ids or len(run_ids) == 1:
        return name if name in run_ids else run_ids[0]
    if name == LATEST:
        raise RunNotFoundError(
            f"{log.path} holds no runs yet", hint="Read something first: memagent read FILE -q QUESTION"
        )
    if not run_ids or len(run_ids) == _MAX_NAMES:  # the run with exactly this id may not be among them
        return log.get(name).run_id
    raise RunNotFoundError(f"several runs begin with {name!r}", hint=f"Give more of its id: {', '.join(run_ids)}.")


def runs_to_resume(log: RunLog, name: str) -> list[str]:
    """Return the run that a user names as for `find_run`, or those of a read of several questions that are not done.

    Such a read is the latest, or is named by the id that its runs share.
    """
    try:
        run_id = find_run(log, name)
    except RunNotFoundError:
        if open_runs := open_questions(log, name):
            return open_runs
        raise
    return (open_questions(log, read_id(run_id)) if name == LATEST else []) or [run_id]


def read_id(run_id: str) -> str:
    """Return the id that a run shares with the others of a read of several questions; empty for any other run."""
    read, _, number = run_id.rpartition("-")
    return read if _QUESTION.fullmatch(number) else ""


def open_questions(log: RunLog, read: str) -> list[str]:
    """Return the runs that share this id and are not done, in the order of their questions."""
    from memagent_graph.events import StopReason
    from memagent_graph.run_log import RunFilter

    runs = log.runs(RunFilter(run_id_begins=f"{read}-", is_own=True))
    open_runs = [run.run_id for run in runs if not run.stop_reason or StopReason(run.stop_reason).resumable]
    of_read = [run_id for run_id in open_runs if _QUESTION.fullmatch(run_id.removeprefix(f"{read}-"))]
    return sorted(of_read, key=lambda run_id: (len(run_id), run_id))


_QUESTION: Final = re.compile(r"\d{1,7}")
"""The end of a run's id in a read of several questions. That of an id that was made is longer."""
_MAX_NAMES: Final = 8
"""The most runs with the same beginning that an error names."""


def open_log(path: Path | None) -> RunLog:
    """Return the log; it is not created if there is none."""
    from memagent_graph.run_log import RunLog
    from memagent_graph.storage.paths import default_run_log

    path = path or default_run_log()
    with suppress(PermissionError):  # which the log explains
        if not path.exists():
            raise RunLogError(f"there is no run log at {path}", hint="`memagent read` writes one; --log names another.")
    return RunLog(path)
