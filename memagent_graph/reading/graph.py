"""The reader as a LangGraph state machine that works inside any graph, chain or tool."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Checkpointer, Durability

from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents.omissions import require_complete
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.execution import Execution, Recording
from memagent_graph.reading.inputs import check_question, store_document
from memagent_graph.reading.langgraph_internals import (
    CHECKPOINTER,
    DURABILITY,
    config_entry,
    enclosing_exit_stacks,
    state_keys,
)
from memagent_graph.reading.state import ReaderContext, ReaderInput, ReaderOutput, ReaderState, new_run_id
from memagent_graph.reading.strategy import Strategy, wire_strategy
from memagent_graph.reading.structured import with_response_format
from memagent_graph.roles import count_excess_tokens, prompts_for, require_room

if TYPE_CHECKING:
    from memagent_graph.response_format import ResponseFormatSource

_RECURSION_LIMIT = 2**31 - 1
"""Every superstep moves the cursor or ends the run, so the document's length bounds the number of steps."""
_RESULTS = frozenset({"answer", "raw_answer", "memory"})
"""A parent graph must have at least one of these keys of the output."""


class ReaderGraph(CompiledStateGraph[ReaderState, Any, ReaderInput, ReaderOutput]):
    """A compiled reader. It differs from a plain compiled graph in these points:

    - a document given as text, path, bytes, stream or LangChain documents is stored first; state has a reference;
    - it uses its own `ReaderContext`, also inside a parent graph that has another one;
    - its steps do not count against the caller's recursion limit, which is often 25;
    - checkpoints are written before the next step begins, unless the caller chooses otherwise.
    """

    def __init__(self, *, reader_context: ReaderContext, strategy: Strategy, **compiled: Any) -> None:
        super().__init__(**compiled)
        self.reader_context = reader_context
        self.strategy = strategy

    def with_response_format(self, response_format: ResponseFormatSource | None) -> ReaderGraph:
        """Return the same graph with structured answers.

        Args:
            response_format: a Pydantic model, a JSON schema, or None for this graph.

        Raises:
            ResponseFormatError, MissingExtraError, BudgetError: as `reading.structured.with_response_format`.
        """
        if response_format is None:
            return self
        other = copy(self)
        other.reader_context = with_response_format(self.reader_context, response_format)
        return other

    def stream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        context: ReaderContext | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Like LangGraph's method, with the differences in the class's docstring."""
        call = self._call(config, context, durability)
        # If this stream or a parent graph's stream is closed early, pending calls are not waited for.
        cancellation = call["context"].cancellation
        for stack in enclosing_exit_stacks(ensure_config(config)):
            stack.callback(cancellation.cancel)
        parts = super().stream(run_sync(self._with_reference(input), cancellation), **call, **options)
        try:
            for part in parts:  # noqa: UP028  `yield from` would close the other generator first, which waits
                yield part
        except GeneratorExit:
            cancellation.cancel()
            raise

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        context: ReaderContext | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        """Like LangGraph's method, with the differences in the class's docstring."""
        value, call = await self._with_reference(input), self._call(config, context, durability)
        await call["context"].turn.begin()
        try:
            parts: Any = super().astream(value, **call, **options)
            async with aclosing(parts):
                async for part in parts:
                    yield part
        finally:
            call["context"].turn.end()

    async def _with_reference(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "document" not in value or not isinstance(value.get("question"), str):
            raise MemAgentError(
                'the input lacks "question" (text) or "document"',
                hint='Call the graph with {"question": "...", "document": ...}.',
            )
        check_question(value["question"], self.reader_context)
        context = self.reader_context
        document = await store_document(value["document"], context.store)
        require_complete(document, context.on_incomplete)
        return {**value, "run_id": value.get("run_id") or new_run_id(), "document": document}

    def _call(
        self, config: RunnableConfig | None, context: ReaderContext | None, durability: Durability | None
    ) -> dict[str, Any]:
        """Return LangGraph's arguments for a call of the graph, with a new `Execution` as the context.

        With checkpoints, the durability is "sync" unless the caller or the parent graph chooses another: with async a
        kill may lose hundreds of chunks.
        """
        if _RESULTS.isdisjoint(state_keys(config, self, _RESULTS)):
            raise MemAgentError(
                "the state of the graph around has no place for the answer",
                hint='Add the key "answer" to it; "question" and "document" are read, and "memory" is written, too.',
            )
        checkpointed = bool(self.checkpointer or config_entry(config, CHECKPOINTER))
        if checkpointed and not config_entry(config, DURABILITY):
            durability = durability or "sync"
        context = context if isinstance(context, ReaderContext) else self.reader_context
        recording = Recording(context.run_log, checkpointed) if context.run_log else None
        return {
            "config": {**(config or {}), "recursion_limit": _RECURSION_LIMIT},
            "context": Execution(context, recording),
            "durability": durability,
        }


def build_graph(context: ReaderContext, strategy: Strategy, *, checkpointer: Checkpointer = None) -> ReaderGraph:
    """Wire and compile a reader.

    Args:
        context: policy, tokenizer, document store, prompts and budgets.
        strategy: the strategy to run.
        checkpointer: saves the state at every step. With None, the parent graph's checkpointer is used.

    Raises:
        StrategyError: the strategy is not valid.
        PromptError: a role's template lacks a field, or has one that is not allowed.
        BudgetError: a role's prompt does not fit the window.
    """
    graph, identity = wire_strategy(strategy)
    prompts = prompts_for(strategy.roles, context.prompts, trained_prompts_only=context.trained_prompts_only)
    budget, count = context.budget, context.tokenizer.count
    if context.may_shrink and (excess := count_excess_tokens(strategy.roles, prompts, budget, count)) > 0:
        budget = replace(budget, chunk_tokens=max(1, budget.chunk_tokens - excess))
    require_room(strategy.roles, prompts, budget, count)
    compiled = graph.builder.compile(checkpointer=checkpointer, name="MemAgent")
    looks_back = strategy.uses_previous_calls
    context = replace(context, prompts=prompts, budget=budget, strategy=identity, uses_previous_calls=looks_back)
    return ReaderGraph(reader_context=context, strategy=strategy, **vars(compiled))
