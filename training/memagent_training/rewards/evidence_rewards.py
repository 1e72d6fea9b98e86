"""Rewards for using the right chunks, for correct decisions of a gate, and for ending a read in time.

The gold evidence of a run is texts in its document (`Gold.evidence`). An evidence chunk is one that contains a
part of such a text; every occurrence counts. `memagent_graph.provenance` traces what the policy wrote back to chunks,
without asking the policy. If no evidence is known, the document is not kept, or a text is not in it, the reward is
unknown, and `why_unknown` says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from memagent_graph.calls import Span, Writes
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.provenance.evidence import find_quoted_chunks
from memagent_graph.run_log import Outcome
from memagent_graph.timeline.view import make_chunk_reader
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.outcome_rewards import ExactMatch

_ByteSpans: TypeAlias = tuple[tuple[int, int], ...]
"""Where a text is in the document: a span of bytes for each occurrence."""


def compute_f2(cited: Set[int], gold: Set[int], unread: int = 0) -> float:
    """Return F2 = 5PR / (4P + R) of chunks, 0 to 1: recall counts more than precision (LongRLVR, arXiv 2603.02146).

    Args:
        cited: chunks that were used.
        gold: chunks that were read and contain evidence.
        unread: how many evidence chunks were not read.
    """
    hits = len(cited & gold)
    if not hits:
        return 0.0
    precision, recall = hits / len(cited), hits / (len(gold) + unread)
    return 5 * precision * recall / (4 * precision + recall)


class _EvidenceReward:
    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        evidence = _find_gold_spans(run)
        return evidence if isinstance(evidence, str) else "a text was redacted away"


class EvidenceF2(_EvidenceReward):
    """F2 of the chunks that the final memory is based on, compared with the chunks that contain the gold evidence."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 0 to 1; None if unknown."""
        gold, sources = _find_gold_chunks(run), _find_source_chunks(run)
        if gold is None or sources is None:
            return None
        return compute_f2(frozenset().union(*(sources[update] for update in run.trace.final_sources)), *gold)


class EvidenceF2Gain(_EvidenceReward):
    """The change of that F2 by an update of its branch's memory; 0 if no memory is written.

    If a chunk was processed in several steps, the last one that wrote the memory gets it.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return -1 to 1 for each conversation; None if unknown."""
        gold, sources = _find_gold_chunks(run), _find_source_chunks(run)
        if gold is None or sources is None:
            return None
        trace, gains = run.trace, dict[str, float]()
        last_calls = {trace.update_indices[call.id]: call.id for call in trace.calls if call.writes is Writes.MEMORY}
        for update, call_id in last_calls.items():
            before = frozenset[int]().union(
                *(sources[former] for former in trace.continued_indices(trace.updates[update]))
            )
            gains[call_id] = compute_f2(sources[update], *gold) - compute_f2(before, *gold)
        return [
            gains.get(conversation.call_id, 0.0) * (conversation.outcome is not Outcome.DISCARDED)
            for conversation in run.conversations_K
        ]


class GateRight(_EvidenceReward):
    """1 if memory was rewritten at a chunk with evidence, or kept at one without; otherwise 0.

    A refused reply decides nothing and gets 0; so does a step that reads no chunk or writes no memory.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return 1 or 0 for each conversation; None if unknown."""
        evidence = _find_gold_spans(run)
        if isinstance(evidence, str):
            return None
        spans = list(chain.from_iterable(evidence))
        return [
            float(
                conversation.writes is Writes.MEMORY
                and conversation.span is not None
                and conversation.outcome is not Outcome.DISCARDED
                and not any(event.rule for event in conversation.events)
                and _overlaps(conversation.span, spans) == (conversation.outcome is Outcome.ACCEPTED)
            )
            for conversation in run.conversations_K
        ]


class ExitInTime(_EvidenceReward):
    """1 for a read that ended with the chunk that completes the evidence, -1 for one that ended before it.

    Ending later costs the share of the rest that was read, so that a read of the whole document gets 0. Too early costs
    more than too late: without the evidence there is no answer. For a text in several places the first one counts. Only
    a run with an answer ended by itself, and only a run without branches has one end.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return -1 to 1; None if unknown."""
        evidence = _find_gold_spans(run)
        if isinstance(evidence, str) or self._explain_endless(run):
            return None
        ends = [span.end_byte for conversation in run.conversations_K for span in conversation.reads]
        complete, read = max(min(spans)[1] for spans in evidence), max(ends, default=0)
        if read < complete:
            return -1.0
        assert run.store is not None  # noqa: S101  evidence was found in it
        in_time, size = min(end for end in ends if end >= complete), run.record.document["size"]
        return 1 - (read - in_time) / (size - in_time) if read > in_time else 1.0

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        evidence = _find_gold_spans(run)
        return evidence if isinstance(evidence, str) else self._explain_endless(run)

    @staticmethod
    def _explain_endless(run: TrainingRun) -> str:
        """Return why a read has no single end of its own; empty if it has one."""
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

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        if EvidenceF2()(run) is None:
            return EvidenceF2().why_unknown(run)
        return "it has no answer" if run.answer is None or run.raw_answer is None else "no gold answer is known"


def _find_gold_spans(run: TrainingRun) -> tuple[_ByteSpans, ...] | str:
    """Return where each gold text is in the document, or why that is unknown."""
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
    """Return the chunks that were read and contain evidence, and how many texts begin after the part that was read.

    How the rest would have been cut is unknown, so each text there counts as one chunk.
    """
    evidence = _find_gold_spans(run)
    if isinstance(evidence, str):
        return None
    # A passage that was looked up has its chunk's index; both count.
    read = [span for conversation in run.conversations_K for span in conversation.reads]
    gold = list(chain.from_iterable(evidence))
    unread = sum(not any(_overlaps(span, (text_span,)) for span in read) for text_span in gold)
    return frozenset(span.index for span in read if _overlaps(span, gold)), unread


def _find_source_chunks(run: TrainingRun) -> list[frozenset[int]] | None:
    """Return the chunks that each memory is based on, by update; None if one was redacted."""
    if run.store is None or any(after is None for _, after in run.memories_before_and_after):
        return None
    return find_quoted_chunks(run.trace, make_chunk_reader(run.store, run.record.document, run.trace))


def _overlaps(span: Span, byte_spans: Iterable[tuple[int, int]]) -> bool:
    return any(start < span.end_byte and span.start_byte < end for start, end in byte_spans)


@lru_cache(maxsize=64)
def _find_evidence(root: Path, key: str, size: int, evidence: tuple[str, ...]) -> tuple[_ByteSpans, ...] | str:
    """Return where each text is in a stored document; if one is not in it, which."""
    content = DocumentStore(root).read_bytes(DocumentRef(key=key, name="", size=size, media_type="text/plain"), 0, size)
    spans_of_texts = []
    for text in evidence:
        pattern = re.escape(text.encode())
        spans = tuple(match.span() for match in re.finditer(pattern, content)) if text else ()
        if not spans:
            return f"the gold evidence {text[:40]!r} is not in the document"
        spans_of_texts.append(spans)
    return tuple(spans_of_texts)
