"""Runs as JSON lines: one object per line, in UTF-8, with a `type`.

type            other keys
format          name, version; the first line
template        fingerprint, wording; before the runs that it was used in
run             the attributes of `RunRecord`
event           those of `LoggedEvent` and run_id: events of no conversation
conversation    those of `Conversation`, including its events, and the first chunk that it read (`start_char`
                and so on); `id` is its row in the log it came from
reward          those of `Reward`; `conversation` is the `id` of one
end             runs: how many there were; the last line

A run's lines are together, in this order. Log-probs that are not finite numbers are strings, because JSON has none
("-Infinity"). Half surrogate pairs are escaped, as JSON allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange.logged_run import (
    FORMAT_NAME,
    FORMAT_VERSION,
    LoggedRun,
    check_format,
    first_span,
    read_conversation,
)
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord

_Record = TypeVar("_Record")


class JsonLinesWriter:
    """Writes runs to a file, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._runs = 0
        self._templates: set[str] = set()
        self._line("format", {"name": FORMAT_NAME, "version": FORMAT_VERSION})

    def write(self, run: LoggedRun) -> None:
        """Add a run."""
        self._runs += 1
        for fingerprint, wording in (run.templates or {}).items():
            if fingerprint not in self._templates:
                self._templates.add(fingerprint)
                self._line("template", {"fingerprint": fingerprint, "wording": dict(wording)})
        self._line("run", _attributes(run.record))
        for event in run.events:
            self._line("event", {"run_id": run.record.run_id, **_attributes(event)})
        written: set[int | None] = {None}
        for conversation in run.conversations:
            written.add(conversation.id)
            values = _attributes(conversation)
            values["events"] = [_attributes(event) for event in conversation.events]
            values["reads"] = [_attributes(span) for span in conversation.reads]
            values |= first_span(conversation)
            if conversation.logprobs is not None:
                values["logprobs"] = list(map(_json_number, conversation.logprobs))
            self._line("conversation", values)
        for reward in run.rewards:
            if reward.conversation in written:
                self._line("reward", _attributes(reward))

    def close(self) -> None:
        """Write the last line; the file stays open."""
        self._line("end", {"runs": self._runs})

    def _line(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"type": kind, **values}
        try:
            data = json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            data = json.dumps(line).encode()
        self._file.write(data + b"\n")


def read(source: Path, file: IO[bytes]) -> Iterator[LoggedRun]:
    """The runs of a file, in order.

    Raises:
        RunLogError: it is not an export, is of a newer version, or is damaged; the message names the line.
    """
    return _Reader(source).read(file)


@dataclass
class _Reader:
    source: Path
    line: int = 0
    version: int = FORMAT_VERSION
    templates: dict[str, dict[str, str]] = field(default_factory=dict)
    record: RunRecord | None = None
    conversations: list[Conversation] = field(default_factory=list)
    events: list[LoggedEvent] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    def read(self, file: IO[bytes]) -> Iterator[LoggedRun]:
        lines = self._lines(file)
        kind, values = next(lines, ("", {}))
        check_format(self.source, values.get("name") if kind == "format" else None, values.get("version"))
        self.version = values["version"]
        count = 0
        for kind, values in lines:
            if kind in {"template", "run", "end"} and self.record is not None:
                yield self._finished(self.record)
            if kind == "run":
                self.record = self._made(RunRecord, values)
                count += 1
            elif kind == "template":
                template = self._made(_Template, values)
                self.templates[template.fingerprint] = template.wording
            elif kind == "end":
                if values.get("runs") != count:
                    raise self._damaged(f"{values.get('runs')} runs were written, but there are {count}")
                return
            else:
                self._add(kind, values)
        raise self._damaged("the file ends after it")

    def _add(self, kind: str, values: dict[str, Any]) -> None:
        if self.record is None or values.get("run_id") != self.record.run_id:
            raise self._damaged(f"the {kind} is before the beginning of run {values.get('run_id')!r}")
        if kind == "conversation":
            self.conversations.append(self._conversation(values))
        elif kind == "event":
            self.events.append(self._made(LoggedEvent, values))
        elif kind == "reward":
            self.rewards.append(self._made(Reward, values))
        else:
            raise self._damaged(f"the type {kind!r} is not known")

    def _finished(self, record: RunRecord) -> LoggedRun:
        known = {None, *(each.id for each in self.conversations)}
        for reward in self.rewards:
            if reward.conversation not in known:
                raise self._damaged(f"run {record.run_id!r}, before it, has no conversation {reward.conversation}")
        run = LoggedRun.read(self.version, record, self.conversations, self.events, self.rewards, self.templates)
        self.record, self.conversations, self.events, self.rewards = None, [], [], []
        return run

    def _conversation(self, values: dict[str, Any]) -> Conversation:
        with self._checked():
            if values.get("logprobs") is not None:
                values["logprobs"] = list(map(float, values["logprobs"]))
            return read_conversation(self.version, values)

    def _made(self, kind: type[_Record], values: dict[str, Any]) -> _Record:
        with self._checked():
            return msgspec.convert(values, kind)

    @contextmanager
    def _checked(self) -> Generator[None]:
        try:
            yield
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise self._damaged(str(error)) from error

    def _lines(self, file: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
        for line in file:
            self.line += 1
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._damaged(f"it is not JSON: {error}") from error
            if not isinstance(values, dict) or not isinstance(values.get("type"), str):
                raise self._damaged("it is not an object with a type")
            yield values.pop("type"), values

    def _damaged(self, words: str) -> RunLogError:
        return RunLogError(
            f"line {self.line} of {self.source} cannot be imported: {words}",
            hint="It may have been cut off or edited; export it again. The runs before it were imported.",
        )


class _Template(msgspec.Struct):
    fingerprint: str
    wording: dict[str, str]


def _attributes(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _json_number(number: float) -> float | str:
    return number if math.isfinite(number) else json.dumps(number)
