"""Rewards for using the right chunks, for correct decisions of a gate, and for ending a read in time.

The gold evidence of a run is texts in its document (`Gold.evidence`). Its chunks are those that contain a part of such
a text; a text in several places is evidence in each. `memagent_graph.provenance` traces what the policy wrote back to
chunks, without asking the policy. If no evidence is known, the document is not kept, or a text is not in it, the reward
is unknown, with a reason (`why_unknown`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from memagent_graph.calls import Span, Writes
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.provenance.evidence import chunks_behind
from memagent_graph.run_log import Outcome
from memagent_graph.timeline.view import chunk_reader
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import ExactMatch

_Places: TypeAlias = tuple[tuple[int, int], ...]
"""The byte spans of a text in the document, one for each place."""


def f2(cited: Set[int], gold: Set[int], unread: int = 0) -> float:
    """F2 = 5PR / (4P + R) of chunks, which counts recall more than precision (LongRLVR, arXiv 2603.02146). 0 to 1.

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


@dataclass(frozen=True, slots=True)
class _OfEvidence:
    gold: GoldAnswers | None = None
    """Where to find the gold evidence; the run's own if left out."""

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        found = self._evidence(run)
        return found if isinstance(found, str) else "a text was redacted away"

    def _evidence(self, run: TrainingRun) -> tuple[_Places, ...] | str:
        """Return the places of each gold text, or why they are not known."""
        gold = run.gold if self.gold is None else self.gold.gold_of(run)
        if gold is None or not gold.evidence:
            return "no gold evidence is known"
        if run.store is None:
            return "its document is not kept"
        try:
            document = run.record.document
            size = document["size"]
            return _evidence_in(run.store.root, document["key"], size, gold.evidence)
        except (DocumentError, OSError):
            return "its document is not kept"

    def _gold_chunks(self, run: TrainingRun) -> tuple[frozenset[int], int] | None:
        """Return the chunks that were read and contain evidence, and how many texts begin after the part that was read.

        How the rest would have been cut is not known, so each text there counts as one chunk.
        """
        evidence = self._evidence(run)
        if isinstance(evidence, str):
            return None
        # A passage that was looked up has its chunk's index; both count.
        read = [span for each in run.conversations_K for span in each.reads]
        places = [place for each in evidence for place in each]
        unread = sum(not any(_holds(span, (place,)) for span in read) for place in places)
        return frozenset(span.index for span in read if _holds(span, places)), unread


@dataclass(frozen=True, slots=True)
class EvidenceF2(_OfEvidence):
    """F2 of the chunks that the final memory is based on, compared with those that contain the gold evidence."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 1; None if unknown."""
        gold, behind = self._gold_chunks(run), _behind(run)
        if gold is None or behind is None:
            return None
        return f2(frozenset().union(*(behind[place] for place in run.trace.final_sources)), *gold)


@dataclass(frozen=True, slots=True)
class EvidenceF2Gain(_OfEvidence):
    """The change of that F2 by an update of its branch's memory; 0 if no memory is written.

    If a chunk was processed in several steps, the last one that wrote the memory gets it.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """-1 to 1 for each; None if unknown."""
        gold, behind = self._gold_chunks(run), _behind(run)
        if gold is None or behind is None:
            return None
        trace, gains = run.trace, dict[str, float]()
        writers = {trace.place(step.id): step.id for step in trace.steps if step.writes is Writes.MEMORY}
        for place, step in writers.items():
            before = frozenset[int]().union(*(behind[each] for each in trace.continued(trace.updates[place])))
            gains[step] = f2(behind[place], *gold) - f2(before, *gold)
        return [gains.get(each.step, 0.0) * (each.outcome is not Outcome.DISCARDED) for each in run.conversations_K]


@dataclass(frozen=True, slots=True)
class GateRight(_OfEvidence):
    """1 if memory was rewritten at a chunk with evidence, or kept at one without; otherwise 0.

    A refused reply decided nothing and gets 0; so does a step that reads no chunk or writes no memory.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """1 or 0 for each; None if unknown."""
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

    Ending later costs the share of the rest that was read, so that a read of the whole document gets 0. Too early costs
    more than too late: without the evidence there is no answer. For a text in several places the first one counts. Only
    a run with an answer ended by itself, and only a run without branches has one end.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """-1 to 1; None if unknown."""
        evidence = self._evidence(run)
        if isinstance(evidence, str) or self._without_end(run):
            return None
        ends = [span.end_byte for each in run.conversations_K for span in each.reads]
        complete, read = max(min(each)[1] for each in evidence), max(ends, default=0)
        if read < complete:
            return -1.0
        assert run.store is not None  # noqa: S101  evidence was found in it
        in_time, size = min(end for end in ends if end >= complete), run.record.document["size"]
        return 1 - (read - in_time) / (size - in_time) if read > in_time else 1.0

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        evidence = self._evidence(run)
        return evidence if isinstance(evidence, str) else self._without_end(run)

    @staticmethod
    def _without_end(run: TrainingRun) -> str:
        if all(each.writes is not Writes.ANSWER for each in run.conversations_K):
            return "it has no answer"
        several = len({each.branch for each in run.conversations_K if each.reads}) > 1
        return "it was read in several branches, which have no single end" if several else ""


@dataclass(frozen=True, slots=True)
class LongRLVR(_OfEvidence):
    """R = acc + 0.1 F2 + 0.9 acc F2, where acc is exact match and F2 is `EvidenceF2` (arXiv 2603.02146)."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 2; None if one of the two is unknown."""
        right, grounded = ExactMatch(self.gold)(run), EvidenceF2(self.gold)(run)
        if right is None or grounded is None:
            return None
        return right + 0.1 * grounded + 0.9 * right * grounded

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        grounded = EvidenceF2(self.gold)
        if grounded(run) is None:
            return grounded.why_unknown(run)
        return "it has no answer" if run.answer is None or run.raw_answer is None else "no gold answer is known"


def _behind(run: TrainingRun) -> list[frozenset[int]] | None:
    """Return the chunks that each memory is based on, by update; None if one was redacted."""
    if run.store is None or any(after is None for _, after in run.memories_around):
        return None
    return chunks_behind(run.trace, chunk_reader(run.store, run.record.document, run.trace))


def _holds(span: Span, places: _Places | list[tuple[int, int]]) -> bool:
    return any(start < span.end_byte and span.start_byte < end for start, end in places)


@lru_cache(maxsize=64)
def _evidence_in(root: Path, key: str, size: int, evidence: tuple[str, ...]) -> tuple[_Places, ...] | str:
    """Return the places of each text in a stored document; for a text that is not in it, the reason."""
    text = DocumentStore(root).read_bytes(DocumentRef(key=key, name="", size=size, media_type="text/plain"), 0, size)
    places_of_texts = []
    for each in evidence:
        wanted, places = each.encode(), list[tuple[int, int]]()
        at = text.find(wanted) if wanted else -1
        while at >= 0:
            places.append((at, at + len(wanted)))
            at = text.find(wanted, at + len(wanted))
        if not places:
            return f"the gold evidence {each[:40]!r} is not in the document"
        places_of_texts.append(tuple(places))
    return tuple(places_of_texts)
