"""Traces made by hand: of a sequence of chunks, and of parallel branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from memagent_graph.events import ReadEvent
from memagent_graph.policy import Completion, FinishReason, TokenUsage
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import Call, Span, Trace, Writes


def make_call(
    id: str,  # noqa: A002
    text: str | None,
    *parents: str,
    reads: Span | None = None,
    branch: str = "",
    role: str = "update",
    writes: Writes = Writes.MEMORY,
    events: tuple[ReadEvent, ...] = (),
    tokens: tuple[int, int] = (100, 20),
    seconds: float = 0.5,
) -> Call:
    """Return a call whose slot is the index of the chunk that it read."""
    return Call(
        id=id,
        node=role,
        branch=branch,
        role=role,
        slot=reads.index if reads else 0,
        writes=writes,
        text=text,
        reads=(reads,) if reads else (),
        parents=parents,
        completion=Completion("", FinishReason.STOP, "some-model"),
        usage=TokenUsage(*tokens),
        seconds=seconds,
        events=events,
    )


def make_spans(chunks: Sequence[str]) -> list[Span]:
    """Return the spans of chunks in the text that they form."""
    spans: list[Span] = []
    for index, chunk in enumerate(chunks):
        start, byte = (spans[-1].end_char, spans[-1].end_byte) if spans else (0, 0)
        size = len(chunk.encode("utf-8", "replace"))
        spans.append(Span(index, start, start + len(chunk), byte, byte + size, 10))
    return spans


def make_trace(
    memories: Sequence[str],
    chunks: Sequence[str],
    *,
    events: Mapping[int, ReadEvent] | None = None,
    answer: Call | None = None,
    tokens: tuple[int, int] = (100, 20),
    seconds: Sequence[float] = (),
) -> Trace:
    """Return the trace of a run that read chunk after chunk; the ids of its calls are "0", "1" and so on.

    Args:
        memories: the memory after each chunk.
        chunks: their texts.
        events: an event for some chunks, by index.
        answer: the answering call.
        tokens: prompt and completion tokens of each call.
        seconds: the seconds of each call, by default 0.5.
    """
    calls = [
        make_call(
            str(index),
            memory,
            *([str(index - 1)] if index else []),
            reads=span,
            events=(events[index],) if events and index in events else (),
            tokens=tokens,
            seconds=seconds[index] if seconds else 0.5,
        )
        for index, (memory, span) in enumerate(zip(memories, make_spans(chunks), strict=True))
    ]
    return Trace((*calls, answer) if answer else tuple(calls))


def make_answer(*parents: str, text: str = "", events: tuple[ReadEvent, ...] = ()) -> Call:
    """Return the call that answered."""
    usage: Any = {"tokens": (50, 5), "seconds": 1.0}
    return make_call("answer", text, *parents, role="answer", writes=Writes.ANSWER, events=events, **usage)


def make_fan_out(memories: Sequence[Sequence[str]], merged: str, chunks: Sequence[str], *, answer: str = "") -> Trace:
    """Return the trace of a run whose parallel branches "0", "1" and so on were merged.

    Args:
        memories: by branch, the memory after each of its chunks, which has the call id "BRANCH.NUMBER".
        merged: the memory that the call "merge" wrote.
        chunks: the document's chunks; each branch takes as many of them as it has memories.
        answer: the text of the call "answer".
    """
    spans = iter(make_spans(chunks))
    branches = [
        [
            make_call(
                f"{branch}.{number}",
                memory,
                *([f"{branch}.{number - 1}"] if number else []),
                reads=next(spans),
                branch=str(branch),
            )
            for number, memory in enumerate(branch_memories)
        ]
        for branch, branch_memories in enumerate(memories)
    ]
    # The order of a log: the branches take turns.
    calls = [call for row in zip_longest(*branches) for call in row if call is not None]
    merge = make_call("merge", merged, *(branch[-1].id for branch in branches), role="merge")
    return Trace((*calls, merge, make_answer("merge", text=answer)), make_spans(chunks)[-1].end_byte)


def make_view(trace: Trace, **changes: Any) -> RunView:
    """Return a finished run about a lighthouse with this trace; `changes` replace its other fields."""
    values = {
        "run_id": "r1", "question": "Who built the lighthouse?", "model": "some-model", "strategy": "overwrite",
        "document": {"key": "sha256:" + "0" * 64, "name": "annals.txt", "size": 1, "media_type": "text/plain"},
        "answer": "Ilse Thornbury", "stop_reason": "answered", **changes,
    }  # fmt: skip
    return RunView(trace=trace, **{"raw_answer": values["answer"], **values})
