"""The rows of an evaluation while it runs: a JSON line for each, in a file that survives any crash.

    FOLDER/journal.jsonl        a line of settings, lines for the plan, then a line per row in order of completion
    runs.sqlite                 the run log, for `memagent show`, unless another one was named
    results.parquet             the same rows for data frames (`result_table`)
    report.md, *.png, *.svg     the report and its plots
    documents                   documents, if they are kept
    checkpoints.sqlite, open-documents    checkpoints and documents of unfinished reads, only until the end

The journal is authoritative. A row is written when its question is answered, and a question without a row is asked
again, so a killed evaluation continues where it stopped. An evaluation can also grow by questions, lengths, tasks and
systems, as long as the settings that determine a row stay the same.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec

from memagent_evaluation.result_table import (
    FORMAT,
    TABLE,
    EvaluationPlan,
    ResultRow,
    Results,
    make_results,
    require_same,
    translate_write_errors,
)
from memagent_graph.errors import EvaluationError
from memagent_graph.storage.journal import Journal, open_journal, read_journal

JOURNAL: Final = "journal.jsonl"
REPORT: Final = "report.md"
RUNS: Final = "runs.sqlite"
CHECKPOINTS: Final = "checkpoints.sqlite"
KEPT_DOCUMENTS: Final = "documents"
OPEN_DOCUMENTS: Final = "open-documents"
REPLACED_FILES: Final = (TABLE, REPORT, "*.png", "*.svg")
"""The files that are written from the rows at the end, in place of existing ones."""
_MAX_PLANNED_ROWS: Final = 10**7
_SYNC_INTERVAL_SECONDS: Final = 1.0
"""The longest time whose rows a power failure may lose. A killed process loses no row that it wrote."""


class _Header(TypedDict):
    """The first line of a journal."""

    format: str
    evaluation: str
    settings: dict[str, Any]


class ResultJournal:
    """The rows of one evaluation, in order of completion; see `open_results`. Close it.

    Only one process at a time may have it open.
    """

    def __init__(self, journal: Journal) -> None:
        self.path = journal.path
        self._journal = journal
        header, self.plans, self.commands, rows = _parse(journal.rows, journal.path)
        self.settings: Mapping[str, Any] = header["settings"]
        """The settings that determine a row."""
        self.evaluation_id = header["evaluation"]
        self.rows = {row.key: row for row in rows}
        self._last_sync_time = time.monotonic()

    def add_plan(self, plan: EvaluationPlan) -> None:
        """Add the new parts of a plan.

        Raises:
            EvaluationError: a task's data files, or a system, have changed since they were first used.
        """
        for field in ("data", "identities"):
            new_values: dict[str, str] = dict(getattr(plan, field))
            old_values = {
                name: text
                for earlier_plan in self.plans
                for name, text in getattr(earlier_plan, field)
                if name in new_values
            }
            require_same({field: new_values}, {field: {**new_values, **old_values}}, self.path.parent)
        if plan not in self.plans:
            self._write({"plan": asdict(plan)}, sync=True)
            self.plans = (*self.plans, plan)

    def add_command(self, command: str) -> None:
        """Add a command line, if it is new."""
        if command not in self.commands:
            self._write({"command": command}, sync=True)
            self.commands = (*self.commands, command)

    def add(self, row: ResultRow) -> None:
        """Add a row, or replace the row of the same question.

        Raises:
            EvaluationError: the row cannot be written; the evaluation can be resumed when there is space.
        """
        self._write(asdict(row), sync=time.monotonic() - self._last_sync_time > _SYNC_INTERVAL_SECONDS)
        self.rows[row.key] = row

    @property
    def results(self) -> Results:
        """The rows so far, as a table."""
        return make_results(self.rows.values(), self.plans, self.settings, self.evaluation_id, self.commands)

    def close(self) -> None:
        """Write everything to disk, and let other processes write.

        Raises:
            EvaluationError: the file cannot be written, even after a second attempt to complete the last row.
        """
        with translate_write_errors(self.path):
            self._journal.close()

    def __enter__(self) -> ResultJournal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, values: Mapping[str, Any], *, sync: bool) -> None:
        with translate_write_errors(self.path):
            self._journal.append(values, sync=sync)
        if sync:
            self._last_sync_time = time.monotonic()


def open_results(folder: Path, settings: Mapping[str, Any], *, resume: bool = False) -> ResultJournal:
    """Open the journal of a folder: a new one, or, to resume, the existing one, without an incomplete last line.

    Raises:
        EvaluationError: the folder has results but this is not a resume, or they have other settings (the message names
            them); another process writes to it; it cannot be parsed or written.
    """
    if not (resume and (folder / JOURNAL).is_file()):
        require_no_results(folder)
    with translate_write_errors(folder / JOURNAL):
        folder.mkdir(parents=True, exist_ok=True)
        journal = open_journal(folder / JOURNAL, error=EvaluationError)
        try:
            if not journal.rows:
                journal.append(
                    {
                        "format": FORMAT,
                        "evaluation": f"{time.strftime('%y%m%d', time.gmtime())}-{secrets.token_hex(3)}",
                        "settings": dict(settings),
                    }
                )
            results = ResultJournal(journal)
            require_same(settings, results.settings, folder)
        except BaseException:
            journal.close()
            raise
    return results


def require_no_results(folder: Path) -> None:
    """Raise `EvaluationError` if a folder has results, finished or not, or other files that results would replace."""
    if folder.exists() and not folder.is_dir():
        raise EvaluationError(f"{folder} is a file, not a folder", hint="Give a folder (--out).")
    if (folder / JOURNAL).exists():
        raise EvaluationError(
            f"{folder} holds the results of an evaluation",
            hint="Continue it (--resume), or choose another folder (--out).",
        )
    if existing_files := [path.name for pattern in REPLACED_FILES for path in folder.glob(pattern)]:
        raise EvaluationError(
            f"{folder} has a file {existing_files[0]} that does not belong to an evaluation, and would be replaced",
            hint="Choose another folder (--out).",
        )


def load_results(folder: Path) -> Results:
    """Return the results of a folder, finished or not.

    Raises:
        EvaluationError: there are none, or they cannot be parsed.
    """
    path = folder / JOURNAL
    if not path.is_file():
        raise EvaluationError(f"there are no results in {folder}", hint="Give a folder that `memagent eval` wrote to.")
    header, plans, commands, rows = _parse(read_journal(path, error=EvaluationError), path)
    return make_results(rows, plans, header["settings"], header["evaluation"], commands)


def _parse(
    entries: Sequence[dict[str, Any]], path: Path
) -> tuple[_Header, tuple[EvaluationPlan, ...], tuple[str, ...], list[ResultRow]]:
    """Return the header, the plans, the command lines and the rows."""
    try:
        header = msgspec.convert(entries[0] if entries else {}, _Header)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
    except ValueError as error:
        raise EvaluationError(
            f"{path} is not the journal of an evaluation by this version of memagent-graph: {error}",
            hint="Choose another folder.",
        ) from error
    plans: list[EvaluationPlan] = []
    commands: list[str] = []
    rows: list[ResultRow] = []
    planned_tasks: set[tuple[str, str]] = set()
    rows_left = _MAX_PLANNED_ROWS
    for line_number, values in enumerate(entries[1:], start=2):
        try:
            if "plan" in values:
                plans.append(plan := msgspec.convert(values["plan"], EvaluationPlan))
                rows_left -= len(plan.systems) * sum(max(cell.count, 0) for cell in plan.cells) * max(plan.repeats, 0)
                if rows_left < 0:
                    raise ValueError(f"more than {_MAX_PLANNED_ROWS:,} rows are planned")
                planned_tasks |= {(system, cell.task) for system in plan.systems for cell in plan.cells}
            elif "command" in values:
                commands.append(str(values["command"]))
            else:
                rows.append(row := msgspec.convert(values, ResultRow))
                if (row.system, row.task) not in planned_tasks:
                    raise ValueError("its system and task are in no plan above it")
        except ValueError as error:
            raise EvaluationError(
                f"line {line_number} of {path} cannot be understood: {error}",
                hint="Delete that line, and its question is asked again; or choose another folder (--out).",
            ) from error
    return header, tuple(plans), tuple(commands), rows
