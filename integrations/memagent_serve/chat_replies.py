"""Formats a read as a reply of the chat API: a completion, or its chunks. Progress is sent as reasoning."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.documents.omissions import list_document_events
from memagent_graph.events import StopReason, count_events
from memagent_graph.plain_text import format_count, make_printable, replace_lone_surrogates
from memagent_graph.policy import TokenUsage
from memagent_graph.results import ReadResult, Usage
from memagent_serve.ledger import ReadState
from memagent_serve.reads import ServedRead

RUN_ID_HEADER: Final = "X-Memagent-Run-Id"
DONE: Final = "[DONE]"
HEARTBEAT_SECONDS: Final = 15
"""The time between two keep-alive comments in a stream."""
_MAX_QUOTES: Final = 50
_MAX_QUOTE_LENGTH: Final = 600
_MAX_NOTE_LENGTH: Final = 2000


@dataclass(frozen=True)
class ReplyHead:
    """The common fields of all chunks of one reply."""

    run_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def make_completion(
        self, message: dict[str, Any], finish_reason: str, usage: dict[str, Any], **fields: Any
    ) -> dict[str, Any]:
        """Return a complete reply."""
        return {
            **self._make_common_fields("chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "refusal": None, **message},
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
            ],
            "usage": usage,
            **fields,
        }

    def make_chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> str:
        """Return a chunk of a streamed reply, as ASCII JSON, which can also carry lone surrogates."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return json.dumps({**self._make_common_fields("chat.completion.chunk"), "choices": [choice], **fields})

    def make_usage_chunk(self, usage: dict[str, Any]) -> str:
        """Return the chunk with the reply's usage."""
        return json.dumps({**self._make_common_fields("chat.completion.chunk"), "choices": [], "usage": usage})

    def _make_common_fields(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.run_id}", "object": kind, "created": self.created, "model": self.model}


def format_answer(result: ReadResult, stop_texts: Sequence[str]) -> str:
    """Return the reply's text: the answer, cut at the request's stop texts, or else the reason and the notes."""
    memory = replace_lone_surrogates(result.memory).strip() or "(nothing)"
    if result.stop_reason.resumable:
        return (
            f"Reading stopped early, after {format_count(result.chunks_read, 'part')} ({result.stop_reason.value}). "
            f"Ask the same again, and it continues.\n\nNoted so far:\n{memory}"
        )
    if result.stop_reason is StopReason.NO_ANSWER or result.answer is None:
        return f"No answer was found.\n\nNoted while reading:\n{memory}"
    cuts = [position for stop in stop_texts if stop and (position := result.answer.find(stop)) >= 0]
    return replace_lone_surrogates(result.answer[: min(cuts, default=None)])


def get_finish_reason(result: ReadResult) -> str:
    """Return the API's finish reason of the reply."""
    answers = result.trace.answers
    was_cut = bool(answers) and answers[-1].completion.finish_reason == "length"
    return "length" if result.stop_reason.resumable or was_cut else "stop"


def sum_usage(usage: Usage | TokenUsage, server_usage: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the usage of a read or a call, plus that of the reply that the model server wrote from its findings."""
    reply_usage = server_usage or {}
    prompt = usage.prompt_tokens + (reply_usage.get("prompt_tokens") or 0)
    completion = usage.completion_tokens + (reply_usage.get("completion_tokens") or 0)
    cached = usage.cached_tokens + ((reply_usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return {
        **reply_usage,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def describe_read(result: ReadResult, sources: Sequence[str]) -> dict[str, Any]:
    """Return the reply's data on the read, under "memagent"."""
    return {
        "run_id": result.run_id,
        "strategy": result.strategy,
        "read": list(sources),
        "question": result.question,
        "document": result.document["key"],
        "document_tokens": result.usage.document_tokens,
        "chunks_read": result.chunks_read,
        "calls": result.usage.turns,
        "seconds": round(result.usage.seconds, 3),
        "stop_reason": result.stop_reason.value,
        "events": {kind.value: count for kind, count in count_events(result.events).items()},
        "not_in_text": [event.detail for event in list_document_events(result.document)],
    }


def build_annotations(result: ReadResult, text: str) -> list[dict[str, Any]]:
    """Return a citation of the document for each quote that supports the answer.

    The API has one kind of annotation in chat completions, `url_citation`. Its URL identifies the text by its digest,
    and the characters as in RFC 5147. It cannot be fetched.
    """
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": len(text),
                "title": ", ".join(filter(None, (result.document["name"], evidence.section))),
                "url": f"urn:{result.document['key']}#char={evidence.start_char},{evidence.end_char}",
                "quote": evidence.quote[:_MAX_QUOTE_LENGTH],
                "chunk": evidence.chunk_index,
            },
        }
        for evidence in result.evidence[:_MAX_QUOTES]
    ]


def format_progress(read: ServedRead, memory_before: str) -> str:
    """Return a line for people: how much was read, and what is new in memory."""
    update = read.newest_update
    if read.state is ReadState.WAITING:
        return "Waiting for other reads.\n"
    if update is None:
        return "Reading.\n"
    old_lines = set(memory_before.splitlines())
    new_lines = "\n".join(line for line in update.memory.splitlines() if line.strip() and line not in old_lines)
    fraction = f"{update.progress:.0%} read" if update.progress is not None else "reading"
    chunk = "" if update.chunk_index is None else f", part {update.chunk_number}"
    return make_printable(f"{fraction}{chunk}. {new_lines}"[:_MAX_NOTE_LENGTH].rstrip()) + "\n"
