"""`RunLog`: one SQLite file of runs. Many threads, event loops and processes may write to it while others read."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError, RunLogError, RunNotFoundError
from memagent_graph.events import EventKind
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.prompts import Prompts
from memagent_graph.run_log import tables
from memagent_graph.run_log.records import (
    Conversation,
    LoggedEvent,
    LoggedRun,
    Redaction,
    Reward,
    RunFilter,
    RunRecord,
    RunTotals,
    TextKind,
    build_trace,
    describe_edit,
)
from memagent_graph.run_log.tables import Record, bound_records, connect, pack_row, unpack_row
from memagent_graph.storage.database import UnknownSchemaError
from memagent_graph.storage.database_writer import DatabaseWriter, MovedFileError
from memagent_graph.trace import Trace


class RunLog:
    """A log of runs.

    Args:
        path: the SQLite file. The file and its folder are created if they do not exist.
        redact: masks texts before they are written.

    Raises:
        RunLogError: the file is not a run log, comes from another version of this package, or cannot be written.
    """

    def __init__(self, path: Path | str, *, redact: Redaction | None = None) -> None:
        self.path = Path(path)
        self._redact = redact
        self._writer = DatabaseWriter(self.path, partial(connect, self.path), self)
        with self._open_for_reading():
            pass

    # Writing. `begin`, `record`, `end` and `edit` return a future that is done when the entry is in the file; see
    # `wait`. Entries are written in the order of these calls.

    def begin(
        self,
        run_id: str,
        question: str,
        document: DocumentRef,
        settings: Mapping[str, Any],
        strategy: str = "overwrite",
        strategy_fingerprint: str = "",
        *,
        prompts: Prompts | None = None,
        trace: Mapping[str, str] | None = None,
        replaces_run: bool = False,
    ) -> Future[None]:
        """Log the start of a run, with the wording of its prompts and the ids of the caller's trace.

        An existing run with this id continues and its end is removed, or, with `replaces_run`, it is replaced: its
        conversations no longer count. In both cases it is a new attempt, and the rewards of the run so far do not
        count. Rewards of conversations do, unless another attempt replaced the conversation, which is then superseded.
        """
        logged_document = document.copy()
        logged_document["name"] = self._redact_text(TextKind.DOCUMENT_NAME, document["name"]) or ""
        if "path" in document and self._redact_text(TextKind.DOCUMENT_NAME, document["path"]) != document["path"]:
            del logged_document["path"]
        record = RunRecord(
            run_id=run_id,
            began=time.time(),
            ended=None,
            question=replace_lone_surrogates(self._redact_text(TextKind.QUESTION, question) or ""),
            document=logged_document,
            settings=dict(settings),
            stop_reason=None,
            answer=None,
            trace=dict(trace or {}),
            strategy=strategy,
            strategy_fingerprint=strategy_fingerprint,
        )

        def write_start(connection: sqlite3.Connection) -> None:
            values = pack_row(record)
            tables.begin_attempt(connection, run_id, record.began)
            tables.insert_row(connection, "runs", values, update=values.keys() - {"attempt"} if replaces_run else ())
            if replaces_run:
                connection.execute("DELETE FROM imported WHERE run_id = ?", (run_id,))
                connection.execute("UPDATE conversations SET superseded = 1 WHERE run_id = ?", (run_id,))
            if prompts is not None:
                tables.insert_template(connection, prompts.fingerprint, prompts.wording)

        return self._writer.submit(write_start)

    def end(self, run_id: str, stop_reason: str, answer: str | None) -> Future[None]:
        """Log the end of a run."""
        answer = self._redact_text(TextKind.ANSWER, answer)
        values = time.time(), stop_reason, answer and replace_lone_surrogates(answer), run_id

        def write_end(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE runs SET ended = ?, stop_reason = ?, answer = ? WHERE run_id = ?", values)

        return self._writer.submit(write_end)

    def record(self, conversation: Conversation, prompt_texts: Sequence[str] = ()) -> Future[int]:
        """Log a conversation of a run that has begun. The future's result is its row.

        After a resume or an edit, an earlier conversation with the same branch, role and slot is marked as superseded
        in the same transaction, with everything that depends on it.

        Args:
            conversation: the conversation.
            prompt_texts: the messages of the prompt, for the redaction hook. They are not stored.
        """
        if self._redact is not None:
            conversation = self._redact_conversation(conversation, prompt_texts)
        values = pack_row(conversation) | {"id": None}  # here, so that the writer thread does little work

        def write_conversation(connection: sqlite3.Connection) -> int:
            tables.supersede_slot(connection, values)
            return tables.insert_row(connection, "conversations", values)

        return self._writer.submit(write_conversation)

    def edit(
        self,
        run_id: str,
        position: int,
        memory: str,
        *,
        call_id: str,
        remaining: Collection[str],
        author: str | None = None,
    ) -> Future[None]:
        """Log that a person replaced the memory of a call, after `begin`: an edit is a new attempt of the run.

        Args:
            run_id: the run.
            position: the index of the chunk.
            memory: the new memory.
            call_id: the id of the call.
            remaining: the ids of the run's remaining calls. All others are superseded.
            author: the person, if known.
        """
        text = self._redact_text(TextKind.MEMORY, memory)
        event = LoggedEvent(time.time(), EventKind.MEMORY_EDITED, describe_edit(author), position, text, call_id)

        def write_edit(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE conversations SET superseded = 1 "
                "WHERE run_id = ? AND call_id NOT IN (SELECT value FROM json_each(?))",
                (run_id, json.dumps(list(remaining))),
            )
            tables.insert_row(connection, "events", {**pack_row(event), "run_id": run_id})

        return self._writer.submit(write_edit)

    def reward(
        self,
        run_id: str,
        value: float,
        *,
        name: str = "reward",
        source: str = "person",
        conversation: int | None = None,
        note: str | None = None,
    ) -> None:
        """Add a reward of a run, or of one of its conversations. Earlier rewards stay; see `latest_rewards`.

        The reward of a run is valid for its present attempt. When the run is read again, resumed or edited, the reward
        stays in the log, but no longer counts.

        Raises:
            MemAgentError: the value is not a finite number.
            RunNotFoundError: the run does not exist, or has no such conversation.
            RunLogError: the file cannot be written.
        """
        new_reward = Reward(run_id, name, float(value), source, time.time(), conversation, note)
        if not math.isfinite(new_reward.value):
            raise MemAgentError(
                f"a reward must be a finite number, got {new_reward.value}", hint="Use a number such as 0.5."
            )
        self.get(run_id)

        def write_reward(connection: sqlite3.Connection) -> None:
            if conversation is not None:
                row = connection.execute("SELECT run_id FROM conversations WHERE id = ?", (conversation,)).fetchone()
                if row is None or row["run_id"] != run_id:
                    hint = "Pass the `id` of one that `conversations(run_id)` returns."
                    raise RunNotFoundError(f"run {run_id} has no conversation {conversation}", hint=hint, run_id=run_id)
            tables.insert_reward(connection, new_reward)

        self.wait(self._writer.submit(write_reward))

    def add(self, run: LoggedRun, *, replace_existing: bool = False, is_own: bool = False) -> None:
        """Add a run of another log in one transaction. The redaction hook is not called.

        Args:
            run: the run. Its conversations, superseded ones too, get new rows.
            replace_existing: whether to delete a run with the same id first.
            is_own: whether the run was read here. Others are marked as imported.

        Raises:
            RunLogError: the run exists, is inconsistent, or cannot be written.
        """
        run_id = run.record.run_id

        def write_run(connection: sqlite3.Connection) -> None:
            if replace_existing:
                connection.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
            tables.insert_row(connection, "runs", pack_row(run.record))
            if not is_own:
                connection.execute("INSERT INTO imported VALUES (?)", (run_id,))
            for fingerprint, wording in run.templates.items():
                tables.insert_template(connection, fingerprint, wording)
            row_ids = {
                conversation.id: tables.insert_row(connection, "conversations", pack_row(conversation) | {"id": None})
                for conversation in sorted(run.conversations, key=lambda conversation: conversation.id or 0)
            }
            for event in run.events:
                tables.insert_row(connection, "events", {**pack_row(event), "run_id": run_id})
            for reward in run.rewards:
                row_id = None if reward.conversation is None else row_ids[reward.conversation]
                tables.insert_reward(connection, replace(reward, conversation=row_id))

        try:
            self.wait(self._writer.submit(write_run))
        except RunLogError as error:
            if isinstance(error.__cause__, OverflowError | UnicodeEncodeError):
                raise RunLogError(f"run {run_id!r} cannot be stored: {error.message}", hint=error.hint) from error
            if isinstance(error.__cause__, sqlite3.IntegrityError):
                raise RunLogError(
                    f"run {run_id!r} is already in {self.path}, or is inconsistent ({error.__cause__})",
                    hint="Replace the run that is here, or leave this one out.",
                ) from error
            raise

    def delete(self, run_ids: Iterable[str]) -> int:
        """Delete runs with all of their data, free the disk space, and return the number of runs."""
        parameters = [(run_id,) for run_id in run_ids]

        def delete_rows(connection: sqlite3.Connection) -> int:
            return connection.executemany("DELETE FROM runs WHERE run_id = ?", parameters).rowcount

        run_count: int = self.wait(self._writer.submit(delete_rows))
        # On a full disk, or while somebody reads, the space may not be freed; new runs will use it.
        with suppress(RunLogError), self._open_for_reading() as connection:
            connection.executescript("PRAGMA incremental_vacuum; PRAGMA busy_timeout = 0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return run_count

    def wait(self, future: Future[Any]) -> Any:
        """Wait for a future and return its result. In an event loop, use `asyncio.wrap_future`.

        Raises:
            RunLogError: the entry could not be written.
        """
        with self._translate_errors():
            return future.result()

    def close(self) -> None:
        """Write the submitted entries and close the file. The log can be used again."""
        self._writer.close()

    # Reading

    @property
    def size_bytes(self) -> int:
        """The size of the log on disk in bytes, with its write-ahead file."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def counts(self) -> tuple[int, int]:
        """Return the number of runs and of conversations."""
        with self._open_for_reading() as connection:
            query = "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM conversations)"
            runs, conversations = connection.execute(query).fetchone()
        return runs, conversations

    def get(self, run_id: str) -> RunRecord:
        """Return one run.

        Raises:
            RunNotFoundError: there is no run with this id.
        """
        for record in self.runs(RunFilter(run_ids=[run_id])):
            return record
        newest = ", ".join(record.run_id for record in self.runs(RunFilter(newest=3)))
        raise RunNotFoundError(
            f"there is no run {run_id!r} in {self.path}",
            hint=f"The newest are {newest}." if newest else "There are no runs in it yet.",
        )

    def runs(self, selection: RunFilter | None = None) -> Iterator[RunRecord]:
        """Yield the runs, newest first."""
        condition, parameters = (selection or RunFilter()).build_sql()
        return self._select(RunRecord, f"SELECT * FROM runs {condition}", *parameters)  # noqa: S608  our own words

    def conversations(self, run_id: str, *, superseded: bool = False, with_ids: bool = True) -> Iterator[Conversation]:
        """Yield the conversations of a run by position and attempt.

        Args:
            run_id: the run.
            superseded: whether to include superseded ones.
            with_ids: whether to include token ids and log-probs, which need ten times as much memory.

        Raises:
            RunLogError: the run is larger than `tables.MAX_RUN_SIZE`, or the log cannot be read.
        """
        columns = "*" if with_ids else tables.SMALL_COLUMNS
        query = f"SELECT {columns} FROM conversations WHERE run_id = ? AND superseded <= ? ORDER BY position, id"  # noqa: S608
        records = self._select(Conversation, query, run_id, int(superseded))
        return bound_records(records, f"run {run_id} in {self.path}")

    def trace(self, run_id: str) -> Trace:
        """Return a run's conversations as a graph of calls, with what each read, its parents, and the memory after it.

        Raises:
            RunNotFoundError: there is no such run in the log.
        """
        document_bytes = self.get(run_id).document["size"]
        with self._translate_errors():
            conversations = self.conversations(run_id, with_ids=False)
            return build_trace(conversations, self.events(run_id), document_bytes=document_bytes)

    def events(self, run_id: str) -> list[LoggedEvent]:
        """Return the events of a run without a conversation (edits of memories)."""
        events = self._select(LoggedEvent, "SELECT * FROM events WHERE run_id = ? ORDER BY id", run_id)
        return list(bound_records(events, f"run {run_id} in {self.path}"))

    def rewards(self, run_id: str, *, earlier: bool = False) -> list[Reward]:
        """Return the rewards of a run and its conversations, oldest first; with `earlier` also of earlier attempts."""
        table = "rewards" if earlier else "valid_rewards"
        return list(self._select(Reward, f"SELECT * FROM {table} WHERE run_id = ? ORDER BY time, id", run_id))  # noqa: S608

    def latest_rewards(self, run_id: str) -> dict[str, float]:
        """Return the newest value of the run's own rewards, by name."""
        return dict(self.totals([run_id])[run_id].rewards)

    def totals(self, run_ids: Iterable[str]) -> dict[str, RunTotals]:
        """Return the totals of runs by id, without superseded conversations."""
        rewards: dict[str, dict[str, float]] = {run_id: {} for run_id in run_ids}
        totals = {run_id: RunTotals(rewards=values) for run_id, values in rewards.items()}
        parameters = (json.dumps(list(rewards)),)
        with self._open_for_reading() as connection:
            for run_id, name, value in connection.execute(
                "SELECT run_id, name, value FROM valid_rewards "
                "WHERE run_id IN (SELECT value FROM json_each(?)) AND conversation IS NULL ORDER BY time, id",
                parameters,
            ):
                rewards[run_id][name] = value
            for run_id, *counts in connection.execute(
                "SELECT run_id, count(*), sum(prompt_tokens), sum(completion_tokens), "
                "sum(prompt_token_ids IS NOT NULL AND token_ids IS NOT NULL AND logprobs IS NOT NULL) "
                "FROM conversations WHERE run_id IN (SELECT value FROM json_each(?)) AND superseded = 0 "
                "GROUP BY run_id",
                parameters,
            ):
                totals[run_id] = RunTotals(rewards[run_id], *counts)
        return totals

    def templates(self, run_id: str) -> dict[str, dict[str, str]]:
        """Return the wording of a run's prompts, by fingerprint."""
        query = (
            "SELECT hash, content FROM templates "
            "WHERE hash IN (SELECT template FROM conversations WHERE run_id = ?) ORDER BY hash"
        )
        with self._open_for_reading() as connection:
            return {row["hash"]: json.loads(row["content"]) for row in connection.execute(query, (run_id,))}

    # Internals

    def _redact_text(self, kind: TextKind, text: str | None) -> str | None:
        return text if self._redact is None or text is None else self._redact(kind, text)

    def _redact_conversation(self, conversation: Conversation, prompt_texts: Sequence[str]) -> Conversation:
        text = self._redact_text(TextKind.COMPLETION, conversation.text)
        if any(self._redact_text(TextKind.PROMPT, prompt) != prompt for prompt in prompt_texts):
            conversation = replace(conversation, prompt_token_ids=None)
        if text != conversation.text:
            conversation = replace(conversation, token_ids=None, logprobs=None)
        return replace(conversation, text=text, memory=self._redact_text(TextKind.MEMORY, conversation.memory))

    def _select(self, record_class: type[Record], query: str, *parameters: Any) -> Iterator[Record]:
        with self._open_for_reading() as connection:
            for row in connection.execute(query, parameters):
                yield unpack_row(record_class, row)

    @contextmanager
    def _open_for_reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a new connection for reading."""
        with self._translate_errors(), closing(connect(self.path, read_only=True)) as connection:
            yield connection

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise make_log_error(self.path, error) from error


def make_log_error(path: Path, error: BaseException) -> RunLogError:
    """Return the `RunLogError` for a database error, with a hint."""
    reason = str(error)
    if isinstance(error, OverflowError | UnicodeEncodeError):  # of sqlite3, for values that SQLite cannot store
        return RunLogError(
            f"{path} cannot store a value: {reason}",
            hint="Integers must have at most 64 bits, and text must be valid Unicode, without half surrogate pairs.",
        )
    if isinstance(error, MovedFileError):
        hint = (
            "Put the file back before its runs continue: earlier entries are in the moved file. Do not move a log "
            "while programs use it: copy it with `memagent export`."
        )
    elif isinstance(error, UnknownSchemaError):
        hint = "Choose another file with --log, or move this one away, and a new one is created."
    elif "locked" in reason or "busy" in reason:
        hint = "Close the program that uses it, choose another file with --log, or read with --no-log."
    elif "full" in reason:
        hint = (
            "Free disk space, delete old runs (`memagent runs --until 2w --delete`), or choose a file on another disk "
            "with --log."
        )
    elif (
        isinstance(error, ValueError | TypeError | RecursionError)
        or "not a database" in reason
        or "malformed" in reason
    ):
        hint = "Restore it from a copy, or move it away, and a new one is created. --log chooses another file."
    else:
        hint = "Choose another file with --log, or read without a log (--no-log)."
    return RunLogError(f"{path} cannot be used as a run log: {reason}", hint=hint)
