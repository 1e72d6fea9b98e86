"""Which runs of a log are chosen, and their totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to choose: those that fulfil all conditions that are not None."""

    run_ids: Sequence[str] | None = None
    run_id_begins: str | None = None
    """The beginning of the run's id."""
    question: str | None = None
    """Part of the question."""
    document: str | None = None
    """Part of the document's name."""
    policy: str | None = None
    """Part of the name of a policy that wrote one of its conversations."""
    stop_reason: str | None = None
    """A value of `StopReason`, or "unfinished"."""
    reward: str | None = None
    """The name of one of its rewards."""
    is_own: bool | None = None
    """Whether it was read here; False for runs that were imported."""
    since: float | None = None
    """Begun at or after this time (seconds since 1970)."""
    until: float | None = None
    """Begun before this time."""
    newest: int | None = None
    """At most this many, the newest."""

    def sql(self) -> tuple[str, list[Any]]:
        """Return the end of the query, from WHERE on, and its parameters."""
        terms = {
            "instr(run_id, ?) = 1": self.run_id_begins,
            "instr(lower(question), lower(?)) > 0": self.question,
            "instr(lower(json_extract(document, '$.name')), lower(?)) > 0": self.document,
            "EXISTS (SELECT 1 FROM conversations c "
            "WHERE c.run_id = runs.run_id AND instr(lower(c.policy), lower(?)) > 0)": self.policy,
            "coalesce(stop_reason, 'unfinished') = ?": self.stop_reason,
            "EXISTS (SELECT 1 FROM rewards w WHERE w.run_id = runs.run_id AND w.name = ?)": self.reward,
            "(run_id NOT IN (SELECT run_id FROM imported)) = ?": self.is_own,
            "began >= ?": self.since,
            "began < ?": self.until,
        }
        chosen = {term: value for term, value in terms.items() if value is not None}
        values = [*chosen.values(), *(self.run_ids or ()), -1 if self.newest is None else self.newest]
        conditions = [*chosen]
        if self.run_ids is not None:
            conditions.append(f"run_id IN ({', '.join('?' * len(self.run_ids))})")
        return f"WHERE {' AND '.join(conditions) or '1'} ORDER BY began DESC, run_id DESC LIMIT ?", values


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Totals of one run's conversations, and the run's rewards."""

    conversations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    with_ids: int = 0
    """How many of its conversations can be trained on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each of the run's own rewards, by name."""
