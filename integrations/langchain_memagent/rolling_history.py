"""Shortens a message history that is too long for a prompt: a memory replaces its older messages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END

from langchain_memagent.detached_reads import report_read
from langchain_memagent.graph_reads import OnUpdate
from langchain_memagent.transcripts import (
    SOURCE_KEY,
    find_latest_request,
    find_safe_cuts,
    format_transcript,
    get_block_text,
    make_history_question,
    replace_text,
)
from memagent_graph.budget import Budget
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.errors import BudgetError
from memagent_graph.policy import TokenUsage
from memagent_graph.reader import MemAgent
from memagent_graph.reading.graph import build_graph
from memagent_graph.reading.state import Limits, ReaderState, SequentialState
from memagent_graph.reading.steps import Change, StepContext, overwrite_memory, read_chunk
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.reading.tracing import await_detached
from memagent_graph.roles import UPDATE, Role
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_graph.trace import Trace

_MAX_MEMORIES = 1024
"""The maximum number of memories, a few kilobytes each. The least recently used one is removed first."""
_FRAME_TOKENS = 64
"""Tokens reserved for the text around the memory."""


@dataclass(eq=False)
class RollingHistory:
    """Keeps histories within a limit; each message is read at most once.

    The memory of an older part is kept under a hash of its messages. A history that continues from there is shown with
    the same memory until it exceeds the limit again; then the messages since then are read into it. Memories are kept
    in this process: in another one, or after a restart, the older part is read again.
    """

    agent: MemAgent
    """The reader."""
    tokens: int = field(kw_only=True)
    """The longest history, in tokens of the reader's tokenizer."""
    keep_messages: int = field(kw_only=True)
    """How many recent messages stay unchanged, if they fit."""
    _memories: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False, repr=False)

    async def shorten(self, messages: list[AnyMessage], config: RunnableConfig, report: OnUpdate) -> list[AnyMessage]:
        """Return the messages unchanged if they fit; otherwise a memory of the older messages, and the recent messages.

        The user's latest request always stays, shortened if it alone would fill the limit.

        Args:
            messages: the history.
            config: the agent's config. Its handlers see a read; its threads share no memories.
            report: called with the read's run id, its question and each update.

        Raises:
            PolicyError: the policy failed.
            BudgetError: the limit leaves too little space next to a memory.
        """
        texts = [format_transcript([message]) for message in messages]
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) <= self.tokens:
            return messages  # a token has at least one byte
        context = await self.agent.aprepare()
        thread_id = str(config.get("configurable", {}).get("thread_id", ""))
        self.require_room(context.budget)
        sizes = list(map(context.tokenizer.count, texts))
        if sum(sizes) <= self.tokens:
            return messages
        latest_request = find_latest_request(messages)
        short_request = _shorten_request(messages, latest_request, self.tokens, context.tokenizer)
        request_tokens = context.tokenizer.count(format_transcript([short_request])) if short_request else 0
        recent_tokens = self.tokens - context.budget.memory_tokens - _FRAME_TOKENS - request_tokens
        cuts = _list_cuts(messages, thread_id)
        # How many messages are in a memory already; at first none.
        messages_in_memory = max((cut for cut, key in cuts.items() if key in self._memories), default=0)
        memory = self._memories.get(cuts[messages_in_memory], "")
        cut = self._choose_cut(list(cuts), sizes, recent_tokens)
        if sum(sizes[messages_in_memory:]) > recent_tokens and cut > messages_in_memory:
            text = latest_request[1] if latest_request else None
            question = make_history_question(text, context.budget.question_tokens, context.tokenizer)
            memory = await self.read_into_memory(memory, messages[messages_in_memory:cut], question, config, report)
            messages_in_memory = cut
        if messages_in_memory:
            self._remember(cuts[messages_in_memory], memory)
        recent_messages = messages[messages_in_memory:]
        history: list[AnyMessage] = []
        if messages_in_memory:
            beginning = f"[The first {messages_in_memory} messages of this conversation are replaced by this summary:]"
            text = f"{beginning}\n\n{memory}\n\n[The conversation continues from there.]"
            history.append(HumanMessage(text, additional_kwargs={SOURCE_KEY: "memagent"}))
        if latest_request and short_request:
            if latest_request[0] < messages_in_memory:
                history.append(short_request)
            else:
                recent_messages[latest_request[0] - messages_in_memory] = short_request
        return history + recent_messages

    async def read_into_memory(
        self, memory: str, messages: Iterable[BaseMessage], question: str, config: RunnableConfig, report: OnUpdate
    ) -> str:
        """Return the memory after more messages; unchanged if they have no text.

        Args:
            memory: the memory of the messages before these.
            messages: the messages to read.
            question: the question that the messages are read for.
            config: the config of the surrounding graph; its handlers see the read.
            report: called with the read's run id, its question and each update.

        Raises:
            PolicyError: the policy failed.
        """
        text = format_transcript(messages)
        if not text.strip():
            return memory
        context = await self.agent.aprepare()

        async def run_read(report: OnUpdate) -> Mapping[str, Any]:
            # A dialogue is private to its thread, so the text is deleted after the read.
            folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="memagent-")
            try:
                store = DocumentStore(folder.name).with_options(replace_undecodable=True)
                document = Document.from_text(text, name="conversation")
                reference = await store.add_async(document)
                private_context = replace(context, store=store, run_log=None, limits=Limits())
                graph = build_graph(private_context, _ContinueMemory(memory), checkpointer=False)
                state: dict[str, Any] = {"question": question, "document": reference, "memory": memory}
                trace = Trace((), reference["size"])
                async for stream_mode, payload in graph.astream(state, stream_mode=["updates", "values"]):
                    if stream_mode == "values":
                        state = payload
                        continue
                    for change in filter(None, payload.values()):
                        for update in trace.add_change(change):
                            report(state["run_id"], question, update)
            finally:
                await asyncio.to_thread(folder.cleanup)
            return state

        inputs = {"question": question, "document": "conversation"}
        async with report_read(config, self.agent.policy.name, inputs, report) as read_report:
            state = await await_detached(partial(run_read, read_report.add_update))
            usage = state["usage"]
            read_report.usage = TokenUsage(usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"])
        return str(state["memory"])

    def _choose_cut(self, cuts: Sequence[int], sizes: Sequence[int], recent_tokens: int) -> int:
        """Return the last cut that keeps enough messages, or, if they are too long, the first later cut that fits."""
        first_cut = max(cut for cut in cuts if cut <= max(0, len(sizes) - self.keep_messages))
        return next((cut for cut in cuts if cut >= first_cut and sum(sizes[cut:]) <= recent_tokens), cuts[-1])

    def _remember(self, key: str, memory: str) -> None:
        self._memories[key] = memory
        self._memories.move_to_end(key)
        while len(self._memories) > _MAX_MEMORIES:
            self._memories.popitem(last=False)

    def require_room(self, budget: Budget) -> None:
        """Raise `BudgetError` if the limit leaves too little room next to a memory of that budget."""
        memory_tokens = budget.memory_tokens
        min_tokens = 2 * (memory_tokens + _FRAME_TOKENS)
        if self.tokens < min_tokens:
            raise BudgetError(
                f"history_tokens must be at least {min_tokens} with {memory_tokens} memory_tokens, got {self.tokens}",
                hint=f"Pass history_tokens={min_tokens} or more, or a reader with smaller memory_tokens.",
            )


def _shorten_request(
    messages: Sequence[BaseMessage], request: tuple[int, str] | None, max_tokens: int, tokenizer: Tokenizer
) -> HumanMessage | None:
    """Return the user's latest request, cut if its text takes more than a quarter of the limit."""
    if request is None:
        return None
    position, text = request
    message = messages[position]
    assert isinstance(message, HumanMessage)  # noqa: S101  find_latest_request looks for nothing else
    if not isinstance(message.content, str):
        text = "\n".join(filter(None, map(get_block_text, message.content)))  # the other blocks are kept
    short_text = shorten_text(text, max(1, max_tokens // 4), tokenizer.count)
    content = replace_text(message.content, short_text)
    return message if short_text == text else message.model_copy(update={"content": content})


def _list_cuts(messages: Sequence[BaseMessage], thread_id: str) -> dict[int, str]:
    """Return the positions at which a history can be divided, each with a digest of the thread and the messages before.

    The messages before a cut are read, the others stay unchanged.
    """
    digest = hashlib.sha256(json.dumps(thread_id).encode())
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(_encode_message(message))
        digests.append(digest.hexdigest())
    return {position: digests[position] for position in find_safe_cuts(messages) if position < len(messages)}


def _encode_message(message: BaseMessage) -> bytes:
    """Return a message's content for a digest; ids and metadata may change between calls."""
    content: list[object] = [message.type, message.content, message.name]
    if isinstance(message, AIMessage):
        content.append([[call["name"], call["args"], call["id"]] for call in message.tool_calls])
    if isinstance(message, ToolMessage):
        content.append(message.tool_call_id)
    return json.dumps(content, default=str, sort_keys=True).encode()


@dataclass(frozen=True)
class _ContinueMemory(Strategy):
    """The paper's loop, but starting from an existing memory and ending with a memory instead of an answer."""

    memory: str

    name: ClassVar[str] = "read_on"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE,)
    state: ClassVar[type] = SequentialState

    def wire(self, graph: StrategyGraph) -> None:
        graph.add_node("take_memory", self._take_memory)
        graph.add_node("read_chunk", read_chunk)
        graph.add_node("update_memory", overwrite_memory)
        graph.add_edge(OPEN_DOCUMENT, "take_memory")
        graph.add_edge("take_memory", "read_chunk")
        graph.add_conditional_edges("read_chunk", _route_after_read_chunk, ["update_memory", END])
        graph.add_edge("update_memory", "read_chunk")

    async def _take_memory(self, state: ReaderState, step: StepContext) -> Change:
        return {"memory": self.memory}


def _route_after_read_chunk(state: SequentialState) -> str:
    return END if state.get("span") is None else "update_memory"
