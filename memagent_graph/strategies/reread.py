"""Reads the document, asks for a sub-question that the memory leaves open, and reads the document again for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NotRequired

from langgraph.graph import END

from memagent_graph.documents.chunking import start_cursor
from memagent_graph.events import EventKind
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.state import ReaderContext, SequentialState
from memagent_graph.reading.steps import (
    Change,
    StepContext,
    answer,
    get_chosen_chunk,
    read_chunk,
    route_after_read_chunk,
)
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, UPDATE, ParsedReply, ParseFailure, Role
from memagent_graph.trace import Writes


def make_question_parser(questions: Sequence[str]) -> Callable[[str, Prompts], ParsedReply | ParseFailure]:
    """Return a parser of ANSWER, or of ASK with a question below it. Earlier `questions` are refused."""
    earlier_questions = {_normalise(question) for question in questions}

    def parse(text: str, prompts: Prompts) -> ParsedReply | ParseFailure:
        del prompts
        first_line, _, question = text.partition("\n")
        word, question = first_line.strip(), " ".join(question.split())
        if word == "ANSWER" and not question:
            return ParsedReply(text)
        if word != "ASK" or not question:
            return ParseFailure(EventKind.MALFORMED, f"the reply is {text[:30]!r}, not ANSWER or ASK and a question")
        if _normalise(question) in earlier_questions:
            return ParseFailure(EventKind.REPEATED, f"{question[:60]!r} was asked before")
        return ParsedReply(text, question)

    return parse


DECOMPOSE = Role(
    "decompose",
    Writes.DECISION,
    frozenset({"memory"}),
    read_template("decompose"),
    max_tokens="question_tokens",
)
"""Its parser depends on the questions so far: `make_question_parser`."""
INTEGRATE = Role(
    "integrate",
    fields=frozenset({"memory", "chunk", "subquestion"}),
    template=read_template("integrate"),
    fallback="update",
)


class RereadState(SequentialState):
    """The state of the rereads, and the memory of the previous reads."""

    branch: NotRequired[str]
    """The branch of the current read: "" for the first read, then "1", "2", ..."""
    subquestions: NotRequired[list[str]]
    """The sub-questions so far; the document is read for the newest."""
    question_call_id: NotRequired[str]
    """The id of the call that wrote the newest sub-question."""
    trunk_memory: NotRequired[str]
    """The memory after all previous reads."""
    finding: NotRequired[str]
    """The memory of the newest reread, after its end."""


@dataclass(frozen=True)
class Reread(Strategy):
    """read_chunk -> update_memory -> ... -> decompose -> read_chunk -> ... -> integrate -> decompose -> ... -> answer.

    After MemReread (arXiv 2605.10268): each sub-question begins with an empty memory. A reply in another form, or a
    question that was asked before, is handled by the rule for malformed replies, then counts as ANSWER.
    """

    rounds: int = 2
    """Maximum number of rereads."""
    name: ClassVar[str] = "reread"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE, DECOMPOSE, INTEGRATE, ANSWER)
    state: ClassVar[type] = RereadState

    def __post_init__(self) -> None:
        self.require_at_least(1, "rounds", alternative="use the strategy overwrite to read once")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the loop that reads the document, and the edge from a sub-question back to it."""
        graph.add_node("read_chunk", _choose_next_chunk)
        graph.add_node("update_memory", _update_memory)
        graph.add_node("integrate", _integrate)
        graph.add_node("answer", answer)
        graph.add_node("decompose", self._decompose)
        graph.add_edge(OPEN_DOCUMENT, "read_chunk")
        graph.add_edge("update_memory", "read_chunk")
        graph.add_edge("integrate", "decompose")
        after_read = route_after_read_chunk("update_memory", _choose_node_after_reading)
        graph.add_conditional_edges("read_chunk", after_read, ["update_memory", "decompose", "integrate", END])
        graph.add_conditional_edges("decompose", _route_after_decompose, ["read_chunk", "answer"])
        graph.add_edge("answer", END)

    def compute_current_memory(self, state: Mapping[str, Any], context: ReaderContext) -> str:
        """Return the memory of the previous reads, also while the document is read again."""
        return (state.get("trunk_memory") if state.get("branch") else state.get("memory")) or ""

    async def _decompose(self, state: RereadState, step: StepContext) -> Change:
        subquestions, memory = state.get("subquestions") or [], state.get("memory") or ""
        if len(subquestions) >= self.rounds:
            return {"branch": ""}
        role = replace(DECOMPOSE, parse=make_question_parser((state["question"], *subquestions)))
        reply = await step.ask(role, memory=memory, slot=len(subquestions))
        if reply.value is None:
            return {"branch": ""}
        return {
            "cursor": start_cursor(),
            "span": None,
            "memory": "",
            "finding": None,
            "trunk_memory": memory,
            "subquestions": [*subquestions, reply.value],
            "question_call_id": reply.call_id,
            "branch": str(len(subquestions) + 1),
        }


async def _choose_next_chunk(state: RereadState, step: StepContext) -> Change:
    change = await read_chunk(state, step)
    if state.get("branch") and "span" in change and change["span"] is None:
        # The reread has ended: its memory is the finding, and the trunk's memory is restored.
        return {**change, "branch": "", "finding": state.get("memory"), "memory": state.get("trunk_memory")}
    return change


def _choose_node_after_reading(state: RereadState) -> str | None:
    if state.get("span") is not None:
        return None
    return "decompose" if state.get("finding") is None else "integrate"


async def _update_memory(state: RereadState, step: StepContext) -> Change:
    memory, branch = state.get("memory") or "", state.get("branch")
    question, parents = None, None
    if branch:
        question = (state.get("subquestions") or [""])[-1]
        tip = state.get("tips", {}).get(branch)
        parents = [*([tip] if tip else ()), state.get("question_call_id") or ""]
    reply = await step.read(
        UPDATE, get_chosen_chunk(state), question=question, memory=memory, previous=memory, parents=parents
    )
    return {"memory": reply.text}


async def _integrate(state: RereadState, step: StepContext) -> Change:
    subquestions, memory, tips = state.get("subquestions") or [], state.get("memory") or "", state.get("tips", {})
    reply = await step.ask(
        INTEGRATE,
        memory=memory,
        chunk=state.get("finding") or "",
        subquestion=subquestions[-1],
        previous=memory,
        slot=len(subquestions),
        parents=[tips[name] for name in ("", str(len(subquestions))) if name in tips],
    )
    return {"memory": reply.text}


def _route_after_decompose(state: RereadState) -> str:
    return "read_chunk" if state.get("branch") else "answer"


def _normalise(question: str) -> str:
    return " ".join(question.casefold().split()).rstrip("?. ")
