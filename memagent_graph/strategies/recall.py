"""The paper's loop with a search: the policy may look up its earlier memories and the chunks read so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NotRequired

from langgraph.graph import END
from typing_extensions import TypedDict

from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.state import SequentialState
from memagent_graph.reading.steps import (
    Change,
    StepContext,
    answer,
    get_chosen_chunk,
    read_chunk,
    route_after_read_chunk,
)
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.retriever import BM25Retriever, Retriever, cut_passages, rank_texts
from memagent_graph.roles import ANSWER, ParsedReply, ParseFailure, Role
from memagent_graph.trace import Call, Span, Writes

_QUERY_PREFIX = "RECALL:"
_EMPTY_RESULT = "(nothing)"
_CHARS_PER_TOKEN = 2
"""Maximum passage characters per remaining token. With 2, at least one passage fits in nearly all cases."""
_MAX_CANDIDATES = 64
"""Maximum number of memories and passages to try, best first."""


def parse_memory_and_query(text: str, prompts: Prompts) -> ParsedReply | ParseFailure:
    """Parse a memory, and the words to look up if its last line begins with RECALL:."""
    del prompts
    *lines, last_line = text.splitlines() or [""]
    if not last_line.startswith(_QUERY_PREFIX):
        return ParsedReply(text)
    query, memory = last_line.removeprefix(_QUERY_PREFIX).strip(), "\n".join(lines).strip()
    if not query:
        return ParseFailure(EventKind.MALFORMED, "there are no words to look up after RECALL:")
    return ParsedReply(memory or None, query)


RECALL_UPDATE = Role(
    "recall_update",
    fields=frozenset({"memory", "chunk", "recalled"}),
    template=read_template("recall_update"),
    parse=parse_memory_and_query,
)
RECALL_LAST = Role("recall_last", fields=frozenset({"memory", "recalled"}), template=read_template("recall_last"))


class RecallResult(TypedDict):
    """The result of a look-up: spans of passages, earlier memories, and the ids of the calls that wrote these."""

    spans: list[dict[str, Any]]
    memories: list[str]
    call_ids: list[str]


class RecallState(SequentialState):
    """The state of a read with look-ups."""

    query: NotRequired[str | None]
    recalled: NotRequired[RecallResult | None]
    """The result of a look-up for the next prompt; None if there was no look-up."""
    lookups: NotRequired[int]


@dataclass(frozen=True)
class Recall(Strategy):
    """read_chunk -> (look_up ->) recall_update -> read_chunk -> ... -> (look_up -> recall_last ->) answer.

    After ReMemR1 (arXiv 2509.23040) and InfMem, with one change: the same look-up runs in training and evaluation, over
    earlier memories and over passages of the chunks read so far. The result is at most as long as a memory.
    """

    lookups: int = 16
    """Maximum number of look-ups in a run. A look-up searches everything that was read."""
    passage_chars: int = 600
    """Maximum characters of a passage, which ends with a sentence if possible."""
    retriever: Retriever = field(default_factory=BM25Retriever, compare=False)
    """Ranks memories and passages. The default is BM25."""
    name: ClassVar[str] = "recall"
    roles: ClassVar[tuple[Role, ...]] = (RECALL_UPDATE, RECALL_LAST, ANSWER)
    state: ClassVar[type] = RecallState
    uses_previous_calls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require_at_least(
            1, "lookups", "passage_chars", alternative="use the strategy overwrite to read without look-ups"
        )

    def wire(self, graph: StrategyGraph) -> None:
        """Add the loop of the paper, with the detour of a look-up."""
        steps = {"read_chunk": read_chunk, "recall_update": self._update, "recall_last": _update_last, "answer": answer}
        for name, step in {**steps, "look_up": self._look_up}.items():
            graph.add_node(name, step)
        edges = {OPEN_DOCUMENT: "read_chunk", "recall_update": "read_chunk", "recall_last": "answer", "answer": END}
        for start, end in edges.items():
            graph.add_edge(start, end)
        graph.add_conditional_edges(
            "read_chunk",
            route_after_read_chunk("recall_update", lambda state: "look_up" if state.get("query") else None),
            ["recall_update", "look_up", "answer", END],
        )
        graph.add_conditional_edges("look_up", _route_after_look_up, ["recall_update", "recall_last"])

    def apply_edit(self, state: Mapping[str, Any], call: Call, text: str) -> Change:
        """Replace the memory, and cancel the look-up that the policy requested with the old one."""
        return {**super().apply_edit(state, call, text), "query": None}

    async def _update(self, state: RecallState, step: StepContext) -> Change:
        recalled_spans = _load_spans(state.get("recalled"))
        reply = await step.read(
            RECALL_UPDATE, get_chosen_chunk(state), others=recalled_spans, **_make_ask_arguments(state, step)
        )
        return {"memory": reply.text, "query": reply.value, "recalled": None}

    async def _look_up(self, state: RecallState, step: StepContext) -> Change:
        """Rank earlier memories and passages of the chunks read so far, and keep the best ones that fit in a prompt."""
        result, lookup_count = RecallResult(spans=[], memories=[], call_ids=[]), (state.get("lookups") or 0) + 1
        if lookup_count > self.lookups:
            return {"recalled": result, "query": None}
        calls = [call for call in await step.load_previous_calls() if not call.branch]
        call_ids_by_memory = {call.text: call.id for call in calls if call.writes is Writes.MEMORY and call.text}
        call_ids_by_memory.pop(state.get("memory") or "", None)
        chunk_spans = {call.reads[0].index: call.reads[0] for call in calls if call.reads}
        candidates: list[str | Span] = []
        """Earlier memories, and the spans of passages."""
        remaining_tokens = step.context.budget.memory_tokens

        def iter_texts() -> Iterator[str]:
            for memory in call_ids_by_memory:
                candidates.append(memory)
                yield memory
            for span in chunk_spans.values():
                text = step.read_text(span)
                for start, end in cut_passages(text, min(self.passage_chars, _CHARS_PER_TOKEN * remaining_tokens)):
                    candidates.append(_make_passage_span(span, text, start, end))
                    yield text[start:end]

        ranking = await rank_texts(self.retriever, iter_texts(), state.get("query") or "")
        for candidate in (candidates[index] for index in ranking[:_MAX_CANDIDATES]):
            text = candidate if isinstance(candidate, str) else step.read_text(candidate)
            tokens = step.context.count_shown_tokens(text) + 2
            if tokens > remaining_tokens:
                continue
            remaining_tokens -= tokens
            if isinstance(candidate, Span):
                result["spans"].append({**candidate.stored, "tokens": tokens})
            else:
                result["memories"].append(text)
                result["call_ids"].append(call_ids_by_memory[text])
        result["spans"].sort(key=lambda span: span["start_byte"])
        return {"recalled": result, "query": None, "lookups": lookup_count}


async def _update_last(state: RecallState, step: StepContext) -> Change:
    """Update the memory after the last chunk with the result of a look-up; the prompt has no chunk."""
    reply = await step.ask(
        RECALL_LAST, reads=_load_spans(state.get("recalled")), slot=-1, **_make_ask_arguments(state, step)
    )
    return {"memory": reply.text, "recalled": None}


def _route_after_look_up(state: RecallState) -> str:
    return "recall_last" if state.get("span") is None else "recall_update"


def _make_ask_arguments(state: RecallState, step: StepContext) -> dict[str, Any]:
    """Return the arguments of `StepContext.ask` for the memory and the result of a look-up."""
    result, memory, tip = state.get("recalled"), state.get("memory") or "", state.get("tips", {}).get("")
    texts = [*result["memories"], *map(step.read_text, _load_spans(result))] if result else []
    parents = [*([tip] if tip else ()), *(result["call_ids"] if result else ())]
    span, events = state.get("span"), list[ReadEvent]()
    if result is not None and not texts:
        detail = "nothing read so far contains these words, or all look-ups are used up"
        events.append(ReadEvent(EventKind.NOT_RECALLED, span["index"] if span else None, detail))
    return {
        "memory": memory,
        "previous": memory,
        "recalled": "\n".join(texts) or _EMPTY_RESULT,
        "parents": list(dict.fromkeys(parents)),
        "events": events,
    }


def _load_spans(result: RecallResult | None) -> list[Span]:
    return [Span(**span) for span in result["spans"]] if result else []


def _make_passage_span(span: Span, text: str, start: int, end: int) -> Span:
    """Return the span of a passage, with its chunk's index. Its tokens are counted when it is chosen."""
    start_byte = span.start_byte + len(text[:start].encode())
    chars = span.start_char + start, span.start_char + end
    return Span(span.index, *chars, start_byte, start_byte + len(text[start:end].encode()), tokens=0)
