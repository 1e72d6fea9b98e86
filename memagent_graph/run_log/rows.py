"""Between a run log's rows and the records they hold."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from memagent_graph.run_log.packing import pack_ids, pack_logprobs, pack_text, unpack_ids, unpack_logprobs, unpack_text
from memagent_graph.run_log.records import Conversation, LoggedEvent, Outcome, Reward, RunRecord
from memagent_graph.trace import Span, Writes

T = TypeVar("T")


def insert_run(connection: sqlite3.Connection, new: RunRecord) -> None:
    """Add a run."""
    connection.execute(
        "INSERT INTO runs (run_id, began, ended, document, settings, stop_reason, trace, strategy, "
        "strategy_fingerprint) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            new.run_id,
            new.began,
            new.ended,
            json.dumps(new.document),
            json.dumps(dict(new.settings)),
            new.stop_reason,
            json.dumps(dict(new.trace)) if new.trace else None,
            new.strategy,
            new.strategy_fingerprint,
        ),
    )
    connection.execute(
        "INSERT INTO answers (run_id, number, question, answer) VALUES (?, 0, ?, ?)",
        (new.run_id, new.question, new.answer),
    )


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts, unless it is there."""
    connection.execute(
        "INSERT OR IGNORE INTO templates (hash, content) VALUES (?, ?)", (fingerprint, json.dumps(dict(wording)))
    )


def insert_event(connection: sqlite3.Connection, run_id: str, new: LoggedEvent, conversation: int | None) -> None:
    """Add an event of a run, or of one of its conversations."""
    connection.execute(
        "INSERT INTO events (run_id, conversation, position, time, kind, detail, rule, text, step) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (run_id, conversation, new.position, new.time, new.kind, new.detail, new.rule, pack_text(new.text), new.step),
    )


def insert_reward(connection: sqlite3.Connection, new: Reward) -> None:
    """Add a reward; its conversation is a row."""
    connection.execute(
        "INSERT INTO rewards (run_id, conversation, name, value, source, time, note) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (new.run_id, new.conversation, new.name, new.value, new.source, new.time, new.note),
    )


class NewConversation:
    """The job of adding a conversation with its events; it gives the conversation's row.

    Everything is packed when the job is made, in the thread of whoever makes it, so that the writing thread has little
    to do in Python.

    Args:
        new: the conversation.
        supersede: whether what another step left in its place, and all that came of that, no longer counts.
    """

    def __init__(self, new: Conversation, *, supersede: bool) -> None:
        self.run_id, self.position, self.step = new.run_id, new.position, new.step
        self.place = new.run_id, new.branch, new.role, new.slot
        self.supersede = supersede
        self.parents, self.reads, self.seq = new.parents, new.reads, new.seq
        self.events = new.events
        self.configuration = (
            new.policy,
            new.policy_version,
            new.tokenizer,
            new.template,
            json.dumps(dict(new.sampling), sort_keys=True),
        )
        self.values = (
            new.run_id,
            new.node,
            new.branch,
            new.role,
            new.slot,
            new.writes.value,
            new.position,
            new.step,
            new.attempt,
            new.outcome.value,
            int(new.superseded),
            new.began,
            new.seconds,
            new.prompt_tokens,
            new.completion_tokens,
            new.cached_tokens,
            new.finish_reason,
            pack_ids(new.prompt_token_ids),
            pack_ids(new.token_ids, small=True),
            pack_logprobs(new.logprobs),
            pack_text(new.text),
            pack_text(new.memory),
            json.dumps(dict(new.trace)) if new.trace else None,
        )

    def __call__(self, connection: sqlite3.Connection) -> int:
        """Add it alone."""
        return self.together(connection, [self])[0]

    @staticmethod
    def together(connection: sqlite3.Connection, jobs: Sequence[NewConversation]) -> list[int]:
        """Add several, in order; returns their rows."""
        # Looked up in every transaction: after a deletion, perhaps by another process, the number is given out again.
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
                supersede(connection, job.run_id, _in_place_of(connection, job), with_them=True)
            waiting.append(job)
        return added + _insert(connection, waiting, configurations, numbering)


class _Numbering:
    """The next number of each run's conversations."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._next: dict[str, int] = {}

    def take(self, job: NewConversation) -> int:
        if job.run_id not in self._next:
            find = "SELECT coalesce(max(seq) + 1, 0) FROM conversations WHERE run_id = ?"
            self._next[job.run_id] = self._connection.execute(find, (job.run_id,)).fetchone()[0]
        number = self._next[job.run_id] if job.seq is None else job.seq
        self._next[job.run_id] = max(self._next[job.run_id], number + 1)
        return number


def _in_place_of(connection: sqlite3.Connection, job: NewConversation) -> list[str]:
    """The steps of other executions at a conversation's place."""
    query = (
        "SELECT DISTINCT step FROM conversations "
        "WHERE run_id = ? AND branch = ? AND role = ? AND slot = ? AND superseded = 0 AND step <> ?"
    )
    return [row[0] for row in connection.execute(query, (*job.place, job.step))]


def step_at(connection: sqlite3.Connection, run_id: str, position: int) -> str | None:
    """The trunk's newest step at a chunk that counts; None where there is none."""
    query = (
        "SELECT step FROM conversations WHERE run_id = ? AND branch = '' AND position = ? AND superseded = 0 "
        "AND writes <> 'answer' ORDER BY seq DESC LIMIT 1"
    )
    found = connection.execute(query, (run_id, position)).fetchone()
    return None if found is None else str(found[0])


def supersede(connection: sqlite3.Connection, run_id: str, steps: Sequence[str], *, with_them: bool) -> None:
    """Mark all that came of some steps, and, `with_them`, these themselves, as no longer part of the run."""
    if not steps:
        return
    rows: dict[str, list[int]] = {}
    children: dict[str, set[str]] = {}
    query = (
        "SELECT c.id, c.step, p.parent FROM conversations c "
        "LEFT JOIN conversation_parents p ON p.conversation = c.id WHERE c.run_id = ? AND c.superseded = 0"
    )
    for row, step, parent in connection.execute(query, (run_id,)):
        rows.setdefault(step, []).append(row)
        if parent is not None:
            children.setdefault(parent, set()).add(step)
    gone: set[str] = set()
    waiting = list(steps) if with_them else [child for step in steps for child in children.get(step, ())]
    while waiting:
        step = waiting.pop()
        if step not in gone:
            gone.add(step)
            waiting += children.get(step, ())
    marked = sorted({row for step in gone for row in rows.get(step, ())})
    connection.executemany("UPDATE conversations SET superseded = 1 WHERE id = ?", ((row,) for row in marked))


_COLUMNS: Final = (
    "run_id, node, branch, role, slot, writes, position, step, attempt, outcome, superseded, began, seconds, "
    "prompt_tokens, completion_tokens, cached_tokens, finish_reason, prompt_ids, completion_ids, logprobs, text, "
    "memory, trace, configuration, seq"
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
    values = [value for job in jobs for value in (*job.values, configurations[job.configuration], numbering.take(job))]
    each = f"({', '.join('?' * (_COLUMNS.count(',') + 1))})"
    inserted = connection.execute(
        f"INSERT INTO conversations ({_COLUMNS}) VALUES {', '.join([each] * len(jobs))}",  # noqa: S608  our own names
        values,
    )
    last = inserted.lastrowid or 0
    numbers = list(range(last - len(jobs) + 1, last + 1))
    reads, parents = [], []
    for job, row in zip(jobs, numbers, strict=True):
        for number, span in enumerate(job.reads):
            reads.append((row, number, *(getattr(span, name) for name in _SPAN)))
        parents += [(row, number, parent) for number, parent in enumerate(job.parents)]
        for event in job.events:
            insert_event(connection, job.run_id, replace(event, position=job.position), row)
    connection.executemany("INSERT INTO conversation_reads VALUES (?, ?, ?, ?, ?, ?, ?, ?)", reads)
    connection.executemany("INSERT INTO conversation_parents VALUES (?, ?, ?)", parents)
    return numbers


_SPAN: Final = ("index", "start_char", "end_char", "start_byte", "end_byte", "tokens")


def span(row: sqlite3.Row) -> Span:
    """The chunk that a row of `conversation_reads` holds."""
    return Span(row["chunk"], row["start_char"], row["end_char"], row["start_byte"], row["end_byte"], row["tokens"])


WITHOUT_IDS: Final = ", ".join(
    f"c.{name}" for name in ("id", *_COLUMNS.split(", ")) if name not in {"prompt_ids", "completion_ids", "logprobs"}
)


def run_record(row: sqlite3.Row) -> RunRecord:
    """The run that a row of `runs` holds."""
    values = dict(row)
    for name in ("document", "settings", "trace"):
        values[name] = json.loads(values[name] or "{}")
    return RunRecord(**values)


def event(row: sqlite3.Row) -> LoggedEvent:
    """The event that a row of `events` holds."""
    values = {name: row[name] for name in ("time", "kind", "detail", "position", "rule", "step")}
    return LoggedEvent(**values, text=unpack_text(row["text"]))


def grouped(
    connection: sqlite3.Connection, table: str, run_id: str, made: Callable[[sqlite3.Row], T]
) -> dict[int, list[T]]:
    """What a table that belongs to `conversations` holds of a run, by conversation."""
    found: dict[int, list[T]] = {}
    query = (
        f"SELECT t.* FROM {table} t JOIN conversations c ON c.id = t.conversation "  # noqa: S608  our own names
        "WHERE c.run_id = ? ORDER BY t.conversation, t.number"
    )
    for row in connection.execute(query, (run_id,)):
        found.setdefault(row["conversation"], []).append(made(row))
    return found


def conversation(
    row: sqlite3.Row, events: tuple[LoggedEvent, ...], parents: Sequence[str], reads: Sequence[Span]
) -> Conversation:
    """The conversation that a row of `conversations`, joined with its configuration, holds."""
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
