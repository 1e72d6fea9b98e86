"""A bounded memory of a dialogue of any length: the reader's update step over messages instead of a document."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from langchain_core.messages import (
    BaseMessage,
    HumanMessage,
    MessageLikeRepresentation,
    convert_to_messages,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.graph import END
from langgraph.store.base import BaseStore

from langchain_memagent.detached_reads import detach, report_read
from langchain_memagent.graph_reads import Report
from langchain_memagent.questions import SOURCE, history_question
from langchain_memagent.transcripts import transcript
from memagent_graph.concurrency.background import synchronous
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.errors import MemAgentError
from memagent_graph.reader import MemAgent
from memagent_graph.reading.graph import build_graph
from memagent_graph.reading.outcome import Progress
from memagent_graph.reading.state import Limits, LineState, ReaderState
from memagent_graph.reading.steps import Change, StepContext, read_chunk, update_memory
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.results import Usage
from memagent_graph.roles import UPDATE, Role
from memagent_graph.tokenizers.pieces import shortened

_FORMAT = 1
_NAMESPACE = ("memagent", "conversations")

Messages: TypeAlias = Sequence[MessageLikeRepresentation] | MessageLikeRepresentation
"""What LangChain accepts as messages: messages, (role, text) tuples, dicts with role and content, texts of the user."""


class MemAgentConversationMemory:
    """A summary of a dialogue of any length, in at most the reader's `memory_tokens` tokens.

    Every `add` sends the memory and the new messages to the policy, in as many chunks as needed, and the policy's reply
    becomes the new memory. Earlier messages are not read again. Concurrent calls of `add` run in their order.
    The dialogue is in neither the reader's document store nor its run log.

    This is for code that stores its dialogues itself. An agent of `create_agent` gets the same from
    `MemAgentMiddleware(agent, result_tokens=None)`.

    >>> memory = MemAgentConversationMemory(agent)  # doctest: +SKIP
    >>> memory.add(messages_of_this_turn)  # doctest: +SKIP
    >>> model.invoke([*memory.as_messages, HumanMessage("And the invoice?")])  # doctest: +SKIP

    Args:
        agent: the reader whose policy, prompts and budgets are used.
        question: what the dialogue is read for; if left out, anything that may matter later.
        unread_tokens: how many tokens of new messages may wait, shown unchanged, until they are read together. With 0
            every `add` asks the policy at least once; with the reader's `chunk_tokens`, a dialogue of short turns costs
            as few calls as if it had been added at once.
        store: a LangGraph store, in which the memory is kept under `key`. Every `add` starts from the stored memory,
            and stores the new one before it returns; call `load` to get it earlier. Of two processes that add to the
            same memory at the same moment, the later one wins.
        key: the dialogue's name in the store, as a thread's id.
        namespace: the namespace of the key in the store.

    Raises:
        MemAgentError: a store without a key, or a key without a store.
    """

    def __init__(
        self,
        agent: MemAgent,
        *,
        question: str | None = None,
        unread_tokens: int = 0,
        store: BaseStore | None = None,
        key: str | None = None,
        namespace: tuple[str, ...] = _NAMESPACE,
    ) -> None:
        if (store is None) != (key is None):
            raise MemAgentError(
                f"a conversation memory was given a {'key' if store is None else 'store'} alone",
                hint="Give both store=... and key=..., as in key=thread_id; or neither, and store to_dict() yourself.",
            )
        self._agent = agent
        self._question = question
        self._unread_tokens = unread_tokens
        self._store, self._key, self._namespace = store, key or "", namespace
        self._text = ""
        self._messages_read = 0
        self._unread: list[BaseMessage] = []
        self._turns = threading.Lock()
        self._last_turn: Future[None] | None = None

    @property
    def text(self) -> str:
        """The memory; empty before the first message is read."""
        return self._text

    @property
    def messages_read(self) -> int:
        """How many messages the memory was made from."""
        return self._messages_read

    @property
    def unread(self) -> list[BaseMessage]:
        """The messages that wait to be read, at most `unread_tokens` tokens."""
        return list(self._unread)

    @property
    def as_messages(self) -> list[BaseMessage]:
        """The beginning of a prompt: the memory in one message, if there is one, and the waiting messages."""
        return [*([memory_message(self._text, self._messages_read)] if self._text else []), *self._unread]

    async def aadd(self, messages: Messages, *, question: str | None = None) -> str:
        """Add more messages to the memory, and return it.

        Args:
            messages: the messages since the last call, in any form that LangChain accepts: messages, (role, text)
                tuples, dicts. Keep tool calls and their results together.
            question: what these messages are read for, instead of the memory's own question.

        Raises:
            MemAgentError: something that is not a message.
            PolicyError: the policy failed; the memory is as it was before the call.
        """
        return await self._take(_messages(messages), question)

    add = synchronous(aadd)

    async def aflush(self) -> str:
        """Read the waiting messages, and return the memory."""
        return await self._take([], None, read_all=True)

    flush = synchronous(aflush)

    async def aload(self) -> MemAgentConversationMemory:
        """Load the memory from the store, and return it."""
        async with self._turn():
            await self._get()
        return self

    load = synchronous(aload)

    def to_dict(self) -> dict[str, Any]:
        """Return the complete state as JSON-ready values, for `from_dict`."""
        return self._values(self._text, self._messages_read, self._unread)

    @classmethod
    def from_dict(cls, agent: MemAgent, values: Mapping[str, Any], **options: Any) -> MemAgentConversationMemory:
        """Return the memory that `to_dict` was called on; `options` are those of the constructor.

        Raises:
            MemAgentError: the values are not from `to_dict`.
        """
        memory = cls(agent, **{"question": values.get("question"), **options})
        memory._adopt(values)
        return memory

    async def _take(self, messages: list[BaseMessage], question: str | None, *, read_all: bool = False) -> str:
        async with self._turn():
            await self._get()
            text, read, old, new = self._text, self._messages_read, self._unread, messages
            if read_all or await self._are_too_many(new):
                old, new = [*old, *new], []
            waiting = [*old, *new]
            # The waiting messages fill a chunk and are read without the newest, which would start another chunk.
            if read_all or len(new) < len(messages) or await self._are_too_many(waiting):
                text = await read_on(self._agent, text, old, question or self._question, config=ensure_config())
                read, waiting = read + len(old), new
            await self._put(self._values(text, read, waiting))
            self._text, self._messages_read, self._unread = text, read, waiting
        return text

    async def _are_too_many(self, messages: Sequence[BaseMessage]) -> bool:
        if not self._unread_tokens:
            return bool(messages)
        tokenizer = (await self._agent.aprepare()).tokenizer
        return await asyncio.to_thread(tokenizer.count, transcript(messages)) > self._unread_tokens

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until earlier calls are done; they may be in other threads and event loops."""
        turn: Future[None] = Future()
        with self._turns:
            before, self._last_turn = self._last_turn, turn
        try:
            if before is not None:
                await asyncio.shield(asyncio.wrap_future(before))
            yield
        finally:
            if before is None or before.done():
                turn.set_result(None)
            else:  # cancelled while it waited: the next call still has to wait
                before.add_done_callback(lambda _: turn.set_result(None))

    async def _get(self) -> None:
        """Load the stored memory, if there is one, in a thread: a store's asynchronous methods need its event loop."""
        if self._store is not None:
            item = await asyncio.to_thread(self._store.get, self._namespace, self._key)
            if item is not None:
                self._adopt(item.value)

    async def _put(self, values: dict[str, Any]) -> None:
        if self._store is not None:
            await asyncio.to_thread(self._store.put, self._namespace, self._key, values)

    def _values(self, text: str, messages_read: int, unread: Sequence[BaseMessage]) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "text": text,
            "messages_read": messages_read,
            "question": self._question,
            "unread": messages_to_dict(unread),
        }

    def _adopt(self, values: Mapping[str, Any]) -> None:
        text, messages_read, question = (values.get(name) for name in ("text", "messages_read", "question"))
        unread = values.get("unread")
        if (
            values.get("format") != _FORMAT
            or not isinstance(text, str)
            or not isinstance(messages_read, int)
            or not isinstance(question, str | None)
            or not isinstance(unread, list)
        ):
            raise MemAgentError(
                "these are not the values of a conversation memory that this version can read",
                hint="Pass what MemAgentConversationMemory.to_dict() returned, unchanged.",
            )
        self._text, self._messages_read, self._unread = text, messages_read, messages_from_dict(unread)


def memory_message(text: str, messages_read: int) -> HumanMessage:
    """Return a memory as a message that introduces it and replaces the messages that it was made from."""
    return HumanMessage(
        f"[The earlier part of this conversation, {messages_read} messages, is given by this memory of it:]\n\n{text}"
        "\n\n[The conversation continues from there.]",
        additional_kwargs={SOURCE: "memagent"},
    )


async def read_on(
    agent: MemAgent,
    memory: str,
    messages: Iterable[BaseMessage],
    question: str | None,
    *,
    config: RunnableConfig,
    report: Report = lambda *_: None,
) -> str:
    """Return the memory after more messages; unchanged if they have no text.

    Args:
        agent: the reader.
        memory: the memory before.
        messages: the messages.
        question: what they are read for.
        config: the config of the surrounding graph, if there is one; its handlers see the read.
        report: called with the read's run id, its question and each update.

    Raises:
        PolicyError: the policy failed.
    """
    text = transcript(messages)
    if not text.strip():
        return memory
    context = await agent.aprepare()
    budget, tokenizer = context.budget, context.tokenizer
    purpose = shortened(question, budget.question_tokens, tokenizer.count) if question else None
    purpose = purpose or history_question(None, budget.question_tokens, tokenizer)

    async def new_state(report: Report) -> Mapping[str, Any]:
        # A dialogue is private to its thread, so its text is deleted after the read.
        with tempfile.TemporaryDirectory(prefix="memagent-") as folder:
            store = DocumentStore(folder)
            document = Document.from_text(text, name="conversation")
            reference = await store.add_async(document, replace_undecodable=True)
            private = replace(context, store=store, run_log=None, limits=Limits())
            graph = build_graph(private, _ReadOn(memory), checkpointer=False)
            state: dict[str, Any] = {"question": purpose, "document": reference, "memory": memory}
            progress = Progress(document_bytes=reference["size"], memory=memory)
            async for mode, part in graph.astream(state, stream_mode=["updates", "values"]):
                if mode == "values":
                    state = part
                    continue
                for change in filter(None, part.values()):
                    for update in progress.updates(change):
                        report(state["run_id"], purpose, update)
        return state

    inputs = {"question": purpose, "document": "conversation"}
    async with report_read(config, agent.policy.name, inputs, report) as cost:
        state = await detach(new_state(cost.add))
        usage = state["usage"]
        cost.settle([Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"])])
    return str(state["memory"])


@dataclass(frozen=True)
class _ReadOn(Strategy):
    """The paper's loop, but starting from an existing memory and ending with a memory instead of an answer."""

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


def _messages(messages: Messages) -> list[BaseMessage]:
    is_one = isinstance(messages, BaseMessage | str | dict) or (
        isinstance(messages, tuple) and len(messages) == 2 and all(isinstance(part, str) for part in messages)
    )
    try:
        return convert_to_messages([messages] if is_one else messages)  # type: ignore[arg-type, list-item]
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise MemAgentError(
            f"something is not a message: {str(error).splitlines()[0]}",
            hint='Pass LangChain messages, ("user", "text") tuples, or {"role": ..., "content": ...} dicts.',
        ) from error
