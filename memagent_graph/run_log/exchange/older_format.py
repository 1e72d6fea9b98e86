"""Exports of format 1, which had one way of reading, converted to the present format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memagent_graph.run_log.records import Conversation, Outcome


def with_role(values: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation's values, with its role, its place, and what it read added."""
    answers = values.get("kind") == "answer"
    reads = []
    if values.get("start_byte") is not None:
        span = {name: values.get(name) or 0 for name in ("start_char", "end_char", "start_byte", "end_byte")}
        reads = [{"index": values["position"], "tokens": values.get("chunk_tokens") or 0, **span}]
    return {
        **values,
        "node": "answer" if answers else "update_memory",
        "branch": "",
        "role": "answer" if answers else "update",
        "slot": 0 if answers else values["position"],
        "writes": "answer" if answers else "memory",
        "reads": reads,
        "parents": [],
    }


def with_parents(conversations: Sequence[Conversation]) -> list[Conversation]:
    """A run's conversations with numbers and parents: each chunk was read after the previous one."""
    found: dict[int | None, Conversation] = {}
    newest: dict[int, str] = {}
    for seq, each in enumerate(sorted(conversations, key=lambda each: each.id or 0)):
        before = next((place for place in range(each.position - 1, -1, -1) if place in newest), None)
        found[each.id] = replace(each, seq=seq, parents=() if before is None else (newest[before],))
        if each.outcome is not Outcome.DISCARDED:
            newest[each.position] = each.step
    return [found[each.id] for each in conversations]
