"""Between a run log's rows and the records they hold."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from memagent_graph.run_log.packing import pack_ids, pack_logprobs, pack_text, unpack_ids, unpack_logprobs, unpack_text
from memagent_graph.run_log.records import Conversation, ConversationKind, LoggedEvent, Outcome, Reward, RunRecord


def insert_run(connection: sqlite3.Connection, new: RunRecord) -> None:
    """Add a run."""
    connection.execute(
        "INSERT INTO runs (run_id, began, ended, question, document, settings, stop_reason, answer, trace) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            new.run_id,
            new.began,
            new.ended,
            new.question,
            json.dumps(new.document),
            json.dumps(dict(new.settings)),
            new.stop_reason,
            new.answer,
            json.dumps(dict(new.trace)) if new.trace else None,
        ),
    )


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts, unless it is there."""
    connection.execute(
        "INSERT OR IGNORE INTO templates (hash, content) VALUES (?, ?)", (fingerprint, json.dumps(dict(wording)))
    )


def insert_event(connection: sqlite3.Connection, run_id: str, new: LoggedEvent, conversation: int | None) -> None:
    """Add an event of a run, or of one of its conversations."""
    connection.execute(
        "INSERT INTO events (run_id, conversation, position, time, kind, detail, rule, text) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (run_id, conversation, new.position, new.time, new.kind, new.detail, new.rule, pack_text(new.text)),
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
        supersede: whether rows of its run at its position or behind it, left by another step, no longer count.
    """

    def __init__(self, new: Conversation, *, supersede: bool) -> None:
        self.run_id, self.position, self.step = new.run_id, new.position, new.step
        self.supersede = supersede
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
            new.position,
            new.kind.value,
            new.step,
            new.attempt,
            new.outcome.value,
            int(new.superseded),
            new.began,
            new.seconds,
            new.start_char,
            new.end_char,
            new.start_byte,
            new.end_byte,
            new.chunk_tokens,
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
        added: list[int] = []
        waiting: list[NewConversation] = []
        for job in jobs:
            if job.supersede:
                added += _insert(connection, waiting, configurations)
                waiting = []
                connection.execute(
                    "UPDATE conversations SET superseded = 1 "
                    "WHERE run_id = ? AND position >= ? AND step <> ? AND superseded = 0",
                    (job.run_id, job.position, job.step),
                )
            waiting.append(job)
        return added + _insert(connection, waiting, configurations)


_COLUMNS: Final = (
    "run_id, position, kind, step, attempt, outcome, superseded, began, seconds, start_char, end_char, start_byte, "
    "end_byte, chunk_tokens, prompt_tokens, completion_tokens, cached_tokens, finish_reason, prompt_ids, "
    "completion_ids, logprobs, text, memory, trace, configuration"
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
    connection: sqlite3.Connection, jobs: Sequence[NewConversation], configurations: Mapping[tuple[str, ...], int]
) -> list[int]:
    """Add rows in one statement, which numbers them one after the other."""
    if not jobs:
        return []
    values = [value for job in jobs for value in (*job.values, configurations[job.configuration])]
    each = f"({', '.join('?' * (_COLUMNS.count(',') + 1))})"
    inserted = connection.execute(
        f"INSERT INTO conversations ({_COLUMNS}) VALUES {', '.join([each] * len(jobs))}",  # noqa: S608  our own names
        values,
    )
    last = inserted.lastrowid or 0
    numbers = list(range(last - len(jobs) + 1, last + 1))
    for job, row in zip(jobs, numbers, strict=True):
        for event in job.events:
            insert_event(connection, job.run_id, replace(event, position=job.position), row)
    return numbers


def run_record(row: sqlite3.Row) -> RunRecord:
    """The run that a row of `runs` holds."""
    values = dict(row)
    for name in ("document", "settings", "trace"):
        values[name] = json.loads(values[name] or "{}")
    return RunRecord(**values)


def event(row: sqlite3.Row) -> LoggedEvent:
    """The event that a row of `events` holds."""
    return LoggedEvent(row["time"], row["kind"], row["detail"], row["position"], row["rule"], unpack_text(row["text"]))


def conversation(row: sqlite3.Row, events: tuple[LoggedEvent, ...]) -> Conversation:
    """The conversation that a row of `conversations`, joined with its configuration, holds."""
    values = dict(row)
    del values["configuration"]
    prompt_ids, completion_ids = values.pop("prompt_ids"), values.pop("completion_ids")
    return Conversation(
        **{
            **values,
            "kind": ConversationKind(values["kind"]),
            "outcome": Outcome(values["outcome"]),
            "superseded": bool(values["superseded"]),
            "sampling": json.loads(values["sampling"]),
            "trace": json.loads(values["trace"] or "{}"),
            "text": unpack_text(values["text"]),
            "memory": unpack_text(values["memory"]),
            "prompt_token_ids": unpack_ids(prompt_ids),
            "token_ids": unpack_ids(completion_ids),
            "logprobs": unpack_logprobs(values["logprobs"]),
            "events": events,
        }
    )
