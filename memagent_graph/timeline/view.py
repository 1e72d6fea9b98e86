"""A run for viewing, from a run log or from a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memagent_graph.documents import DocumentRef, SourceMark
from memagent_graph.events import ReadEvent
from memagent_graph.provenance.places import Places, link_to
from memagent_graph.run_log import Reward
from memagent_graph.trace import MemoryUpdate, Trace


@dataclass(frozen=True)
class RunView:
    """The input of the timeline. Times are seconds since 1970."""

    run_id: str
    question: str
    document: DocumentRef
    model: str
    strategy: str
    """The name of the way of reading."""
    trace: Trace = field(repr=False)
    """All calls of the policy, and their results."""
    answer: str | None
    raw_answer: str | None
    stop_reason: str | None
    """None while it runs, or after a crash."""
    began: float | None = None
    ended: float | None = None
    rewards: tuple[Reward, ...] = ()
    sections: Sequence[SourceMark] = ()
    """Where the document's pages or sources begin."""
    headings: Sequence[SourceMark] = field(default=(), repr=False)
    """Where its headings and numbered clauses begin."""
    chunk_text: Callable[[MemoryUpdate], str | None] = field(default=lambda _: None, repr=False)
    """The text that an update read; None if it is no longer stored."""

    @property
    def places(self) -> Places:
        """What the places in the document are called."""
        return Places(self.sections, self.headings, link_to(self.document))

    @property
    def updates(self) -> tuple[MemoryUpdate, ...]:
        """Every memory update that counts, in order; empty for a run that has read nothing yet."""
        return self.trace.updates

    @property
    def answer_events(self) -> tuple[ReadEvent, ...]:
        """What happened at the answer."""
        return self.trace.answers[-1].events if self.trace.answers else ()
