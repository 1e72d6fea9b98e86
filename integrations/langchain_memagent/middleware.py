"""`MemAgentMiddleware`: reads tool results and histories that are too long for an agent's model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NotRequired, TypeAlias

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, Field

from langchain_memagent.detached_reads import report_read
from langchain_memagent.graph_reads import CallingGraph, GraphReads, derive_run_id, run_in_graph
from langchain_memagent.rolling_history import RollingHistory
from langchain_memagent.transcripts import (
    Questions,
    find_latest_request,
    get_block_text,
    get_messages,
    make_result_question,
    replace_text,
)
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import MemAgentError, MissingExtraError, PolicyError
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.policy import TokenUsage
from memagent_graph.reader import MemAgent
from memagent_graph.reading.run_history import require_results
from memagent_graph.reading.state import Limits, new_run_id
from memagent_graph.reading.tracing import await_detached
from memagent_graph.results import ReadResult
from memagent_graph.tokenizers.pieces import shorten_text

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import PrivateStateAttr, ToolCallRequest
except ImportError as error:
    raise MissingExtraError("langchain", "the middleware") from error

ToolResult: TypeAlias = ToolMessage | Command[Any]
_READINGS_KEY = "memagent_readings"
_MAX_QUESTIONS = 8
_FRAME_BYTES = 700
"""Bytes reserved for the sentences before the beginning of a result that could not be read."""
_MAX_ERROR_LENGTH = 300


def _merge_documents(old: dict[str, DocumentRef] | None, new: dict[str, DocumentRef] | None) -> dict[str, DocumentRef]:
    return {**(old or {}), **(new or {})}


class ReadingState(AgentState[Any]):
    """An agent's state, with a key for the document of each read of this thread.

    The key is private, so that no caller can add another thread's documents.
    """

    memagent_readings: NotRequired[Annotated[dict[str, DocumentRef], PrivateStateAttr, _merge_documents]]


class AskToolResult(BaseModel):
    """The arguments of `ask_tool_result`."""

    run_id: str = Field(description="The run id that is shown instead of the tool result.")
    questions: Questions = Field(
        min_length=1,
        max_length=_MAX_QUESTIONS,
        description=f"1 to {_MAX_QUESTIONS} questions, each with every name and detail that its answer depends on.",
    )


class MemAgentMiddleware(AgentMiddleware[ReadingState, Any, Any]):
    """Reads tool results and message histories that are too long, for the user's request.

    A tool result of more than `result_tokens` tokens is stored, and the agent's model is shown a reading of it: the
    answer, the memory that the reader kept, and a run id with which it can ask further questions about the result,
    through the tool `ask_tool_result`. If the reader fails, the result is kept: the model sees the error, and can ask
    about the result later. The application finds run id, document, answer and usage in the message's
    `response_metadata["memagent"]`. The artifact stays as the tool made it.

    A history of more than `history_tokens` tokens goes to the model as a memory of its older messages, the user's
    latest request, and the recent messages. Tool calls stay with their results. The system message and the history in
    the agent's state do not change: only the request to the model does.

    Handlers in the agent's config see each read as one run, with one model run that has all of its tokens. Its progress
    is on the agent's custom stream: `memagent.memory_update` for tool results, `memagent.history_update` for histories.

    It works together with `SummarizationMiddleware`, in either order, and in `create_deep_agent(middleware=[...])`: a
    reading is too short to trigger them.

    Args:
        agent: the reader. Its tokenizer counts tokens, its document store keeps the results.
        result_tokens: the longest tool result that is shown unchanged; None leaves all unchanged.
        history_tokens: the longest history that is shown unchanged; None leaves all unchanged.
        keep_messages: how many recent messages of a longer history stay unchanged, if they fit.
        limits: limits of the read of one tool result; the reader's own by default.

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
                raise ValueError(f"{name} must be positive or None, got {value}")
        if keep_messages < 1:
            raise ValueError(f"keep_messages must be at least 1, got {keep_messages}")
        self._agent = agent
        self._reads = GraphReads(agent)
        self._result_tokens = result_tokens or sys.maxsize
        self._limits = limits
        self._has_tried_to_prepare = False
        self._history = (
            RollingHistory(agent, tokens=history_tokens, keep_messages=keep_messages) if history_tokens else None
        )
        if self._history and (context := agent.reader_context):
            self._history.require_room(context.budget)
        self._ask_tool = StructuredTool.from_function(
            self._ask,
            coroutine=self._aask,
            name="ask_tool_result",
            description="Ask further questions about a tool result that was too long to show and was read instead. "
            "It is read again, once for all the questions of a call. "
            f"The reader is shown {agent.strategy.shown_extent}.",
            args_schema=AskToolResult,
            infer_schema=False,
            response_format="content_and_artifact",
            handle_tool_error=True,
        )
        self.tools: Sequence[BaseTool] = [self._ask_tool] if result_tokens else []

    # Tool results

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Run the tool, and read its result if that is too long."""
        return run_in_graph(self._read_results(request, handler(request)))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """`wrap_tool_call` for asynchronous agents."""
        return await self._read_results(request, await handler(request))

    async def _read_results(self, request: ToolCallRequest, result: ToolResult) -> ToolResult:
        """Return the result with a reading instead of every text that is too long, and an entry for it in the state."""
        if isinstance(result, list):
            return [await self._read_results(request, item) for item in result]  # type: ignore[return-value]
        messages = [] if request.tool_call["name"] == self._ask_tool.name else _find_tool_messages(result)
        if not messages:
            return result
        readings = await asyncio.gather(*(self._read_message(request, message) for message in messages))
        replacements = {id(message): shown for message, (shown, _) in zip(messages, readings, strict=True)}
        documents = {run_id: document for _, entries in readings for run_id, document in entries.items()}
        state_update = {_READINGS_KEY: documents} if documents else {}
        if isinstance(result, ToolMessage):
            message = replacements[id(result)]
            return Command(update={"messages": [message], **state_update}) if state_update else message
        update: dict[str, Any] = {**(result.update or {}), **state_update}
        update["messages"] = [replacements.get(id(message), message) for message in update["messages"]]
        return replace(result, update=update)

    async def _read_message(
        self, request: ToolCallRequest, message: ToolMessage
    ) -> tuple[ToolMessage, dict[str, DocumentRef]]:
        """Return the message to show; if it was read, also its document by run id."""
        text = _find_long_text(message, self._result_tokens)
        if text is None:
            return message, {}
        caller, tool = CallingGraph.capture(request.tool_call["id"]), message.name or request.tool_call["name"]
        run_id = derive_run_id(caller.config, message.tool_call_id, text) or new_run_id()
        document: DocumentRef | None = None
        try:
            context = await self._reads.prepare()
            token_count = await asyncio.to_thread(context.tokenizer.count, text)
            if token_count <= self._result_tokens:
                return message, {}
            document = await self._store_result(text, tool)
            user_request = find_latest_request(get_messages(request.state))
            question = make_result_question(
                user_request[1] if user_request else None,
                tool,
                request.tool_call["args"],
                context.budget.question_tokens,
                context.tokenizer,
            )
            [result] = require_results(await self._read_questions(document, {question: run_id}, caller))
        except (MemAgentError, OSError) as error:
            # Keep the result if possible, whatever failed.
            with suppress(MemAgentError, OSError):
                document = document or await self._store_result(text, tool)
            failure_text = _format_failure(tool, text, error, self._result_tokens, run_id if document else None)
            source_values: dict[str, Any] = {"document": dict(document)} if document else {"text": text}
            replacement = _replace_text(message, failure_text, {"run_id": run_id, **source_values, "error": str(error)})
            return replacement, {run_id: document} if document else {}
        values = await asyncio.to_thread(result.to_dict)
        return _replace_text(message, _format_reading(tool, token_count, result), values), {run_id: result.document}

    async def _store_result(self, text: str, tool: str) -> DocumentRef:
        return await self._reads.store(Document.from_text(replace_lone_surrogates(text), name=f"result of {tool}"))

    async def _read_questions(
        self, document: DocumentRef, run_ids: Mapping[str, str], caller: CallingGraph
    ) -> list[ReadResult | Exception]:
        """Read once for all questions; the agent's handlers see one run. Raises the first error if all reads fail."""
        inputs = {"questions": list(run_ids), "document": document["name"], "run_ids": list(run_ids.values())}
        async with report_read(caller.config, self._agent.policy.name, inputs, caller.report_update) as read_report:
            read_each = partial(self._reads.read_each, document, run_ids, read_report.add_update, limits=self._limits)
            outcomes = await await_detached(read_each)
            results = [outcome for outcome in outcomes if isinstance(outcome, ReadResult)]
            if not results:
                require_results(outcomes)
            if len(results) == len(outcomes):  # for reads that failed, only their updates are counted
                read_report.usage = TokenUsage(
                    sum(result.usage.prompt_tokens for result in results),
                    sum(result.usage.completion_tokens for result in results),
                    sum(result.usage.cached_tokens for result in results),
                )
                read_report.model = results[0].model
                read_report.outputs = {"answers": [result.answer for result in results]}
        return outcomes

    # Further questions

    def _ask(self, run_id: str, questions: list[str], runtime: ToolRuntime[Any, Any]) -> tuple[str, dict[str, Any]]:
        return run_in_graph(self._aask(run_id, questions, runtime))

    async def _aask(
        self, run_id: str, questions: list[str], runtime: ToolRuntime[Any, Any]
    ) -> tuple[str, dict[str, Any]]:
        documents = runtime.state.get(_READINGS_KEY) or {}
        if run_id not in documents:
            remedy = (
                f"Available run ids: {', '.join(documents)}."
                if documents
                else "So far, no tool result was too long to show."
            )
            raise ToolException(f"No tool result of this conversation was read under the run id {run_id!r}. {remedy}")
        caller = CallingGraph.capture(runtime.tool_call_id)
        try:
            context = await self._reads.prepare()
            texts = [
                shorten_text(question, context.budget.question_tokens, context.tokenizer.count)
                for question in questions
            ]
            run_ids = {text: derive_run_id(caller.config, runtime.tool_call_id, text) or new_run_id() for text in texts}
            outcomes = dict(zip(run_ids, await self._read_questions(documents[run_id], run_ids, caller), strict=True))
            return await asyncio.to_thread(_format_further_answers, texts, [outcomes[text] for text in texts])
        except (MemAgentError, OSError) as error:
            raise ToolException(f"The result could not be read: {error}") from error

    # Histories

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model, with a memory instead of the older messages if there are too many."""
        return handler(run_in_graph(self._shorten_history(request)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for asynchronous agents."""
        return await handler(await self._shorten_history(request))

    async def _shorten_history(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """Return the request with a history that fits; the first call also checks the limit."""
        if (history := self._history) is None:
            return request
        if self._agent.reader_context is None and not self._has_tried_to_prepare:
            self._has_tried_to_prepare = True
            with suppress(PolicyError):  # nothing has to be read yet, so the policy does not have to answer
                history.require_room((await self._agent.aprepare()).budget)
        caller = CallingGraph.capture()
        try:
            report = partial(caller.report_update, kind="history_update")
            return request.override(messages=await history.shorten(list(request.messages), caller.config, report))
        except MemAgentError as error:
            error.add_note(
                "The message history was too long to send and could not be read. The agent's state is as it was: "
                "invoke it again when the reader's policy answers, or pass history_tokens=None."
            )
            raise


def _find_tool_messages(result: ToolResult) -> list[ToolMessage]:
    """Return the tool messages in what a tool returned, except those for a parent graph."""
    if isinstance(result, ToolMessage):
        return [result]
    if isinstance(result, Command) and result.graph is None and isinstance(result.update, dict):
        messages = result.update.get("messages")
        return [item for item in messages if isinstance(item, ToolMessage)] if isinstance(messages, list) else []
    return []


def _format_reading(tool: str, token_count: int, result: ReadResult) -> str:
    """Return the text that the model sees in place of a tool result of `token_count` tokens that was read."""
    return (
        f"[The result of {tool} has {token_count:,} tokens, too long to show. It was read with this question in mind: "
        f"{result.question}]\n\n{result.findings()}\n\n[{result.extent} The whole result is kept. To learn something "
        f'else from it, call ask_tool_result with run_id="{result.run_id}" and questions.]'
    )


def _format_failure(tool: str, text: str, error: Exception, max_bytes: int, run_id: str | None) -> str:
    """Return the text that the model sees in place of a tool result that could not be read.

    Args:
        tool: the tool's name.
        text: the result.
        error: why it could not be read.
        max_bytes: the maximum number of bytes to return. A token is at least one byte.
        run_id: the id for asking about the result again; None if it is not stored.
    """
    remedy = "It could not be stored either: call the tool again, requesting less data if it supports that."
    if run_id is not None:
        kept = "The whole result is kept: once that is remedied, call ask_tool_result with"
        remedy = f'{kept} run_id="{run_id}" and questions.'
    beginning = text.encode(errors="replace")[: max(0, max_bytes - _FRAME_BYTES)].decode(errors="ignore")
    return (
        f"[The result of {tool} is too long to show, and reading it failed: {str(error)[:_MAX_ERROR_LENGTH]} "
        f"{remedy} This is how it begins:]\n\n{beginning}"
    )


def _format_further_answers(
    questions: Sequence[str], outcomes: Sequence[ReadResult | Exception]
) -> tuple[str, dict[str, Any]]:
    """Return the answers to further questions: for the model, and, under "readings", for the application.

    Raises:
        Exception: a read failed with an error other than `MemAgentError` or `OSError`.
    """
    require_results([outcome for outcome in outcomes if not isinstance(outcome, MemAgentError | OSError)])
    texts: list[str] = []
    readings: list[dict[str, Any]] = []
    for question_number, (question, outcome) in enumerate(zip(questions, outcomes, strict=True), 1):
        if isinstance(outcome, ReadResult):
            text, values = outcome.findings(), outcome.to_dict()
        else:
            text, values = f"The result could not be read: {outcome}", {"question": question, "error": str(outcome)}
        texts.append(f"Question {question_number}: {question}\n{text}" if len(questions) > 1 else text)
        readings.append(values)
    return "\n\n".join(texts), {"readings": readings}


def _find_long_text(message: ToolMessage, max_tokens: int) -> str | None:
    """Return a tool message's text if it may have more than `max_tokens` tokens: every token is at least one byte."""
    if isinstance(text := message.content, list):
        text = "\n".join(part for part in map(get_block_text, text) if part is not None)
    return text if len(text) * 4 > max_tokens and len(text.encode(errors="replace")) > max_tokens else None


def _replace_text(message: ToolMessage, text: str, values: dict[str, Any]) -> ToolMessage:
    """Return the message with another text, and `values` in its metadata."""
    metadata = {**message.response_metadata, "memagent": values}
    content = replace_text(message.content, text)
    return message.model_copy(update={"content": content, "response_metadata": metadata})
