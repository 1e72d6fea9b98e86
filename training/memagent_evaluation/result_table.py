"""An evaluation's results as a table: a row per question and system, stored as Parquet.

    FOLDER/results.parquet    the rows, for data frames; their settings are in the file's metadata

It is written from the journal (`result_journal`), which is authoritative while an evaluation runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from memagent_graph.errors import EvaluationError
from memagent_graph.events import StopReason
from memagent_graph.grouping import group_values
from memagent_graph.settings import iter_differences
from memagent_graph.storage.parquet_rows import load_pyarrow
from memagent_graph.storage.private_files import open_atomically

TABLE: Final = "results.parquet"
FORMAT: Final = "memagent-evaluation/1"

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class QuestionKey(NamedTuple):
    """The key of a row: one sample of one system's answer to one question."""

    system: str
    task: str
    length: int
    question_index: int
    repeat: int


class QuestionOutcome(StrEnum):
    """The outcome of an attempt. All but ANSWERED are wrong in every score, and counted separately as well."""

    ANSWERED = "answered"
    """The policy wrote an answer, which is scored."""
    NO_ANSWER = "no_answer"
    """The whole document was read, but the policy wrote no answer, or refused."""
    UNFINISHED = "unfinished"
    """A limit of the reader ended the read before the end of the document."""
    FAILED = "failed"
    """An error that the system raised: no server, a refused request, a document that cannot be read."""
    DOES_NOT_FIT = "does_not_fit"
    """The document does not fit in the context window that the system needs, and the policy was not asked. This is not
    an error; if it is the only outcome, tables print no accuracy."""

    @classmethod
    def from_stop_reason(cls, stop_reason: StopReason) -> QuestionOutcome:
        """Return the outcome for a read's stop reason."""
        if stop_reason.resumable:
            return cls.UNFINISHED
        return cls.NO_ANSWER if stop_reason is StopReason.NO_ANSWER else cls.ANSWERED


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One attempt of one system at one question: the columns of the table."""

    system: str
    task: str
    length: Int64
    unit: str
    """The unit of `length`; a value of `LengthUnit`."""
    index: Int64
    sample_id: str
    question: str
    gold: tuple[str, ...]
    answer: str | None
    """The answer in the requested form; None if there is no answer."""
    raw_answer: str | None
    outcome: QuestionOutcome
    error: str | None
    """The error, if it failed."""
    detail: str
    """A note of the system, such as how much of the document it showed."""
    strict: float
    lenient: float
    string_match: float
    token_f1: float
    """The four scores, 0 to 1."""
    run_id: str | None
    """The attempt's run in the run log, if there is one."""
    prompt_tokens: Int64
    completion_tokens: Int64
    cached_tokens: Int64
    calls: Int64
    seconds: float
    """Wall time, including the time spent waiting for a server that other attempts share."""
    flops: float | None
    """Estimated, if the model's size is known."""
    full_context_flops: float | None
    """The estimate for one call of the same model with the whole document in its context."""
    chunks: Int64
    """The number of chunks that the policy read; 0 if a system asks about an excerpt, or the attempt failed."""
    document_bytes: Int64
    needle_depths: tuple[float, ...]
    """The position of each fact that the answer is based on, as a fraction of the document, 0 to 1."""
    needles_found: tuple[bool, ...]
    """Whether the answer has each of these facts."""
    where_lost: tuple[str, ...]
    """For each needle of a wrong answer, a value of `memagent_evaluation.failures.Loss`; empty for the others."""
    lost_at: tuple[Int64 | None, ...]
    """The index of the chunk at which each was lost, if there is one."""
    attempts: Int64
    """The number of attempts: 1, or more if some failed."""
    seed: Int64
    document: str = ""
    """The document's key in the store, a digest of its text."""
    scripted: bool = False
    """Whether a script answered instead of a policy: its costs count, but its scores mean nothing."""
    turns: Int64 | None = None
    """The critical path: the minimum number of the policy's replies that had to wait for each other."""
    reached_length: Int64 | None = None
    """The length that the document reached, at most `length`, in the same unit; None if the task does not say."""
    repeat: Int64 = 0
    """The index of the answer among several samples of the same system's answers, from 0."""

    judged: float | None = None
    """A language model's grade, 0 to 1; None if there is no grade."""
    judge: str = ""
    """The name of the model that graded."""

    @property
    def key(self) -> QuestionKey:
        """The key of the row."""
        return QuestionKey(self.system, self.task, self.length, self.index, self.repeat)

    @property
    def attempt_key(self) -> tuple[str, int]:
        """The key that the row shares with one row of each other system: the question's id, and the repeat."""
        return self.sample_id, self.repeat

    @property
    def has_costs(self) -> bool:
        """Whether its tokens, calls and seconds are known: a failed attempt has none."""
        return self.outcome not in {QuestionOutcome.FAILED, QuestionOutcome.DOES_NOT_FIT}

    @property
    def cluster(self) -> str:
        """The key that rows on the same document share: their scores may be correlated."""
        return self.document or self.sample_id


@dataclass(frozen=True, slots=True)
class PlanCell:
    """A number of questions of a task at a length."""

    task: str
    length: int
    count: int


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The plan: every system answers the questions of every cell."""

    systems: tuple[str, ...]
    cells: tuple[PlanCell, ...]
    data: tuple[tuple[str, str], ...] = ()
    """For each task that reads data files, its name and a description of the files, which must not change."""
    identities: tuple[tuple[str, str], ...] = ()
    """For each system, its name and identity (`ReaderSystem.compute_identity`), and for a policy in this process
    "weights" and their version; they must not change."""
    repeats: int = 1
    """The number of times that each system is asked each question."""

    @classmethod
    def grid(
        cls, systems: Sequence[str], tasks: Sequence[str], lengths: Sequence[int], count: int, repeats: int = 1
    ) -> EvaluationPlan:
        """Return a plan with `count` questions of each task at each length."""
        cells = tuple(PlanCell(task, length, count) for task in tasks for length in lengths)
        return cls(tuple(systems), cells, repeats=repeats)

    def iter_keys(self) -> Iterator[QuestionKey]:
        """Yield the keys of its rows, the longest documents first: no long read is then left alone at the end.

        The systems' questions on one document are together, so that it does not have to be kept for long.
        """
        for length in sorted({cell.length for cell in self.cells}, reverse=True):
            cells = list(dict.fromkeys(cell for cell in self.cells if cell.length == length))
            for index in range(max(cell.count for cell in cells)):
                for cell in cells:
                    if index < cell.count:
                        for system in self.systems:
                            for repeat in range(self.repeats):
                                yield QuestionKey(system, cell.task, length, index, repeat)


@dataclass(frozen=True, slots=True)
class Results:
    """A table of results, with the settings that determined it."""

    rows: tuple[ResultRow, ...]
    """Sorted by task, length, index and system; tasks and systems keep the order of the request."""
    settings: Mapping[str, Any]
    """The settings that determined the rows: policy, tokenizer, budgets, sampling, seed, data."""
    evaluation_id: str
    """The evaluation's id, with which the ids of all its runs begin."""
    missing: int = 0
    """The number of planned rows that are missing."""
    commands: tuple[str, ...] = ()
    """The command lines."""
    requested_systems: tuple[str, ...] = ()

    @property
    def systems(self) -> tuple[str, ...]:
        """The names of the systems with rows, in the order of the request."""
        names = dict.fromkeys(row.system for row in self.rows)
        return tuple(dict.fromkeys([*(name for name in self.requested_systems if name in names), *names]))


def can_be_pooled(rows: Iterable[ResultRow]) -> bool:
    """Return whether every system was asked the same tasks at each of its lengths.

    Otherwise a mean over tasks would depend on their choice.
    """
    tasks_by_cell = group_values(((row.system, row.length), row.task) for row in rows)
    return len({frozenset(tasks) for tasks in tasks_by_cell.values()}) <= 1


def write_table(results: Results, path: Path) -> None:
    """Write the Parquet file atomically.

    Raises:
        EvaluationError: the file cannot be written.
        MissingExtraError: pyarrow is not installed.
    """
    pa = load_pyarrow("eval", "a table of results")
    columns = {
        column.name: [_to_storable(getattr(row, column.name)) for row in results.rows] for column in fields(ResultRow)
    }
    metadata = {
        "memagent.format": FORMAT,
        "memagent.evaluation": results.evaluation_id,
        "memagent.settings": json.dumps(results.settings, sort_keys=True),
    }
    schema = pa.schema(list(_list_types(pa).items()), metadata=metadata)
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(path) as file:
            pa.parquet.write_table(pa.table(columns, schema=schema), file, compression="zstd")


@contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Raise `EvaluationError` if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="Make room, or choose another folder (--out); what was written is kept, and --resume continues.",
        ) from error


def require_same(settings: Mapping[str, Any], stored_settings: Mapping[str, Any], folder: Path) -> None:
    """Check that settings equal the settings of a folder's results.

    Raises:
        EvaluationError: the settings differ; the message names every difference.
    """
    differences = [
        f"{name} is {_format(new)} and was {_format(old)}"
        for name, old, new in iter_differences(stored_settings, settings)
    ]
    if differences:
        raise EvaluationError(
            f"{folder} holds results of other settings: {'; '.join(differences)}",
            hint="Resume with the settings of the beginning, or choose another folder (--out).",
        )


def make_results(
    rows: Iterable[ResultRow],
    plans: Sequence[EvaluationPlan],
    settings: Mapping[str, Any],
    evaluation_id: str,
    commands: Sequence[str] = (),
) -> Results:
    """Return the results of rows. Of two rows for the same question, the later one counts."""
    by_key = {row.key: row for row in rows}
    keys = {key for plan in plans for key in plan.iter_keys()}
    tasks = list(dict.fromkeys(cell.task for plan in plans for cell in plan.cells))
    systems = list(dict.fromkeys(system for plan in plans for system in plan.systems))
    sorted_rows = sorted(
        by_key.values(),
        key=lambda row: (tasks.index(row.task), row.length, row.index, systems.index(row.system), row.repeat),
    )
    missing = len(keys - by_key.keys())
    return Results(tuple(sorted_rows), settings, evaluation_id, missing, tuple(commands), tuple(systems))


def _format(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _to_storable(value: Any) -> Any:
    """Return a value that Parquet can store: lone surrogates, which a policy may write, become question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _list_types(pa: Any) -> dict[str, Any]:
    arrow_types = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}

    def convert_type(python_type: Any) -> Any:
        if get_origin(python_type) is tuple:
            return pa.list_(convert_type(get_args(python_type)[0]))
        return next(
            (arrow_types[kind] for kind in (python_type, *get_args(python_type)) if kind in arrow_types), pa.string()
        )

    return {name: convert_type(python_type) for name, python_type in get_type_hints(ResultRow).items()}
