"""Finds where a wrong answer's facts were lost, from a run's trace: not written, overwritten, cut off, or not used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from memagent_evaluation.samples import Needle, Sample
from memagent_evaluation.scorers import contains
from memagent_graph.documents import DocumentStore
from memagent_graph.events import EventKind, StopReason, UpdateRule
from memagent_graph.provenance.evidence import split_memory
from memagent_graph.reasoning import extract_reply
from memagent_graph.run_log import RunLog
from memagent_graph.timeline.view import RunView, load_run_view
from memagent_graph.trace import MemoryUpdate, Trace, Writes

_CUT_EVENT_KINDS: Final = frozenset({EventKind.TRUNCATED, EventKind.OVERLONG})
_MIN_GOLD_CHARACTERS: Final = 4
"""Gold strings with fewer letters and digits would match by chance."""


class Loss(StrEnum):
    """Where a read with a wrong answer lost a fact, if it did."""

    NEVER_WRITTEN = "never_written"
    """No memory on the path to the answer had the fact."""
    NOT_READ = "not_read"
    """The read stopped early, before the chunk with the fact."""
    CUT_BY_CHUNK = "cut_by_chunk"
    """No memory had it, and the end of a chunk cut it in two, so that no chunk contained all of it."""
    OVERWRITTEN = "overwritten"
    """A memory had it, but a later one did not, although there was space for it."""
    CUT_BY_CAP = "cut_by_cap"
    """The memory was cut off at its budget in the update that lost the fact, or in the one that should have been the
    first to have it."""
    REFORMATTED = "reformatted"
    """The last memory, or the answer, has its letters and digits with other characters between them, such as "4 711
    123" for 4711123: it was kept, but its form was changed."""
    NOT_TAKEN = "not_taken"
    """The policy wrote it, but a rule for updates kept the previous memory."""
    IN_MEMORY = "in_memory_but_answered_wrong"
    """The last memory had it, but the answer does not."""
    ANSWERED = "answered"
    """The answer has it: another fact, or something else in the answer, made it wrong."""
    NOT_APPLICABLE = "not_applicable"
    """The read did not finish, or has no memories in the log."""


@dataclass(frozen=True, slots=True)
class NeedleLoss:
    """The outcome of one needle."""

    loss: Loss
    chunk_index: int | None = None
    """The chunk whose memory lost it or changed its form, or whose end cut it; None for `IN_MEMORY` and `ANSWERED`, at
    a merge, or if only the answer changed the form."""


_FINAL_STOP_REASONS: Final = frozenset(reason.value for reason in StopReason if not reason.resumable)


def find_losses(sample: Sample, run: RunView, completions: Mapping[str, str] | None = None) -> tuple[NeedleLoss, ...]:
    """Return the outcome of each needle of a sample, in order; empty if it has none.

    Args:
        sample: the question.
        run: the read, from the log (`load_run_view`) or from a result (`ReadResult.view`).
        completions: the policy's replies, before they were cut to the memory's budget, by call id; empty if unknown.
    """
    if run.stop_reason not in _FINAL_STOP_REASONS or not run.trace.updates:
        return tuple(NeedleLoss(Loss.NOT_APPLICABLE) for _ in sample.needles)
    reply = extract_reply(run.raw_answer) if run.raw_answer is not None else run.answer
    return tuple(_find_loss(needle, run, reply or "", completions or {}) for needle in sample.needles)


def read_logged_run(log: RunLog, run_id: str, store: DocumentStore) -> tuple[RunView, Mapping[str, str]]:
    """Return a run of a log, with the policy's completion of each call, for `find_losses`. Blocks.

    Raises:
        RunLogError: the log cannot be read.
        RunNotFoundError: there is no such run.
    """
    completions = {
        conversation.call_id: extract_reply(conversation.text)
        for conversation in log.conversations(run_id, with_ids=False)
        if conversation.writes is Writes.MEMORY and conversation.text
    }
    return load_run_view(log, run_id, store), completions


def _find_loss(needle: Needle, run: RunView, reply: str, completions: Mapping[str, str]) -> NeedleLoss:
    trace = run.trace
    in_memory = _find_gold_in_memories(needle.gold, trace)
    if contains(reply, needle.gold):
        return NeedleLoss(Loss.ANSWERED)
    if not any(in_memory.values()):
        return _explain_never_written(needle, run, completions)
    if _contains_any_form(trace.final_memory, needle.gold):
        updates_with_gold = [update for update in trace.final_path if in_memory[update.call_id]]
        reformatted_updates = [update for update in updates_with_gold if not contains(update.memory, needle.gold)]
        if reformatted_updates and not contains(trace.final_memory, needle.gold):
            return NeedleLoss(Loss.REFORMATTED, reformatted_updates[0].chunk_index)
        loss = Loss.REFORMATTED if _contains_reformatted(reply, needle.gold) else Loss.IN_MEMORY
        return NeedleLoss(loss)
    losing_updates = [
        update
        for update in trace.final_path
        if not in_memory[update.call_id]
        and any(in_memory[trace.updates[source].call_id] for source in trace.source_indices(update))
    ]
    loss = Loss.CUT_BY_CAP if _was_cut(losing_updates[-1]) else Loss.OVERWRITTEN
    return NeedleLoss(loss, losing_updates[-1].chunk_index)


def _find_gold_in_memories(gold: str, trace: Trace) -> dict[str, bool]:
    """Return by call id whether the memories on the path to the answer have the gold string in any form."""
    in_memory: dict[str, bool] = {}
    for update in trace.final_path:
        sources = trace.source_indices(update)
        if len(sources) == 1 and not update.changed:
            in_memory[update.call_id] = in_memory[trace.updates[sources[0]].call_id]
        else:
            in_memory[update.call_id] = _contains_any_form(update.memory, gold)
    return in_memory


def _contains_any_form(text: str, gold: str) -> bool:
    return contains(text, gold) or _contains_reformatted(text, gold)


def _contains_reformatted(text: str, gold: str) -> bool:
    """Return whether a text has the letters and digits of a gold string, with up to two other characters in between."""
    pattern = _compile_reformatted_pattern(gold)
    return pattern is not None and pattern.search(text) is not None


@lru_cache(maxsize=256)
def _compile_reformatted_pattern(gold: str) -> re.Pattern[str] | None:
    characters = [character for character in gold if character.isalnum()]
    if len(characters) < _MIN_GOLD_CHARACTERS:
        return None
    spaced_characters = r"[\W_]{0,2}".join(map(re.escape, characters))
    # Not inside a longer word or number: "4711" is not in "1,4711" or "4711.5".
    return re.compile(rf"(?<!\w)(?<!\d[.,'’]){spaced_characters}(?!\w)(?![.,'’]\d)", re.IGNORECASE)


def _explain_never_written(needle: Needle, run: RunView, completions: Mapping[str, str]) -> NeedleLoss:
    """Return why no memory has a fact, from the policy's completions and the chunk that has the fact."""
    updates = run.trace.final_path
    writing_updates = [
        update for update in updates if _contains_any_form(completions.get(update.call_id, ""), needle.gold)
    ]
    if writing_updates:
        is_refused = any(event.rule is UpdateRule.KEEP_PREVIOUS for event in writing_updates[0].events)
        return NeedleLoss(Loss.NOT_TAKEN if is_refused else Loss.CUT_BY_CAP, writing_updates[0].chunk_index)
    if (needle_chunk := next(_iter_needle_chunks(needle, run), None)) is not None:
        update, is_complete = needle_chunk
        if not is_complete:
            return NeedleLoss(Loss.CUT_BY_CHUNK, update.chunk_index)
        if any(_was_cut(candidate) for candidate in updates if candidate.chunk_index == update.chunk_index):
            return NeedleLoss(Loss.CUT_BY_CAP, update.chunk_index)
    elif run.stop_reason == StopReason.ENOUGH:
        return NeedleLoss(Loss.NOT_READ)
    return NeedleLoss(Loss.NEVER_WRITTEN)


def _was_cut(update: MemoryUpdate) -> bool:
    return any(event.kind in _CUT_EVENT_KINDS for event in update.events)


def _iter_needle_chunks(needle: Needle, run: RunView) -> Iterator[tuple[MemoryUpdate, bool]]:
    """Yield the chunks in which a fact begins, nearest to the needle first, each with whether it contains all of it."""
    # A needle may be a whole paragraph.
    sentences = [sentence for sentence in split_memory(needle.text) if contains(sentence, needle.gold)]
    fact = min(sentences, key=len, default=needle.text)
    update_by_chunk = {update.chunk_index: update for update in run.trace.final_path if update.chunk_index is not None}
    chunks = sorted(update_by_chunk.values(), key=lambda update: update.start_char)
    document_characters = max((chunk.end_char for chunk in chunks), default=0)
    position = needle.depth * document_characters
    chunk_by_start = {chunk.start_char: chunk for chunk in chunks}

    def measure_distance(chunk: MemoryUpdate) -> float:
        return max(chunk.start_char - position, position - chunk.end_char, 0.0)

    for chunk in sorted(chunks, key=measure_distance):
        text = run.chunk_text(chunk) or ""
        if fact in text:
            yield chunk, True
        elif (next_chunk := chunk_by_start.get(chunk.end_char)) is not None:
            overlap = len(fact) - 1
            if fact in text[max(0, len(text) - overlap) :] + (run.chunk_text(next_chunk) or "")[:overlap]:
                yield chunk, False
