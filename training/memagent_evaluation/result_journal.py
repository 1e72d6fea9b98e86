"""An evaluation while it runs: a line per row in a file that survives any crash.

    FOLDER/journal.jsonl      a line of settings, lines for the plan, then a line per row in order of completion

The journal is authoritative. A row is in it when its question is answered, and a question without a row is asked again;
so a killed evaluation continues where it was. It can also grow: more questions, lengths, tasks and systems may be
added, as long as the settings that determine a row stay the same.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from memagent_evaluation.result_table import (
    FORMAT,
    FORMAT_VERSION,
    TABLE,
    Plan,
    Results,
    Row,
    fingerprint,
    read_table,
    require_same,
    table_of,
)
from memagent_evaluation.written_files import writing, written_whole
from memagent_graph.errors import EvaluationError
from memagent_graph.storage.file_locks import locked

JOURNAL: Final = "journal.jsonl"
_SYNC_SECONDS: Final = 1.0
"""How much work a power failure may cost; a killed process loses nothing that it wrote."""


class Journal:
    """The rows of one evaluation, in order of completion; see `open_journal`. Close it.

    Only one process at a time may have it open.
    """

    def __init__(self, path: Path, file: IO[bytes], content: _Content) -> None:
        self.path = path
        self.settings = content.settings
        self.evaluation = content.evaluation
        self.plans = content.plans
        self.commands = content.commands
        self.rows = {row.key: row for row in content.rows}
        self._file = file
        self._synced = time.monotonic()

    def plan(self, plan: Plan) -> None:
        """Add the new parts of a plan.

        Raises:
            EvaluationError: a task's data files, or a system, have changed since they were first used.
        """
        for what in ("data", "identities"):
            now: dict[str, str] = dict(getattr(plan, what))
            before = {name: told for each in self.plans for name, told in getattr(each, what) if name in now}
            require_same({what: now}, {what: {**now, **before}}, self.path.parent)
        if plan not in self.plans:
            self._write({"plan": asdict(plan)}, sync=True)
            self.plans = (*self.plans, plan)

    def command(self, command: str) -> None:
        """Add a command line, if it is new."""
        if command not in self.commands:
            self._write({"command": command}, sync=True)
            self.commands = (*self.commands, command)

    def add(self, row: Row) -> None:
        """Enter a row.

        Raises:
            EvaluationError: it cannot be written; the evaluation can be resumed when there is space.
        """
        self._write(asdict(row), sync=time.monotonic() - self._synced > _SYNC_SECONDS)
        self.rows[row.key] = row

    @property
    def results(self) -> Results:
        """The table so far."""
        return table_of(self.rows.values(), self.plans, self.settings, self.evaluation, self.commands)

    def close(self) -> None:
        """Write everything to disk, and let other processes write.

        Raises:
            EvaluationError: it cannot be written; the rest of an incomplete row is tried once more.
        """
        if not self._file.closed:
            with writing(self.path), self._file:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, values: Mapping[str, Any], *, sync: bool) -> None:
        with writing(self.path):
            self._file.write(_line(values))
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()


def open_journal(folder: Path, settings: Mapping[str, Any], *, resume: bool = False) -> Journal:
    """The journal of a folder: a new one, or, to resume, the existing one, without an incomplete last line.

    Raises:
        EvaluationError: the folder has results but this is not a resume, or they have other settings (the message names
            them); another process writes to it; it cannot be parsed or written.
    """
    path = folder / JOURNAL
    if not (resume and path.exists()):
        require_no_results(folder)
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "evaluation": f"{time.strftime('%y%m%d', time.gmtime())}-{secrets.token_hex(3)}",
            "fingerprint": fingerprint(settings),
            "settings": dict(settings),
        }
        # Written as a whole, so that an existing journal has its first line.
        with written_whole(path) as new:
            folder.mkdir(parents=True, exist_ok=True)
            with new.open("wb") as begun:
                begun.write(_line(header))
                begun.flush()
                os.fsync(begun.fileno())
    with writing(path), ExitStack() as stack:
        file = stack.enter_context(path.open("r+b"))
        if not locked(file):
            raise EvaluationError(
                f"another process writes to the results in {folder}",
                hint="Wait until it has ended, or name another folder (--out).",
            )
        content = _read_journal(path)
        require_same(settings, content.settings, folder)
        file.truncate(content.bytes)
        file.seek(content.bytes)
        stack.pop_all()
    return Journal(path, file, content)


def require_no_results(folder: Path) -> None:
    """Raise `EvaluationError` if a folder has results, finished or not, or files that these would replace."""
    if folder.exists() and not folder.is_dir():
        raise EvaluationError(f"{folder} is a file, not a folder", hint="Name a folder (--out).")
    if (folder / JOURNAL).exists():
        raise EvaluationError(
            f"{folder} holds the results of an evaluation",
            hint="Continue it (--resume), or name another folder (--out).",
        )
    if present := [each.name for name in _REPLACED for each in folder.glob(name)]:
        raise EvaluationError(
            f"{folder} has a file {present[0]} that does not belong to an evaluation, and would be replaced",
            hint="Name another folder (--out).",
        )


_REPLACED: Final = (TABLE, "report.md", "standings.*", "*.png", "*.svg")
"""What an evaluation writes next to its journal; see `output_folder`."""


def load_results(path: Path) -> Results:
    """The results of a folder, finished or not, or those of a Parquet file.

    Raises:
        EvaluationError: there are none, or they cannot be parsed.
    """
    if (path / JOURNAL).exists():
        content = _read_journal(path / JOURNAL)
        return table_of(content.rows, content.plans, content.settings, content.evaluation, content.commands)
    table = path / TABLE if path.is_dir() else path
    if not table.is_file():
        raise EvaluationError(f"there are no results in {path}", hint="Name a folder that `memagent eval` wrote to.")
    return read_table(table)


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a journal, and how many of its bytes are complete lines."""

    settings: Mapping[str, Any]
    evaluation: str
    plans: tuple[Plan, ...]
    commands: tuple[str, ...]
    rows: tuple[Row, ...]
    bytes: int


def _read_journal(path: Path) -> _Content:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvaluationError(
            f"{path} cannot be read: {error.strerror}", hint="Name a folder that `memagent eval` wrote to."
        ) from error
    whole = data.rfind(b"\n") + 1
    plans: list[Plan] = []
    commands: list[str] = []
    rows: list[Row] = []
    header: dict[str, Any] = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            values = json.loads(line)
            if number == 1:
                header = _checked(values, path)
            elif "plan" in values:
                plans.append(msgspec.convert(values["plan"], Plan))
            elif "command" in values:
                commands.append(str(values["command"]))
            else:
                rows.append(msgspec.convert(values, Row))
        except (ValueError, TypeError, KeyError, msgspec.ValidationError) as error:
            raise EvaluationError(
                f"line {number} of {path} cannot be understood: {error}",
                hint="Delete that line, and its question is asked again; or name another folder (--out).",
            ) from error
    if not header:
        raise EvaluationError(f"{path} is empty", hint="Delete it, and start again.")
    return _Content(header["settings"], header["evaluation"], tuple(plans), tuple(commands), tuple(rows), whole)


def _checked(header: dict[str, Any], path: Path) -> dict[str, Any]:
    if header.get("format") != FORMAT:
        raise EvaluationError(f"{path} is not the journal of an evaluation", hint="Name another folder.")
    if header["version"] > FORMAT_VERSION:
        raise EvaluationError(
            f"{path} was written by a newer version of memagent-graph", hint="Install that version: pip install -U."
        )
    return header


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"
