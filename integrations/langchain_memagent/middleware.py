"""`MemAgentMiddleware`: for agents of `langchain.agents.create_agent`; what is too long to show is read instead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Annotated, Any, NotRequired, TypeAlias

from langchain_core.messages import AnyMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, Field

from langchain_memagent.detached_reads import detached, reported
from langchain_memagent.long_results import Reading, Unread, further_findings, over_long_text, replaced_text
from langchain_memagent.questions import Questions, about_result, latest_request
from langchain_memagent.rolling_history import RollingHistory
from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import MemAgentError, MissingExtraError, PolicyError
from memagent_graph.reader import MemAgent
from memagent_graph.reading.outcome import raise_first, result_of
from memagent_graph.reading.state import Limits, new_run_id
from memagent_graph.results import ReadResult
from memagent_graph.tokenizers.shortening import shortened
from memagent_graph.trace import MemoryUpdate

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import PrivateStateAttr, ToolCallRequest
except ImportError as error:
    raise MissingExtraError("langchain", "the middleware") from error

ToolResult: TypeAlias = ToolMessage | Command[Any]
_READINGS = "memagent_readings"
_MOST_QUESTIONS = 8


def _merged(old: dict[str, DocumentRef] | None, new: dict[str, DocumentRef] | None) -> dict[str, DocumentRef]:
    return {**(old or {}), **(new or {})}


class ReadingState(AgentState[Any]):
    """The middleware's addition to an agent's state: which document each run of this thread has read.

    Private, so that no caller can add another thread's documents.
    """

    memagent_readings: NotRequired[Annotated[dict[str, DocumentRef], PrivateStateAttr, _merged]]


class AskToolResult(BaseModel):
    """The arguments of `ask_tool_result`."""

    run_id: str = Field(description="The run id that is shown instead of the tool result.")
    questions: Questions = Field(
        min_length=1,
        max_length=_MOST_QUESTIONS,
        description=f"1 to {_MOST_QUESTIONS} questions, each with every name and detail that its answer depends on.",
    )


class MemAgentMiddleware(AgentMiddleware[ReadingState, Any, Any]):
    """Reads tool results and message histories that are too long, for the user's request.

    A tool result of more than `result_tokens` tokens is stored, and the agent's model is shown a reading of it: the
    answer, the memory that the reader kept, and a run id with which it can ask the whole result further questions,
    through the tool `ask_tool_result`. Errors of the reader do not lose it: the model is told, and can ask later. The
    application finds run id, document, answer and usage in the message's `response_metadata["memagent"]`; the artifact
    stays the tool's own.

    A history of more than `history_tokens` tokens goes to the model as a memory of its older messages, the user's
    latest request, and the recent messages. Tool calls stay with their results, the system message stays as it is, and
    so does the history in the agent's state: only the request to the model differs.

    Handlers in the agent's config see each read as one run, with one model run that has all of its tokens. Its progress
    is on the agent's custom stream: `memagent.memory_update` for tool results, `memagent.history_update` for histories.

    It works together with `SummarizationMiddleware`, in either order, and in `create_deep_agent(middleware=[...])`: a
    reading is too short to trigger them.

    Args:
        agent: the reader. Its tokenizer counts tokens, its document store keeps the results.
        result_tokens: the longest tool result that is shown unchanged; None leaves all unchanged.
        history_tokens: the longest history that is shown unchanged; None leaves all unchanged.
        keep_messages: how many recent messages of a longer history stay unchanged, if they fit.
        limits: limits for the reading of one tool result; the reader's own by default.

    Raises:
        BudgetError: `history_tokens` leaves too little room next to a memory; raised at the agent's first model call if
            the policy has to be asked for its budget.
    """

    state_schema = ReadingState

    def __init__(
        self,
        agent: MemAgent,
        *,
        result_tokens: int | None = 8_000,
        history_tokens: int | None = 32_000,
        keep_messages: int = 8,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("result_tokens", result_tokens), ("history_tokens", history_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, or None for no bound, not {value}")
        if keep_messages < 1:
            raise ValueError(f"keep_messages must be at least 1, not {keep_messages}")
        self._agent = agent
        self._result_tokens = result_tokens
        self._limits = limits
        self._was_asked = False
        self._history = (
            RollingHistory(agent, tokens=history_tokens, keep_messages=keep_messages) if history_tokens else None
        )
        if self._history and (known := agent.prepared):
            self._history.require_room(known.budget)
        self._ask_tool = StructuredTool.from_function(
            self._ask,
            coroutine=self._aask,
            name="ask_tool_result",
            description="Ask further questions about a tool result that was too long to show and was read instead. "
            "The whole result is read again, once for all the questions of a call.",
            args_schema=AskToolResult,
            infer_schema=False,
            response_format="content_and_artifact",
            handle_tool_error=True,
        )
        self.tools: Sequence[BaseTool] = [self._ask_tool] if result_tokens else []

    # Tool results

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Run the tool; read what it returned if that is too long."""
        result = handler(request)
        if not self._is_concerned(request, result):
            return result
        return run_sync(self._read_results(request, result, _Around.here(request.runtime)))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """`wrap_tool_call` for asynchronous agents."""
        result = await handler(request)
        if not self._is_concerned(request, result):
            return result
        return await self._read_results(request, result, _Around.here(request.runtime))

    def _is_concerned(self, request: ToolCallRequest, result: ToolResult) -> bool:
        if self._result_tokens is None or request.tool_call["name"] == self._ask_tool.name:
            return False
        return any(over_long_text(message, self._result_tokens) is not None for message in _tool_messages(result))

    async def _read_results(self, request: ToolCallRequest, result: ToolResult, around: _Around) -> ToolResult:
        """The result with a reading instead of every text that is too long, and an entry for it in the state."""
        messages = _tool_messages(result)
        each = await asyncio.gather(*(self._read_message(request, message, around) for message in messages))
        replaced = {id(old): new for old, (new, _) in zip(messages, each, strict=True)}
        readings = {run_id: document for _, kept in each for run_id, document in kept.items()}
        noted = {_READINGS: readings} if readings else {}
        if isinstance(result, ToolMessage):
            return Command(update={"messages": [replaced[id(result)]], **noted}) if noted else replaced[id(result)]
        update: dict[str, Any] = {**(result.update or {}), **noted}
        update["messages"] = [replaced.get(id(message), message) for message in update["messages"]]
        return replace(result, update=update)

    async def _read_message(
        self, request: ToolCallRequest, message: ToolMessage, around: _Around
    ) -> tuple[ToolMessage, dict[str, DocumentRef]]:
        """One message and, if it was read, its document, under its run id."""
        assert self._result_tokens is not None  # noqa: S101  _is_concerned looked
        text = over_long_text(message, self._result_tokens)
        if text is None:
            return message, {}
        run_id, name = new_run_id(), message.name or request.tool_call["name"]
        document: DocumentRef | None = None
        try:
            context = await self._agent.aprepare()
            tokens = await asyncio.to_thread(context.tokenizer.count, text)
            if tokens <= self._result_tokens:
                return message, {}
            document = await self._stored(text, name)
            said = latest_request(_messages(request.state))
            question = about_result(
                said[1] if said else None,
                name,
                request.tool_call["args"],
                context.budget.question_tokens,
                context.tokenizer,
            )
            reading = Reading(name, tokens, await self._read(document, question, run_id, around))
        except (MemAgentError, OSError) as error:
            # Whatever failed, the result is kept if possible.
            with suppress(MemAgentError, OSError):
                document = document or await self._stored(text, name)
            unread = Unread(name, run_id, document, str(error), text)
            new = replaced_text(message, unread.content(self._result_tokens), unread.values())
            return new, {run_id: document} if document else {}
        new = replaced_text(message, reading.content(), reading.values())
        return new, {run_id: reading.result.document}

    async def _stored(self, text: str, tool: str) -> DocumentRef:
        document = Document.from_text(text, name=f"result of {tool}")
        return await self._agent.store.add_async(document)

    async def _read(self, document: DocumentRef, question: str, run_id: str, around: _Around) -> ReadResult:
        """Read, and report every memory update."""
        asked = {"question": question, "document": document["name"], "run_id": run_id}
        async with reported(around.config, self._agent.policy.name, asked) as spent:

            def report(update: MemoryUpdate) -> None:
                spent.add(update)
                around.report(run_id, update)

            parts = self._agent.astream(document, question, run_id=run_id, limits=self._limits)
            result = await detached(result_of(parts, report))
            usage = result.usage
            spent.settle(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, answer=result.answer)
            spent.model = result.model
        return result

    # Further questions

    def _ask(self, run_id: str, questions: list[str], runtime: ToolRuntime[Any, Any]) -> tuple[str, dict[str, Any]]:
        return run_sync(self._ask_again(run_id, questions, runtime.state, _Around.here(runtime)))

    async def _aask(
        self, run_id: str, questions: list[str], runtime: ToolRuntime[Any, Any]
    ) -> tuple[str, dict[str, Any]]:
        return await self._ask_again(run_id, questions, runtime.state, _Around.here(runtime))

    async def _ask_again(
        self, run_id: str, questions: list[str], state: Any, around: _Around
    ) -> tuple[str, dict[str, Any]]:
        known = state.get(_READINGS) or {}
        if run_id not in known:
            there = f"Those that can be asked: {', '.join(known)}." if known else "None was too long to show so far."
            raise ToolException(f"No tool result of this conversation was read under the run id {run_id!r}. {there}")
        name = new_run_id()
        try:
            context = await self._agent.aprepare()
            asked = [shortened(each, context.budget.question_tokens, context.tokenizer) for each in questions]
            outcomes = await self._read_again(known[run_id], asked, name, around)
            return further_findings(asked, outcomes)
        except (MemAgentError, OSError) as error:
            raise ToolException(f"The result could not be read: {error}") from error

    async def _read_again(
        self, document: DocumentRef, asked: list[str], name: str, around: _Around
    ) -> list[ReadResult | Exception]:
        shown = {"questions": asked, "document": document["name"], "run_id": name}
        async with reported(around.config, self._agent.policy.name, shown) as spent:

            def report(question: str, update: MemoryUpdate) -> None:
                spent.add(update)
                around.report(f"{name}-{asked.index(question)}", update)

            again = self._agent.aread(
                document,
                questions=asked,
                run_id=name,
                limits=self._limits,
                return_exceptions=True,
                on_update=report,
            )
            outcomes = await detached(again)
            if not any(isinstance(each, Exception) for each in outcomes):  # for those that failed, count the updates
                used = [each.usage for each in {each.run_id: each for each in raise_first(outcomes)}.values()]
                spent.settle(
                    sum(each.prompt_tokens for each in used),
                    sum(each.completion_tokens for each in used),
                    sum(each.cached_tokens for each in used),
                    answers=[each.answer for each in raise_first(outcomes)],
                )
        return outcomes

    # Histories

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model, with a memory instead of the older messages if there are too many."""
        if self._history is None or run_sync(self._fits(self._history, request)):
            return handler(request)
        around = _Around.here(request.runtime)
        return handler(request.override(messages=run_sync(self._shown(self._history, request, around))))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for asynchronous agents."""
        if self._history is None or await self._fits(self._history, request):
            return await handler(request)
        around = _Around.here(request.runtime)
        return await handler(request.override(messages=await self._shown(self._history, request, around)))

    async def _fits(self, history: RollingHistory, request: ModelRequest[Any]) -> bool:
        """Whether the history is certainly short. A limit that no history can fit in is an error at the first call."""
        if self._agent.prepared is None and not self._was_asked:
            self._was_asked = True
            with suppress(PolicyError):  # nothing has to be read yet, so the policy does not have to answer
                history.require_room((await self._agent.aprepare()).budget)
        return not history.may_be_long(request.messages)

    async def _shown(self, history: RollingHistory, request: ModelRequest[Any], around: _Around) -> list[AnyMessage]:
        try:
            return await history.within(list(request.messages), around.config, around.report)
        except MemAgentError as error:
            error.add_note(
                "The message history was too long to send and could not be read. The agent's state is as it was: "
                "invoke it again when the reader's policy answers, or pass history_tokens=None."
            )
            raise


def _tool_messages(result: ToolResult) -> list[ToolMessage]:
    """The tool messages in what a tool returned, except those for a parent graph."""
    if isinstance(result, ToolMessage):
        return [result]
    if isinstance(result, Command) and result.graph is None and isinstance(result.update, dict):
        messages = result.update.get("messages")
        return [each for each in messages if isinstance(each, ToolMessage)] if isinstance(messages, list) else []
    return []


def _messages(state: Any) -> list[AnyMessage]:
    """The messages of an agent's state of any type."""
    if isinstance(state, list):
        return state
    found = state.get("messages") if isinstance(state, dict) else getattr(state, "messages", None)
    return list(found or [])


@dataclass(frozen=True)
class _Around:
    """The agent that a read belongs to: its config, and its custom stream, which exists only in its own context."""

    config: RunnableConfig
    write: Callable[[Any], None]
    tool_call_id: str | None
    context: Context

    @classmethod
    def here(cls, runtime: Any) -> _Around:
        """The agent around this call."""
        return cls(ensure_config(), runtime.stream_writer, getattr(runtime, "tool_call_id", None), copy_context())

    def report(self, run_id: str, update: MemoryUpdate) -> None:
        """Put a memory update on the agent's custom stream; without a tool call it is an update of the message
        history.
        """
        event = {
            "type": "memagent.memory_update" if self.tool_call_id else "memagent.history_update",
            "run_id": run_id,
            "tool_call_id": self.tool_call_id,
            "chunk_index": update.chunk_index,
            "progress": update.progress,
            "memory": update.memory,
        }
        self.context.copy().run(self.write, event)
