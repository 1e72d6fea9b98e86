"""Where a wrong answer's facts were lost, from the memories that the run log keeps: written, kept, cut, or not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from memagent_graph.documents import DocumentStore
from memagent_graph.evaluation.samples import Needle, Sample
from memagent_graph.evaluation.scorers import contains
from memagent_graph.policy import strip_reasoning
from memagent_graph.results import EventKind, MemoryUpdate, UpdateRule
from memagent_graph.run_log import ConversationKind, RunLog
from memagent_graph.timeline import RunView
from memagent_graph.timeline.sources import view_of_run

_CUT: Final = frozenset({EventKind.TRUNCATED, EventKind.OVERLONG})


class Loss(StrEnum):
    """What became of one fact in a read whose answer is wrong."""

    NEVER_WRITTEN = "never_written"
    """No memory held it, from the first chunk to the last."""
    OVERWRITTEN = "overwritten"
    """A memory held it, and a later one did not, though there was room to write."""
    CUT_BY_CAP = "cut_by_cap"
    """The memory that lost it, or that was to hold it first, came to the end of its budget and was cut off there."""
    NOT_TAKEN = "not_taken"
    """The policy wrote it, and a rule for updates kept the memory before that in its place."""
    IN_MEMORY = "in_memory_but_answered_wrong"
    """The last memory held it, and the answer does not."""
    ANSWERED = "answered"
    """The answer holds it: another fact, or something that the answer holds besides, made it wrong."""
    NOT_APPLICABLE = "not_applicable"
    """The read did not come to its end, or left no memories in the log."""


@dataclass(frozen=True, slots=True)
class NeedleLoss:
    """What became of one needle."""

    needle: Needle
    loss: Loss
    chunk_index: int | None = None
    """The chunk whose memory lost it; for `IN_MEMORY` and `ANSWERED` None."""
    written_at: int | None = None
    """The chunk whose memory held it first."""


def analyse(sample: Sample, run: RunView, completions: Mapping[int, str] | None = None) -> tuple[NeedleLoss, ...]:
    """What became of each of a sample's needles, in their order; empty where it has none.

    Args:
        sample: the question.
        run: the read, from the log (`view_of_run`) or from a result (`ReadResult.view`).
        completions: what the policy wrote at each chunk before it was cut to the memory's budget, where that is known.
    """
    if run.stop_reason not in {"answered", "no_answer"} or not run.updates:
        return tuple(NeedleLoss(needle, Loss.NOT_APPLICABLE) for needle in sample.needles)
    said = strip_reasoning(run.raw_answer) if run.raw_answer is not None else run.answer
    return tuple(_analyse(needle, run.updates, said or "", completions or {}) for needle in sample.needles)


def logged_read(log: RunLog, run_id: str, store: DocumentStore) -> tuple[RunView, Mapping[int, str]]:
    """A run of a log, with what the policy wrote at each chunk: what `analyse` takes. Blocks.

    Raises:
        RunLogError: the log cannot be read.
        RunNotFoundError: it holds no such run.
    """
    completions = {
        each.position: strip_reasoning(each.text)
        for each in log.conversations(run_id)
        if each.kind is ConversationKind.UPDATE and each.text
    }
    return view_of_run(log, run_id, store), completions


def _analyse(needle: Needle, updates: Sequence[MemoryUpdate], said: str, completions: Mapping[int, str]) -> NeedleLoss:
    held = _held(needle.gold, updates)
    first = updates[held.index(True)].chunk_index if any(held) else None
    if contains(said, needle.gold):
        return NeedleLoss(needle, Loss.ANSWERED, written_at=first)
    if first is None:
        for update in updates:
            if contains(completions.get(update.chunk_index, ""), needle.gold):
                kept = any(event.rule is UpdateRule.KEEP_PREVIOUS for event in update.events)
                return NeedleLoss(needle, Loss.NOT_TAKEN if kept else Loss.CUT_BY_CAP, update.chunk_index)
        return NeedleLoss(needle, Loss.NEVER_WRITTEN)
    if held[-1]:
        return NeedleLoss(needle, Loss.IN_MEMORY, written_at=first)
    losing = updates[len(held) - held[::-1].index(True)]
    cut = any(event.kind in _CUT for event in losing.events)
    return NeedleLoss(needle, Loss.CUT_BY_CAP if cut else Loss.OVERWRITTEN, losing.chunk_index, first)


def _held(gold: str, updates: Sequence[MemoryUpdate]) -> list[bool]:
    """For each memory, whether it holds the gold string."""
    held: list[bool] = []
    for update in updates:
        held.append(contains(update.memory, gold) if update.changed or not held else held[-1])
    return held
