"""Logged runs for reward functions and replay, read one at a time from a run log or an export of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

from memagent_evaluation.samples import Metric
from memagent_graph.documents import DocumentStore, find_store
from memagent_graph.run_log import Conversation, LoggedEvent, Outcome, Reward, RunFilter, RunLog
from memagent_graph.run_log.exchange import is_sqlite_file, parquet
from memagent_graph.run_log.records import RunRecord, build_trace
from memagent_graph.storage.bounded_files import open_regular_file
from memagent_graph.trace import Trace, Writes
from memagent_training.training_errors import ReplayError


@dataclass(frozen=True, slots=True)
class Gold:
    """The correct answers of a run."""

    answers: tuple[str, ...]
    metric: Metric | None = None
    """Whether all answers are required, or they are wordings of one answer; None if unknown."""
    own_score: Callable[[str], float] | None = None
    """Scores an answer from 0 to 1, by the task's own rule."""
    evidence: tuple[str, ...] | None = None
    """The texts that the answer is based on, each exactly as in the document; None if unknown."""


@dataclass(frozen=True)
class TrainingRun:
    """A logged run, without conversations that a resume or an edit superseded."""

    record: RunRecord
    conversations_K: tuple[Conversation, ...]
    """The conversations in the order of position and attempt. Their token ids and log-probs are arrays."""
    events: tuple[LoggedEvent, ...] = ()
    """Events that belong to no conversation."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of the run and of its conversations (which they name by `id`), oldest first."""
    gold: Gold | None = None
    """The correct answers, if the caller knows them; logs do not have them."""
    store: DocumentStore | None = None
    """The store with the document's text, if it is kept."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.record.run_id

    @property
    def question(self) -> str:
        """The question."""
        return self.record.question

    @property
    def answer(self) -> str | None:
        """The answer in the requested form; "" if the policy gave none, None if it is not in the log."""
        if self.record.answer is None and self.record.stop_reason == "no_answer":
            return ""
        return self.record.answer

    @property
    def raw_answer(self) -> str | None:
        """The complete answer completion, including reasoning; None if the run has none or it was redacted."""
        answers = [conversation.text for conversation in self.conversations_K if conversation.writes is Writes.ANSWER]
        return answers[-1] if answers else None

    @cached_property
    def trace(self) -> Trace:
        """The run as a graph of calls, with edits applied."""
        return build_trace(self.conversations_K, self.events, document_bytes=self.record.document.get("size"))

    @property
    def memories(self) -> list[str | None]:
        """The memory after each conversation, on its branch; None if it was redacted."""
        return [memory for _, memory in self.memories_before_and_after]

    @property
    def memories_before_and_after(self) -> list[tuple[str | None, str | None]]:
        """The memory before and after each conversation, on its branch; None if it was redacted.

        A discarded attempt leaves the memory unchanged. The first update of a branch has an empty memory before it,
        even if its parents have one: otherwise a branch that adds nothing would seem to have lost their memory.
        """
        trace = self.trace
        is_redacted: dict[str, bool] = {}
        memories_by_call: dict[str, tuple[str | None, str | None]] = {}
        for call in trace.calls:
            is_parent_redacted = any(is_redacted.get(parent, False) for parent in call.parents)
            is_redacted[call.id] = call.text is None if call.writes is Writes.MEMORY else is_parent_redacted
            memory_before = None if is_parent_redacted else trace.memory_before(call.id)
            if call.branch and call.writes is Writes.MEMORY:
                update = trace.updates[trace.update_indices[call.id]]
                memory_before = memory_before if trace.continued_indices(update) else ""
            memories_by_call[call.id] = memory_before, None if is_redacted[call.id] else trace.memory_after(call.id)
        memories_K = []
        for conversation in self.conversations_K:
            memory_before, memory_after = memories_by_call.get(conversation.call_id, ("", ""))
            is_discarded = conversation.outcome is Outcome.DISCARDED
            memories_K.append((memory_before, memory_before if is_discarded else memory_after))
        return memories_K

    def without_discarded(self) -> TrainingRun:
        """Return the same run without discarded attempts."""
        return replace(
            self,
            conversations_K=tuple(
                conversation for conversation in self.conversations_K if conversation.outcome is not Outcome.DISCARDED
            ),
        )

    @property
    def sampled_mask(self) -> list[bool]:
        """Whether each conversation was sampled: false at temperature 0, unless the first one was at 0 too.

        Greedy conversations are not trained on.
        """
        temperatures = [conversation.sampling.get("temperature", 1.0) for conversation in self.conversations_K]
        return [bool(temperature) or not temperatures[0] for temperature in temperatures]

    @property
    def sampled_conversations(self) -> tuple[Conversation, ...]:
        """The conversations that can be trained on."""
        return tuple(compress(self.conversations_K, self.sampled_mask))


def read_runs(source: RunLog | Path | str, run_filter: RunFilter | None = None) -> Iterator[TrainingRun]:
    """Yield the runs of a run log, or of a file that `memagent export` wrote, oldest first.

    An export is read directly. Only one run at a time is in memory.

    Args:
        source: the log or its path, or the path of an export.
        run_filter: selects runs of a log.

    Raises:
        ReplayError: there is no such file, or `run_filter` was given for an export.
        RunLogError: the log cannot be read, or the file is neither a log nor an undamaged export, or was shuffled.
        MissingExtraError: the source is an export, and the extra `export` is not installed.
    """
    if isinstance(source, RunLog):
        yield from _read_log(source, run_filter)
        return
    path = Path(source)
    if is_sqlite_file(path):
        with closing(RunLog(path)) as log:
            yield from _read_log(log, run_filter)
        return
    try:
        with open_regular_file(path) as file:
            if run_filter is not None:
                raise ReplayError(
                    f"{path} is an export, and runs of an export cannot be chosen",
                    hint="Choose them when exporting, or pass the log.",
                )
            for run in parquet.read(path, file):
                yield _make_training_run(path, run.record, run.conversations, run.events, run.rewards)
    except OSError as error:
        raise ReplayError(
            f"{path} cannot be read: {error.strerror or error}", hint="Give a run log, or an export of one."
        ) from error


def read_run(log: RunLog, run_id: str) -> TrainingRun:
    """Return one run of a log.

    Raises:
        RunNotFoundError: there is no such run.
        RunLogError: the log cannot be read.
    """
    return _make_training_run(
        log.path, log.get(run_id), log.conversations(run_id), log.events(run_id), log.rewards(run_id)
    )


def _read_log(log: RunLog, run_filter: RunFilter | None) -> Iterator[TrainingRun]:
    for record in list(log.runs(run_filter))[::-1]:
        yield read_run(log, record.run_id)


def _make_training_run(
    path: Path,
    record: RunRecord,
    conversations: Iterable[Conversation],
    events: Sequence[LoggedEvent],
    rewards: Sequence[Reward],
) -> TrainingRun:
    conversations_K = tuple(conversation for conversation in conversations if not conversation.superseded)
    return TrainingRun(record, conversations_K, tuple(events), tuple(rewards), store=find_store(record.document, path))
