"""Rewards for using the right chunks, for correct decisions of a gate, and for ending a read in time.

The gold evidence of a run is a list of texts in its document (`Gold.evidence`). An evidence chunk contains a part of
such a text; every occurrence counts. `memagent_graph.provenance` traces the policy's words back to chunks, without a
call of the policy. If no evidence is known, the document is not kept, or a text is not in it, the reward is unknown,
and `explain_unknown` returns why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.provenance.evidence import find_quoted_chunks
from memagent_graph.run_log import Outcome
from memagent_graph.timeline.view import make_text_reader
from memagent_graph.trace import Span, Writes
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.outcome_rewards import ExactMatch

_ByteSpans: TypeAlias = tuple[tuple[int, int], ...]
"""The byte spans of a text in the document, one for each occurrence."""


def compute_f2(cited: Set[int], gold: Set[int], unread: int = 0) -> float:
    """Return F2 = 5PR / (4P + R) of chunks, 0 to 1: recall counts more than precision (LongRLVR, arXiv 2603.02146).

    Args:
        cited: chunks that were used.
        gold: chunks that were read and contain evidence.
        unread: the number of evidence chunks that were not read.
    """
    hits = len(cited & gold)
    if not hits:
        return 0.0
    precision, recall = hits / len(cited), hits / (len(gold) + unread)
    return 5 * precision * recall / (4 * precision + recall)


class _EvidenceReward:
    def explain_unknown(self, run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        gold_spans = _find_gold_spans(run)
        return gold_spans if isinstance(gold_spans, str) else "a text was redacted away"


class EvidenceF2(_EvidenceReward):
    """F2 of the chunks that the final memory is based on, compared with the chunks that contain the gold evidence."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 0 to 1; None if unknown."""
        gold, sources = _find_gold_chunks(run), _find_source_chunks(run)
        if gold is None or sources is None:
            return None
        return compute_f2(frozenset().union(*(sources[update] for update in run.trace.final_sources)), *gold)


class EvidenceF2Gain(_EvidenceReward):
    """The change of the evidence's F2 by an update of its branch's memory; 0 for a conversation that writes no memory.

    If a chunk was processed in several steps, the last one that wrote the memory gets the reward.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return -1 to 1 for each conversation; None if unknown."""
        gold, sources = _find_gold_chunks(run), _find_source_chunks(run)
        if gold is None or sources is None:
            return None
        trace, gain_by_call = run.trace, dict[str, float]()
        last_calls = {trace.update_indices[call.id]: call.id for call in trace.calls if call.writes is Writes.MEMORY}
        for update, call_id in last_calls.items():
            chunks_before = frozenset[int]().union(
                *(sources[previous_update] for previous_update in trace.continued_indices(trace.updates[update]))
            )
            gain_by_call[call_id] = compute_f2(sources[update], *gold) - compute_f2(chunks_before, *gold)
        return [
            gain_by_call.get(conversation.call_id, 0.0) * (conversation.outcome is not Outcome.DISCARDED)
            for conversation in run.conversations_K
        ]


class GateRight(_EvidenceReward):
    """1 if the memory was rewritten at a chunk with evidence, or kept at a chunk without evidence; otherwise 0.

    A refused reply decides nothing and gets 0, as does a step that reads no chunk or writes no memory.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return 1 or 0 for each conversation; None if unknown."""
        gold_spans = _find_gold_spans(run)
        if isinstance(gold_spans, str):
            return None
        evidence_spans = list(chain.from_iterable(gold_spans))
        return [
            float(
                conversation.writes is Writes.MEMORY
                and conversation.span is not None
                and conversation.outcome is not Outcome.DISCARDED
                and not any(event.rule for event in conversation.events)
                and _overlaps(conversation.span, evidence_spans) == (conversation.outcome is Outcome.ACCEPTED)
            )
            for conversation in run.conversations_K
        ]


class ExitInTime(_EvidenceReward):
    """1 for a read that ended with the chunk that completes the evidence, -1 for one that ended before it.

    A read that ended later loses the fraction of the remaining document that it read; one that went on to the end gets
    0. Too early costs more than too late: without the evidence there is no answer. Of several occurrences of a text the
    first one counts. A run without an answer did not end its read itself, and a run with branches has no single end;
    their reward is unknown.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return -1 to 1; None if unknown."""
        gold_spans = _find_gold_spans(run)
        if isinstance(gold_spans, str) or self._explain_missing_end(run):
            return None
        ends = [span.end_byte for conversation in run.conversations_K for span in conversation.reads]
        evidence_end, read_end = max(min(spans)[1] for spans in gold_spans), max(ends, default=0)
        if read_end < evidence_end:
            return -1.0
        earliest_end, document_bytes = min(end for end in ends if end >= evidence_end), run.record.document["size"]
        return 1 - (read_end - earliest_end) / (document_bytes - earliest_end) if read_end > earliest_end else 1.0

    def explain_unknown(self, run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        gold_spans = _find_gold_spans(run)
        return gold_spans if isinstance(gold_spans, str) else self._explain_missing_end(run)

    @staticmethod
    def _explain_missing_end(run: TrainingRun) -> str:
        """Return why a read did not end itself at a single place; "" if it did."""
        if all(conversation.writes is not Writes.ANSWER for conversation in run.conversations_K):
            return "it has no answer"
        branches = {conversation.branch for conversation in run.conversations_K if conversation.reads}
        return "it was read in several branches, which have no single end" if len(branches) > 1 else ""


class LongRLVR(_EvidenceReward):
    """R = acc + 0.1 F2 + 0.9 acc F2, where acc is exact match and F2 is `EvidenceF2` (arXiv 2603.02146)."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 0 to 2; None if one of the two is unknown."""
        accuracy, grounding = ExactMatch()(run), EvidenceF2()(run)
        if accuracy is None or grounding is None:
            return None
        return accuracy + 0.1 * grounding + 0.9 * accuracy * grounding

    def explain_unknown(self, run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        if EvidenceF2()(run) is None:
            return EvidenceF2().explain_unknown(run)
        return "it has no answer" if run.answer is None or run.raw_answer is None else "no gold answer is known"


def _find_gold_spans(run: TrainingRun) -> tuple[_ByteSpans, ...] | str:
    """Return the spans of each gold text in the document, or why they are unknown."""
    if run.gold is None or not run.gold.evidence:
        return "no gold evidence is known"
    if run.store is None:
        return "its document is not kept"
    document = run.record.document
    try:
        return _find_evidence(run.store.root, document["key"], document["size"], run.gold.evidence)
    except (DocumentError, OSError):
        return "its document is not kept"


def _find_gold_chunks(run: TrainingRun) -> tuple[frozenset[int], int] | None:
    """Return the chunks that were read and contain evidence, and the number of unread occurrences of evidence texts.

    How the unread rest would have been cut is unknown, so each occurrence there counts as one chunk.
    """
    gold_spans = _find_gold_spans(run)
    if isinstance(gold_spans, str):
        return None
    # A retrieved passage has the index of its chunk; both count as read.
    read_spans = [span for conversation in run.conversations_K for span in conversation.reads]
    evidence_spans = list(chain.from_iterable(gold_spans))
    unread_count = sum(not any(_overlaps(span, (text_span,)) for span in read_spans) for text_span in evidence_spans)
    return frozenset(span.index for span in read_spans if _overlaps(span, evidence_spans)), unread_count


def _find_source_chunks(run: TrainingRun) -> list[frozenset[int]] | None:
    """Return the chunks that each memory is based on, by update; None if one was redacted."""
    if run.store is None or any(after is None for _, after in run.memories_before_and_after):
        return None
    return find_quoted_chunks(run.trace, make_text_reader(run.store, run.record.document))


def _overlaps(span: Span, byte_spans: Iterable[tuple[int, int]]) -> bool:
    return any(start < span.end_byte and span.start_byte < end for start, end in byte_spans)


@lru_cache(maxsize=64)
def _find_evidence(root: Path, key: str, size: int, evidence: tuple[str, ...]) -> tuple[_ByteSpans, ...] | str:
    """Return the spans of each text in a stored document, or a message that names a text that is not in it."""
    content = DocumentStore(root).read_bytes(DocumentRef(key=key, name="", size=size, media_type="text/plain"), 0, size)
    spans_of_texts = []
    for text in evidence:
        pattern = re.escape(text.encode())
        spans = tuple(match.span() for match in re.finditer(pattern, content)) if text else ()
        if not spans:
            return f"the gold evidence {text[:40]!r} is not in the document"
        spans_of_texts.append(spans)
    return tuple(spans_of_texts)
