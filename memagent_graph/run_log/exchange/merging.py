"""Logs of several processes or machines become one.

A run that was begun by one process and continued by another is in both their logs, a part in each. The parts are put
together in the order in which they were read, so that a chunk that was read twice counts once, as in one log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange.importing import ImportReport
from memagent_graph.run_log.exchange.logged_run import LoggedRun, stored_run
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation

_SQLITE: Final = b"SQLite format 3\0"


def is_log(path: Path) -> bool:
    """Whether a file is a log itself, not an export of one."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def merge_logs(log: RunLog, sources: Sequence[Path | str]) -> ImportReport:
    """Add the runs of other logs to a log. What it has already is skipped, so it can be done again after a kill.

    Args:
        log: the log.
        sources: the other logs' files; nothing writes to them now.

    Raises:
        RunLogError: a file is not a log, or one of them cannot be read or written.
    """
    logs = []
    for source in map(Path, sources):
        if not is_log(source):
            raise RunLogError(f"{source} is not a log of runs", hint="Name the files that reads were logged in.")
        logs.append(RunLog(source))
    places: dict[str, list[tuple[float, int]]] = {}
    for number, each in enumerate(logs):
        for record in each.runs():
            places.setdefault(record.run_id, []).append((record.began, number))
    runs = conversations = rewards = 0
    for run_id in sorted(places, key=lambda each: min(places[each])):
        parts = [stored_run(logs[number], run_id) for _, number in sorted(places[run_id])]
        added = [_joined(log, part) for part in parts if part is not None]
        runs += any(found is not None for found in added)
        conversations += sum(found or 0 for found in added)
        rewards += sum(len(part.rewards) for part, found in zip(parts, added, strict=True) if part and found)
    for each in logs:
        each.close()
    return ImportReport(runs, conversations, rewards, len(places) - runs)


def _joined(log: RunLog, part: LoggedRun) -> int | None:
    """Add a part of a run; how many conversations it brought, or None if all of it was there."""
    run_id, held = part.record.run_id, list(part.conversations)
    there = stored_run(log, run_id)
    if there is None:
        log.add(part.record, held, events=part.events, rewards=part.rewards, templates=part.templates)
        return len(held)
    present = list(there.conversations)
    known = {(each.step, each.attempt) for each in present}
    new = [each for each in held if (each.step, each.attempt) not in known]
    has_end = part.record.ended is not None and there.record.ended is None
    if not new and not has_end:
        return None
    newest: dict[tuple[str, str, int], float] = {}
    for each in (each for each in present if not each.superseded):
        newest[_place(each)] = max(each.began, newest.get(_place(each), each.began))
    stale: set[str] = set()
    for each in sorted(new, key=lambda each: (each.began, each.seq or 0)):  # parents first
        is_stale = each.superseded or each.began < newest.get(_place(each), each.began)
        if is_stale or not stale.isdisjoint(each.parents):
            stale.add(each.step)
        was_replaced = each.step in stale
        added = replace(each, id=None, seq=None, superseded=was_replaced)
        log.wait(log.record(added, supersede=not was_replaced))
    if part.record.stop_reason is not None and (has_end or new):
        log.wait(log.end(run_id, part.record.stop_reason, part.record.answer))
    return len(new)


def _place(conversation: Conversation) -> tuple[str, str, int]:
    return conversation.branch, conversation.role, conversation.slot
