"""Conversations of made-up runs: what a log holds, without a read."""

from __future__ import annotations

from typing import Any

from memagent_graph import Span, Writes
from memagent_graph.run_log import Conversation, Outcome


def conversation(position: int = 0, *, answers: bool = False, **changes: Any) -> Conversation:
    """An update at a chunk behind the one at the chunk before it, or an answer behind the update at `position - 1`."""
    place: dict[str, Any] = {"node": "update_memory", "role": "update", "slot": position, "writes": Writes.MEMORY}
    if answers:
        place = {"node": "answer", "role": "answer", "slot": 0, "writes": Writes.ANSWER}
    values: dict[str, Any] = {
        "run_id": "r", "position": position, **place, "branch": "", "step": f"s{position}", "attempt": 0,
        "outcome": Outcome.ACCEPTED, "began": 1.5 + position, "seconds": 0.25, "policy": "fake", "policy_version": "7",
        "tokenizer": "t", "template": "w", "sampling": {"temperature": 0.5}, "prompt_tokens": 3, "completion_tokens": 2,
        "cached_tokens": 0, "finish_reason": "stop", "text": f"memory {position}",
        "parents": (f"s{position - 1}",) if position else (),
        "reads": () if answers else (Span(position, *[9 * position, 9 * position + 9] * 2, 4),),
    }  # fmt: skip
    return Conversation(**{**values, **changes})
