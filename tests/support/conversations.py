"""Conversations and runs for logs, made by hand."""

from __future__ import annotations

from typing import Any

from memagent_graph import RunLog, Span, Writes, load_prompts
from memagent_graph.run_log import Conversation, Outcome

DOCUMENT: Any = {"key": "sha256:" + "0" * 64, "name": "book.txt", "size": 10, "media_type": "text/plain"}
TOKENS: dict[str, Any] = {"prompt_token_ids": [1, 2, 4_000_000_000], "token_ids": [5, 6], "logprobs": [-0.5, -0.25]}


def make_conversation(position: int = 0, *, answers: bool = False, **changes: Any) -> Conversation:
    """Return an update or answer, whose parent is the update at `position - 1`."""
    call_fields: dict[str, Any] = {"node": "update_memory", "role": "update", "slot": position, "writes": Writes.MEMORY}
    if answers:
        call_fields = {"node": "answer", "role": "answer", "slot": 0, "writes": Writes.ANSWER}
    values: dict[str, Any] = {
        "run_id": "r", "position": position, **call_fields, "branch": "", "call_id": f"s{position}", "attempt": 0,
        "outcome": Outcome.ACCEPTED, "began": 1.5 + position, "seconds": 0.25, "policy": "fake", "policy_version": "7",
        "tokenizer": "t", "template": "w", "sampling": {"temperature": 0.5}, "prompt_tokens": 3, "completion_tokens": 2,
        "cached_tokens": 0, "finish_reason": "stop", "text": f"memory {position}",
        "parents": (f"s{position - 1}",) if position else (),
        "reads": () if answers else (Span(position, *[9 * position, 9 * position + 9] * 2, 4),),
    }  # fmt: skip
    return Conversation(**{**values, **changes})


def write_run(
    log: RunLog, run_id: str = "r", count: int = 2, *, stop_reason: str | None = "answered", **changes: Any
) -> list[int]:
    """Write a run of `count` conversations with token ids, and return their row ids.

    Args:
        log: the log to write to.
        run_id: the run's id.
        count: the number of conversations.
        stop_reason: its stop reason; None if it has not ended.
        changes: `question`, the document's `name`, and fields of the conversations.
    """
    question = changes.pop("question", f"Who is {run_id}?")
    document = {**DOCUMENT, "name": changes.pop("name", "book.txt")}
    prompts, values = load_prompts(), {**TOKENS, **changes}
    log.wait(log.begin(run_id, question, document, {"model": "fake"}, prompts=prompts, trace={"a": "b"}))
    values = {"run_id": run_id, "template": prompts.fingerprint, **values}
    rows = [log.wait(log.record(make_conversation(position, **values))) for position in range(count)]
    if stop_reason:
        log.wait(log.end(run_id, stop_reason, "42"))
    return rows
