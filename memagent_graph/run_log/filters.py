"""Which runs of a log are meant, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are meant; what is None does not matter. All that is given must hold."""

    run_ids: Sequence[str] | None = None
    question: str | None = None
    """Part of the question."""
    document: str | None = None
    """Part of the document's name."""
    policy: str | None = None
    """Part of the name of a policy that wrote one of its conversations."""
    stop_reason: str | None = None
    """A value of `StopReason`, or "unfinished"."""
    reward: str | None = None
    """The name of a reward it was given."""
    since: float | None = None
    """Begun at or after this time (seconds since 1970)."""
    until: float | None = None
    """Begun before this time."""
    newest: int | None = None
    """At most so many, the newest."""

    def sql(self) -> tuple[str, list[Any]]:
        """The query's end, from WHERE on, and its parameters."""
        terms, values = ["1"], list[Any]()
        if self.run_ids is not None:
            terms.append(f"run_id IN ({', '.join('?' * len(self.run_ids))})")
            values += self.run_ids
        for column, part in (("question", self.question), ("json_extract(document, '$.name')", self.document)):
            if part is not None:
                terms.append(f"instr(lower({column}), lower(?)) > 0")
                values.append(part)
        if self.policy is not None:
            terms.append(
                "EXISTS (SELECT 1 FROM conversations c JOIN configurations f ON f.id = c.configuration "
                "WHERE c.run_id = runs.run_id AND instr(lower(f.policy), lower(?)) > 0)"
            )
            values.append(self.policy)
        if self.stop_reason == "unfinished":
            terms.append("stop_reason IS NULL")
        elif self.stop_reason is not None:
            terms.append("stop_reason = ?")
            values.append(self.stop_reason)
        if self.reward is not None:
            terms.append("EXISTS (SELECT 1 FROM rewards w WHERE w.run_id = runs.run_id AND w.name = ?)")
            values.append(self.reward)
        for comparison, bound in ((">=", self.since), ("<", self.until)):
            if bound is not None:
                terms.append(f"began {comparison} ?")
                values.append(bound)
        return f"WHERE {' AND '.join(terms)} ORDER BY began DESC, run_id DESC LIMIT ?", [*values, self.newest or -1]


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What the conversations of one run come to, and the run's rewards."""

    conversations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    with_ids: int = 0
    """How many of its conversations can be trained on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each of the run's own rewards, by name."""
