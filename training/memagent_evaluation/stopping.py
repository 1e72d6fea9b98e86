"""Compares where a read stopped with the places of the evidence: too early, read too much, or saved as possible.

An oracle that knows the evidence reads each chunk once, in order, and stops after the one with the last evidence. A
read is compared with that. Parallel and repeated reading counts by what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memagent_evaluation.samples import Needle
from memagent_graph.trace import Span, Trace


@dataclass(frozen=True, slots=True)
class Stop:
    """One read compared with the oracle's."""

    premature: bool
    """Whether some of the evidence was not read."""
    over_read_tokens: int
    """Document tokens in prompts beyond one reading up to the last evidence: after it, and repeated ones."""
    saved: float
    """The share of the document's characters that was never read."""
    could_save: float
    """The share after the last evidence's chunk."""


def stop_of(trace: Trace, evidence: Sequence[Needle], characters: int) -> Stop | None:
    """Compare a read's stop with the oracle's; None if no evidence is known.

    Args:
        trace: the read's.
        evidence: what the answer is based on (`Sample.evidence`).
        characters: the document's.
    """
    if not evidence:
        return None
    read = _read_once(_reads(trace))
    places = [each.place(characters) for each in evidence]
    last = max(end for _, end in places)
    needed = [span for span in read if span.start_char < last]
    end = min((span.end_char for span in needed if span.end_char >= last), default=last)
    stretches = _stretches(read)
    return Stop(
        premature=not all(any(a <= start and stop <= b for a, b in stretches) for start, stop in places),
        over_read_tokens=tokens_read(trace) - sum(span.tokens for span in needed),
        saved=max(0.0, 1 - sum(b - a for a, b in stretches) / characters),
        could_save=max(0.0, 1 - end / characters),
    )


def tokens_read(trace: Trace) -> int:
    """Document tokens in prompts, each counted as often as it was there."""
    return sum(span.tokens for span in _reads(trace))


def _reads(trace: Trace) -> Iterable[Span]:
    return (span for step in trace.steps for span in step.reads)


def _read_once(spans: Iterable[Span]) -> list[Span]:
    """In order, without those inside others: a passage looked up in a chunk that was read is read twice."""
    found: list[Span] = []
    for span in sorted(set(spans), key=lambda span: (span.start_char, -span.end_char)):
        if not found or span.end_char > found[-1].end_char:
            found.append(span)
    return found


def _stretches(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """The ranges that spans, in order, cover without gaps."""
    found: list[tuple[int, int]] = []
    for span in spans:
        if found and span.start_char <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end_char)
        else:
            found.append((span.start_char, span.end_char))
    return found
