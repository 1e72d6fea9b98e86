"""A bounded memory of a dialogue of any length: the reader's update step over messages instead of a document."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.graph import END

from langchain_memagent.detached_reads import detached, detached_sync
from langchain_memagent.questions import SOURCE, about_history
from langchain_memagent.transcripts import transcript
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.errors import MemAgentError
from memagent_graph.reader import MemAgent
from memagent_graph.reading.graph import build_graph
from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import Limits, LineState, ReaderState
from memagent_graph.reading.steps import read_chunk, update_memory
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import UPDATE, Role
from memagent_graph.tokenizers.shortening import shortened

_FORMAT = 1


class MemAgentConversationMemory:
    """What a dialogue came to, in at most the reader's `memory_tokens` tokens, however long it goes on.

    Every `add` shows the policy the memory and the new messages, in as many chunks as they need, and takes what it
    writes as the new memory. What was added before is not read again. Nothing is stored besides the memory: neither
    the reader's document store nor its run log sees the dialogue.

    This is for code that keeps its dialogues itself. An agent of `create_agent` gets the same from
    `MemAgentMiddleware(agent, result_tokens=None)`.

    >>> memory = MemAgentConversationMemory(agent)  # doctest: +SKIP
    >>> memory.add(messages_of_this_turn)  # doctest: +SKIP
    >>> model.invoke([*memory.as_messages, HumanMessage("And the invoice?")])  # doctest: +SKIP

    Args:
        agent: the reader whose policy, prompts and budgets are used.
        question: what the dialogue is read for; anything that may matter later where it is left out.
    """

    def __init__(self, agent: MemAgent, *, question: str | None = None) -> None:
        self._agent = agent
        self._question = question
        self._text = ""
        self._messages_read = 0
        self._adding = False

    @property
    def text(self) -> str:
        """The memory; empty before the first message."""
        return self._text

    @property
    def messages_read(self) -> int:
        """How many messages it was made from."""
        return self._messages_read

    @property
    def as_messages(self) -> list[BaseMessage]:
        """The memory as the beginning of a prompt: one message, or none while it is empty."""
        return [memory_message(self._text, self._messages_read)] if self._text else []

    async def aadd(self, messages: Sequence[BaseMessage], *, question: str | None = None) -> str:
        """Read further messages into the memory, and return it.

        Args:
            messages: what was said since the last call. Keep tool calls and their results together.
            question: what these messages are read for, instead of the memory's own question.

        Raises:
            MemAgentError: another `add` is still at work.
            PolicyError: the policy failed; the memory is as it was before the call.
        """
        if self._adding:
            raise MemAgentError(
                "messages are already being read into this memory", hint="Await one add before you begin the next."
            )
        self._adding = True
        try:
            asked = question or self._question
            self._text = await detached(read_on(self._agent, self._text, messages, asked))
            self._messages_read += len(messages)
        finally:
            self._adding = False
        return self._text

    def add(self, messages: Sequence[BaseMessage], *, question: str | None = None) -> str:
        """`aadd` for synchronous code."""
        return detached_sync(self.aadd(messages, question=question))

    def to_dict(self) -> dict[str, Any]:
        """All there is to keep, JSON-ready; `from_dict` makes the same memory of it."""
        return {
            "format": _FORMAT,
            "text": self._text,
            "messages_read": self._messages_read,
            "question": self._question,
        }

    @classmethod
    def from_dict(cls, agent: MemAgent, values: Mapping[str, Any]) -> MemAgentConversationMemory:
        """The memory that `to_dict` was called on.

        Raises:
            MemAgentError: the values are not what `to_dict` gives.
        """
        text, messages_read, question = (values.get(name) for name in ("text", "messages_read", "question"))
        if (
            values.get("format") != _FORMAT
            or not isinstance(text, str)
            or not isinstance(messages_read, int)
            or not isinstance(question, str | None)
        ):
            raise MemAgentError(
                "these are not the values of a conversation memory that this version can read",
                hint="Pass what MemAgentConversationMemory.to_dict() returned, unchanged.",
            )
        memory = cls(agent, question=question)
        memory._text, memory._messages_read = text, messages_read
        return memory


def memory_message(text: str, messages_read: int) -> HumanMessage:
    """A memory as a message that says what it is, for the place of the messages that it was made from."""
    return HumanMessage(
        f"[The earlier part of this conversation, {messages_read} messages, is given by this memory of it:]\n\n{text}"
        "\n\n[The conversation goes on from there.]",
        additional_kwargs={SOURCE: "memagent"},
    )


async def read_on(agent: MemAgent, memory: str, messages: Iterable[BaseMessage], question: str | None) -> str:
    """The memory after further messages; as it was where they hold no text.

    Raises:
        PolicyError: the policy failed.
    """
    text = transcript(messages)
    if not text.strip():
        return memory
    context = await agent.aprepare()
    budget, tokenizer = context.budget, context.tokenizer
    asked = shortened(question, budget.question_tokens, tokenizer) if question else None
    # A dialogue is private to its thread, so its text is gone as soon as it was read.
    with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
        store = DocumentStore(folder)
        document = Document.from_text(text, name="conversation")
        reference = await asyncio.to_thread(store.add, document, replace_undecodable=True)
        graph = build_graph(
            replace(context, store=store, run_log=None, limits=Limits()),
            _ReadOn(memory),
            checkpointer=False,
        )
        given: Any = {
            "question": asked or about_history(None, budget.question_tokens, tokenizer),
            "document": reference,
        }
        state = await graph.ainvoke(given)
    return str(state["memory"])


@dataclass(frozen=True)
class _ReadOn(Strategy):
    """The paper's loop, begun with a memory instead of an empty one, and ended with one instead of an answer."""

    memory: str

    name: ClassVar[str] = "read_on"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE,)
    state: ClassVar[type] = LineState

    def wire(self, graph: StrategyGraph) -> None:
        graph.add_node("take_memory", self._take_memory)
        graph.add_node("read_chunk", read_chunk)
        graph.add_node("update_memory", update_memory)
        graph.add_edge(OPEN, "take_memory")
        graph.add_edge("take_memory", "read_chunk")
        graph.add_conditional_edges("read_chunk", _after_read_chunk, ["update_memory", END])
        graph.add_edge("update_memory", "read_chunk")

    async def _take_memory(self, state: ReaderState, step: StepContext) -> Change:
        return {"memory": self.memory}


def _after_read_chunk(state: LineState) -> str:
    return END if state.get("span") is None else "update_memory"
