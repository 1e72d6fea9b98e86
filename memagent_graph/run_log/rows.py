"""Converts records to a run log's rows, and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Literal, TypeVar

from memagent_graph.calls import Span, Writes
from memagent_graph.run_log.packing import pack_ids, pack_logprobs, pack_text, unpack_ids, unpack_logprobs, unpack_text
from memagent_graph.run_log.records import Conversation, LoggedEvent, Outcome, Reward, RunRecord

T = TypeVar("T")


def insert(
    connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, update: Iterable[str] | None = None
) -> None:
    """Add a row. If its key exists, its columns in `update` are replaced; without `update` that fails."""
    change = ", ".join(f"{column} = excluded.{column}" for column in update or ())
    otherwise = "" if update is None else f"ON CONFLICT DO UPDATE SET {change}" if change else "ON CONFLICT DO NOTHING"
    marks = ", ".join("?" * len(values))
    connection.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) {otherwise}",  # noqa: S608  our own names
        tuple(values.values()),
    )


def insert_run(
    connection: sqlite3.Connection, new: RunRecord, existing: Literal["refuse", "continue", "replace"] = "refuse"
) -> None:
    """Add a run. If there is one with this id, that is an error, or it only loses its end, or it is replaced."""
    run = {
        "run_id": new.run_id,
        "began": new.began,
        "ended": new.ended,
        "document": json.dumps(new.document),
        "settings": json.dumps(dict(new.settings)),
        "stop_reason": new.stop_reason,
        "trace": _json_or_null(new.trace),
        "strategy": new.strategy,
        "strategy_fingerprint": new.strategy_fingerprint,
    }
    answer = {"run_id": new.run_id, "number": 0, "question": new.question, "answer": new.answer}
    updates: dict[str, tuple[Iterable[str] | None, Iterable[str] | None]] = {
        "refuse": (None, None),
        "continue": (("ended", "stop_reason"), ()),
        "replace": (run, answer),
    }
    insert(connection, "runs", run, update=updates[existing][0])
    insert(connection, "answers", answer, update=updates[existing][1])


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts, unless it exists."""
    insert(connection, "templates", {"hash": fingerprint, "content": json.dumps(dict(wording))}, update=())


def insert_event(connection: sqlite3.Connection, run_id: str, new: LoggedEvent, conversation: int | None) -> None:
    """Add an event of a run, or of one of its conversations."""
    values = {**asdict(new), "run_id": run_id, "conversation": conversation, "text": pack_text(new.text)}
    insert(connection, "events", values)


def insert_reward(connection: sqlite3.Connection, new: Reward) -> None:
    """Add a reward; its conversation is a row."""
    insert(connection, "rewards", asdict(replace(new, id=None)))


def withdraw_rewards(connection: sqlite3.Connection, run_id: str, time: float) -> None:
    """Turn the rewards of a run into events, as another attempt begins that they are not about.

    Events go into exports and back, and no reward function looks at them. Rewards of single conversations stay with
    them: those that another attempt replaces are superseded.
    """
    of_run = "run_id = ? AND conversation IS NULL"
    for row in connection.execute(f"SELECT * FROM rewards WHERE {of_run} ORDER BY time, id", (run_id,)).fetchall():  # noqa: S608
        detail = f"{row['name']} = {row['value']:g} by {row['source']} was of an earlier attempt"
        insert_event(connection, run_id, LoggedEvent(time, "reward_withdrawn", detail), None)
    connection.execute(f"DELETE FROM rewards WHERE {of_run}", (run_id,))  # noqa: S608


class NewConversation:
    """The job that adds a conversation with its events; its result is the conversation's row.

    Everything is packed when the job is made, in the thread of the caller, so that the writing thread has little
    to do in Python.

    Args:
        new: the conversation.
        supersede: whether another step in its place, and everything that depends on it, no longer counts.
    """

    def __init__(self, new: Conversation, *, supersede: bool) -> None:
        self.supersede = supersede
        self.parents, self.reads, self.events = new.parents, new.reads, new.events
        self.configuration = (
            new.policy,
            new.policy_version,
            new.tokenizer,
            new.template,
            json.dumps(dict(new.sampling), sort_keys=True),
        )
        self.values = {
            **{name: getattr(new, name) for name in _PLAIN_COLUMNS},
            "writes": new.writes.value,
            "outcome": new.outcome.value,
            "superseded": int(new.superseded),
            "prompt_ids": pack_ids(new.prompt_token_ids),
            "completion_ids": pack_ids(new.token_ids, small=True),
            "logprobs": pack_logprobs(new.logprobs),
            "text": pack_text(new.text),
            "memory": pack_text(new.memory),
            "trace": _json_or_null(new.trace),
        }

    def __call__(self, connection: sqlite3.Connection) -> int:
        """Add it alone."""
        return self.together(connection, [self])[0]

    @staticmethod
    def together(connection: sqlite3.Connection, jobs: Sequence[NewConversation]) -> list[int]:
        """Add several, in order; returns their rows."""
        # Looked up in every transaction: after a deletion, perhaps by another process, a number is used again.
        configurations: dict[tuple[str, ...], int] = {
            each: _configuration(connection, each) for each in {job.configuration for job in jobs}
        }
        numbering = _Numbering(connection)
        added: list[int] = []
        waiting: list[NewConversation] = []
        for job in jobs:
            if job.supersede:
                added += _insert(connection, waiting, configurations, numbering)
                waiting = []
                supersede(connection, job.values["run_id"], _in_place_of(connection, job), with_them=True)
            waiting.append(job)
        return added + _insert(connection, waiting, configurations, numbering)


class _Numbering:
    """The next number of each run's conversations."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._next: dict[str, int] = {}

    def take(self, run_id: str, given: int | None) -> int:
        if run_id not in self._next:
            find = "SELECT coalesce(max(seq) + 1, 0) FROM conversations WHERE run_id = ?"
            self._next[run_id] = self._connection.execute(find, (run_id,)).fetchone()[0]
        number = self._next[run_id] if given is None else given
        self._next[run_id] = max(self._next[run_id], number + 1)
        return number


def _in_place_of(connection: sqlite3.Connection, job: NewConversation) -> list[str]:
    """The steps of other executions in a conversation's place."""
    query = (
        "SELECT DISTINCT step FROM conversations WHERE run_id = :run_id AND branch = :branch AND role = :role "
        "AND slot = :slot AND superseded = 0 AND step <> :step"
    )
    return [row[0] for row in connection.execute(query, job.values)]


def step_at(connection: sqlite3.Connection, run_id: str, position: int) -> str | None:
    """The trunk's newest step at a chunk, of those that count; None if there is none."""
    query = (
        "SELECT step FROM conversations WHERE run_id = ? AND branch = '' AND position = ? AND superseded = 0 "
        "AND writes <> 'answer' ORDER BY seq DESC LIMIT 1"
    )
    found = connection.execute(query, (run_id, position)).fetchone()
    return None if found is None else str(found[0])


def supersede(connection: sqlite3.Connection, run_id: str, steps: Sequence[str], *, with_them: bool) -> None:
    """Mark everything that depends on some steps, and `with_them` these too, as no longer part of the run."""
    if not steps:
        return
    query = (
        "SELECT c.id, c.step, p.parent FROM conversations c LEFT JOIN conversation_parents p ON p.conversation = c.id "
        "WHERE c.run_id = ? AND c.superseded = 0 ORDER BY c.seq"
    )
    found = connection.execute(query, (run_id,)).fetchall()
    gone = set(steps)
    for _, step, parent in found:  # each after its parents
        if parent in gone:
            gone.add(step)
    marked = gone if with_them else gone.difference(steps)
    rows = {(row,) for row, step, _ in found if step in marked}
    connection.executemany("UPDATE conversations SET superseded = 1 WHERE id = ?", rows)


def supersede_except(connection: sqlite3.Connection, run_id: str, steps: Collection[str]) -> None:
    """Mark everything but these steps as no longer part of the run."""
    found = connection.execute("SELECT id, step FROM conversations WHERE run_id = ? AND superseded = 0", (run_id,))
    rows = [(row,) for row, step in found.fetchall() if step not in steps]
    connection.executemany("UPDATE conversations SET superseded = 1 WHERE id = ?", rows)


_PLAIN_COLUMNS: Final = (
    *("run_id", "seq", "node", "branch", "role", "slot", "position", "step", "attempt", "began", "seconds"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"),
)
"""Columns with an unchanged attribute of `Conversation`."""
WITHOUT_IDS: Final = ", ".join(
    f"c.{name}"
    for name in ("id", *_PLAIN_COLUMNS, "writes", "outcome", "superseded", "text", "memory", "trace", "configuration")
)


def _configuration(connection: sqlite3.Connection, configuration: tuple[str, ...]) -> int:
    find = (
        "SELECT id FROM configurations "
        "WHERE policy = ? AND policy_version = ? AND tokenizer = ? AND template = ? AND sampling = ?"
    )
    found = connection.execute(find, configuration).fetchone()
    if found is None:
        connection.execute(
            "INSERT INTO configurations (policy, policy_version, tokenizer, template, sampling) VALUES (?, ?, ?, ?, ?)",
            configuration,
        )
        found = connection.execute(find, configuration).fetchone()
    row: int = found[0]
    return row


def _insert(
    connection: sqlite3.Connection,
    jobs: Sequence[NewConversation],
    configurations: Mapping[tuple[str, ...], int],
    numbering: _Numbering,
) -> list[int]:
    """Add rows in one statement, which numbers them one after the other."""
    if not jobs:
        return []
    values: list[Any] = []
    for job in jobs:
        job_values = {**job.values, "configuration": configurations[job.configuration]}
        job_values["seq"] = numbering.take(job.values["run_id"], job.values["seq"])
        values += job_values.values()
    columns = (*jobs[0].values, "configuration")
    each = f"({', '.join('?' * len(columns))})"
    inserted = connection.execute(
        f"INSERT INTO conversations ({', '.join(columns)}) VALUES {', '.join([each] * len(jobs))}",  # noqa: S608  our own names
        values,
    )
    last = inserted.lastrowid or 0
    numbers = list(range(last - len(jobs) + 1, last + 1))
    reads, parents = [], []
    for job, row in zip(jobs, numbers, strict=True):
        for number, span in enumerate(job.reads):
            reads.append((row, number, *(getattr(span, name) for name in SPAN)))
        parents += [(row, number, parent) for number, parent in enumerate(job.parents)]
        for event in job.events:
            insert_event(connection, job.values["run_id"], replace(event, position=job.values["position"]), row)
    connection.executemany("INSERT INTO conversation_reads VALUES (?, ?, ?, ?, ?, ?, ?, ?)", reads)
    connection.executemany("INSERT INTO conversation_parents VALUES (?, ?, ?)", parents)
    return numbers


SPAN: Final = ("index", "start_char", "end_char", "start_byte", "end_byte", "tokens")


def span(row: sqlite3.Row) -> Span:
    """The chunk in a row of `conversation_reads`."""
    return Span(row["chunk"], row["start_char"], row["end_char"], row["start_byte"], row["end_byte"], row["tokens"])


def run_record(row: sqlite3.Row) -> RunRecord:
    """The run in a row of `runs`."""
    values = dict(row)
    for name in ("document", "settings", "trace"):
        values[name] = json.loads(values[name] or "{}")
    return RunRecord(**values)


def event(row: sqlite3.Row) -> LoggedEvent:
    """The event in a row of `events`."""
    values = {name: row[name] for name in ("time", "kind", "detail", "position", "rule", "step")}
    return LoggedEvent(**values, text=unpack_text(row["text"]))


def grouped(
    connection: sqlite3.Connection, table: str, run_id: str, made: Callable[[sqlite3.Row], T], order: str = "number"
) -> dict[int, list[T]]:
    """A run's rows of a table that belongs to `conversations`, by conversation."""
    found: dict[int, list[T]] = {}
    query = (
        f"SELECT t.* FROM {table} t JOIN conversations c ON c.id = t.conversation "  # noqa: S608  our own names
        f"WHERE c.run_id = ? ORDER BY t.conversation, t.{order}"
    )
    for row in connection.execute(query, (run_id,)):
        found.setdefault(row["conversation"], []).append(made(row))
    return found


def _json_or_null(values: Mapping[str, str]) -> str | None:
    return json.dumps(dict(values)) if values else None


def conversation(
    row: sqlite3.Row, events: tuple[LoggedEvent, ...], parents: Sequence[str], reads: Sequence[Span]
) -> Conversation:
    """The conversation in a row of `conversations`, joined with its configuration."""
    values = dict(row)
    del values["configuration"]
    prompt_ids, completion_ids = values.pop("prompt_ids", None), values.pop("completion_ids", None)
    return Conversation(
        **{
            **values,
            "writes": Writes(values["writes"]),
            "outcome": Outcome(values["outcome"]),
            "superseded": bool(values["superseded"]),
            "sampling": json.loads(values["sampling"]),
            "trace": json.loads(values["trace"] or "{}"),
            "text": unpack_text(values["text"]),
            "memory": unpack_text(values["memory"]),
            "prompt_token_ids": unpack_ids(prompt_ids),
            "token_ids": unpack_ids(completion_ids),
            "logprobs": unpack_logprobs(values.get("logprobs")),
            "events": events,
            "parents": tuple(parents),
            "reads": tuple(reads),
        }
    )
