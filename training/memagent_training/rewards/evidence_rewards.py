"""Rewards for resting on the right chunks, for a gate that is right, and for ending a read in time.

The gold evidence of a run is texts that stand in its document (`Gold.evidence`). Its chunks are those that hold a part
of such a text; a text that stands in several places is evidence in each. What the policy wrote is followed to chunks by
`memagent_graph.provenance`, so nothing is asked of it for that. Where no evidence is known, the document is not kept,
or a text does not stand in it, the reward is unknown, and says so (`why_unknown`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.provenance.evidence import chunks_behind
from memagent_graph.run_log import Outcome
from memagent_graph.timeline.run_views import chunk_reader
from memagent_graph.trace import Span, Writes
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import ExactMatch

_Places: TypeAlias = tuple[tuple[int, int], ...]
"""From which to which byte of the document a text stands, wherever it does."""


def f2(cited: Set[int], gold: Set[int], unread: int = 0) -> float:
    """F2 = 5PR / (4P + R) of chunks, which counts recall more than precision (LongRLVR, arXiv 2603.02146). 0 to 1.

    Args:
        cited: Chunks that something rests on.
        gold: Chunks that were read and hold evidence.
        unread: How many more there are.
    """
    hits = len(cited & gold)
    if not hits:
        return 0.0
    precision, recall = hits / len(cited), hits / (len(gold) + unread)
    return 5 * precision * recall / (4 * precision + recall)


@dataclass(frozen=True, slots=True)
class _OfEvidence:
    gold: GoldAnswers | None = None
    """Where to find the gold evidence; the run's own without it."""

    def why_unknown(self, run: TrainingRun, /) -> str:
        """What is missing."""
        found = self._evidence(run)
        return found if isinstance(found, str) else "a text was redacted away"

    def _evidence(self, run: TrainingRun) -> tuple[_Places, ...] | str:
        """Where each gold text stands, or why that is not known."""
        gold = run.gold if self.gold is None else self.gold.gold_of(run)
        if gold is None or not gold.evidence:
            return "no gold evidence is known"
        if run.store is None:
            return "its document is not kept"
        try:
            document = run.store.resolve(run.record.document)
            size = run.store.stored_bytes(document)
            return _evidence_in(run.store.root, document["key"], size, gold.evidence)
        except (DocumentError, OSError):
            return "its document is not kept"

    def _gold_chunks(self, run: TrainingRun) -> tuple[frozenset[int], int] | None:
        """The chunks that were read and hold evidence, and how many texts begin behind what was read.

        How the rest would have been cut is not known, so each text there counts as a chunk of its own.
        """
        evidence = self._evidence(run)
        if isinstance(evidence, str):
            return None
        read = {span.index: span for each in run.conversations_K for span in each.reads}.values()
        places = [place for each in evidence for place in each]
        unread = sum(not any(_holds(span, (place,)) for span in read) for place in places)
        return frozenset(span.index for span in read if _holds(span, places)), unread


@dataclass(frozen=True, slots=True)
class EvidenceF2(_OfEvidence):
    """F2 of the chunks that the final memory rests on, against those that hold the gold evidence."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 1; None where it is not known."""
        gold, behind = self._gold_chunks(run), _behind(run)
        if gold is None or behind is None:
            return None
        return f2(frozenset().union(*(behind[place] for place in run.trace.final_sources)), *gold)


@dataclass(frozen=True, slots=True)
class EvidenceF2Gain(_OfEvidence):
    """By how much an update changed that F2 of its branch's memory; 0 for what writes no memory.

    Where a chunk was asked about in several steps, the last that wrote the memory has it.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """-1 to 1 for each; None where it is not known."""
        gold, behind = self._gold_chunks(run), _behind(run)
        if gold is None or behind is None:
            return None
        trace, gains = run.trace, dict[str, float]()
        writers = {trace.place(step.id): step.id for step in trace.steps if step.writes is Writes.MEMORY}
        for place, step in writers.items():
            before = frozenset[int]().union(*(behind[each] for each in trace.continued(trace.updates[place])))
            gains[step] = f2(behind[place], *gold) - f2(before, *gold)
        kept = [each.outcome is not Outcome.DISCARDED for each in run.conversations_K]
        return [gains.get(each.step, 0.0) * is_kept for each, is_kept in zip(run.conversations_K, kept, strict=True)]


@dataclass(frozen=True, slots=True)
class GateRight(_OfEvidence):
    """1 where memory was rewritten at a chunk that holds evidence, or stayed at one that holds none; otherwise 0.

    A reply that was refused decided nothing, and earns 0; so does what reads no chunk or writes no memory.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """1 or 0 for each; None where it is not known."""
        evidence = self._evidence(run)
        if isinstance(evidence, str):
            return None
        places = [place for each in evidence for place in each]
        return [
            float(
                each.writes is Writes.MEMORY
                and each.span is not None
                and each.outcome is not Outcome.DISCARDED
                and not any(event.rule for event in each.events)
                and _holds(each.span, places) == (each.outcome is Outcome.ACCEPTED)
            )
            for each in run.conversations_K
        ]


@dataclass(frozen=True, slots=True)
class ExitInTime(_OfEvidence):
    """1 for a read that ended with the chunk that completes the evidence, -1 for one that ended before it.

    Ending later costs the share of the rest that was read, so that a read of the whole document earns 0. Too early
    costs more than too late: what was not read cannot be answered. Of a text in several places the first counts.
    Only a run that came to its answer ended by itself, and only one that reads in one line has an end.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """-1 to 1; None where it is not known."""
        evidence = self._evidence(run)
        if isinstance(evidence, str) or self._without_end(run):
            return None
        ends = [span.end_byte for each in run.conversations_K for span in each.reads]
        complete, read = max(min(each)[1] for each in evidence), max(ends, default=0)
        if read < complete:
            return -1.0
        assert run.store is not None  # noqa: S101  evidence was found in it
        in_time, size = min(end for end in ends if end >= complete), run.store.stored_bytes(run.record.document)
        return 1 - (read - in_time) / (size - in_time) if read > in_time else 1.0

    def why_unknown(self, run: TrainingRun, /) -> str:
        """What is missing."""
        evidence = self._evidence(run)
        return evidence if isinstance(evidence, str) else self._without_end(run)

    @staticmethod
    def _without_end(run: TrainingRun) -> str:
        if all(each.writes is not Writes.ANSWER for each in run.conversations_K):
            return "it did not come to an answer"
        several = len({each.branch for each in run.conversations_K if each.reads}) > 1
        return "it was read in several lines, which have no one end" if several else ""


@dataclass(frozen=True, slots=True)
class LongRLVR(_OfEvidence):
    """R = acc + 0.1 F2 + 0.9 acc F2, with exact match for acc and `EvidenceF2` for F2 (arXiv 2603.02146)."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 2; None where one of the two is not known."""
        right, grounded = ExactMatch(self.gold)(run), EvidenceF2(self.gold)(run)
        if right is None or grounded is None:
            return None
        return right + 0.1 * grounded + 0.9 * right * grounded

    def why_unknown(self, run: TrainingRun, /) -> str:
        """What is missing."""
        grounded = EvidenceF2(self.gold)
        if grounded(run) is None:
            return grounded.why_unknown(run)
        return "it has no answer" if run.answer is None or run.raw_answer is None else "no gold answer is known"


def _behind(run: TrainingRun) -> list[frozenset[int]] | None:
    """The chunks that each memory rests on, by update; None where one was redacted away."""
    if run.store is None or any(after is None for _, after in run.memories_around):
        return None
    return chunks_behind(run.trace, chunk_reader(run.store, run.record.document, run.trace))


def _holds(span: Span, places: _Places | list[tuple[int, int]]) -> bool:
    return any(start < span.end_byte and span.start_byte < end for start, end in places)


@lru_cache(maxsize=64)
def _evidence_in(root: Path, key: str, size: int, evidence: tuple[str, ...]) -> tuple[_Places, ...] | str:
    """Where each text stands in a document of a store; of one that does not, that."""
    text = DocumentStore(root).read_bytes(DocumentRef(key=key, name="", size=size, media_type="text/plain"), 0, size)
    found = []
    for each in evidence:
        wanted, places = each.encode(), list[tuple[int, int]]()
        at = text.find(wanted) if wanted else -1
        while at >= 0:
            places.append((at, at + len(wanted)))
            at = text.find(wanted, at + len(wanted))
        if not places:
            return f"the gold evidence {each[:40]!r} does not stand in the document"
        found.append(tuple(places))
    return tuple(found)
