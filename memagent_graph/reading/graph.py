"""The reader as a LangGraph state machine that works inside any graph, chain or tool."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Checkpointer, Command

from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents.omissions import require_complete
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.execution import Execution, Recording
from memagent_graph.reading.inputs import check_question, store_document
from memagent_graph.reading.langgraph_internals import (
    CHECKPOINTER,
    DURABILITY,
    find_enclosing_exit_stacks,
    find_writable_keys,
    get_config_entry,
)
from memagent_graph.reading.state import ReaderContext, ReaderInput, ReaderOutput, ReaderState, new_run_id
from memagent_graph.reading.strategy import Strategy, StrategyGraph
from memagent_graph.reading.structured import with_response_format
from memagent_graph.response_format import ResponseFormatSource
from memagent_graph.roles import complete_prompts, fit_chunk_tokens, require_room

_RECURSION_LIMIT = 2**31 - 1
"""Every loop moves the cursor or ends the run, so the document's length bounds the number of supersteps."""
_RESULT_KEYS = frozenset({"answer", "raw_answer", "memory"})
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
        """Return a copy of this graph with structured answers.

        Args:
            response_format: a Pydantic model, a JSON schema, or None for this graph.

        Raises:
            ResponseFormatError, MissingExtraError, BudgetError: as `reading.structured.with_response_format`.
        """
        if response_format is None:
            return self
        structured_graph = copy(self)
        structured_graph.reader_context = with_response_format(self.reader_context, response_format)
        return structured_graph

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:  # noqa: A002
        """Like LangGraph's method, with the differences in the class's docstring."""
        arguments = self._make_call_arguments(config, options)
        # If this stream or a parent graph's stream is closed early, pending calls are not waited for.
        cancellation = arguments["context"].cancellation
        for stack in find_enclosing_exit_stacks(ensure_config(config)):
            stack.callback(cancellation.cancel)
        stream = super().stream(run_sync(self._prepare_input(input), cancellation), **arguments)
        try:
            for item in stream:  # noqa: UP028  `yield from` would close the other generator first, which waits
                yield item
        except GeneratorExit:
            cancellation.cancel()
            raise

    async def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncGenerator[Any]:  # noqa: A002
        """Like LangGraph's method, with the differences in the class's docstring."""
        value, arguments = await self._prepare_input(input), self._make_call_arguments(config, options)
        await arguments["context"].processor_turn.begin()
        try:
            stream: Any = super().astream(value, **arguments)
            async with aclosing(stream):
                async for item in stream:
                    yield item
        finally:
            arguments["context"].processor_turn.end()

    async def _prepare_input(self, inputs: Any) -> Any:
        if inputs is None or isinstance(inputs, Command):
            return inputs
        if not isinstance(inputs, dict):  # the state of a parent graph is a Pydantic model or a dataclass
            values = {key: getattr(inputs, key, None) for key in ReaderInput.__annotations__}
            inputs = {key: value for key, value in values.items() if value is not None}
        if "document" not in inputs or not isinstance(inputs.get("question"), str):
            raise MemAgentError(
                'the input lacks "question" (text) or "document"',
                hint='Call the graph with {"question": "...", "document": ...}.',
            )
        check_question(inputs["question"], self.reader_context)
        context = self.reader_context
        document = await store_document(inputs["document"], context.store)
        require_complete(document, context.on_incomplete)
        return {**inputs, "run_id": inputs.get("run_id") or new_run_id(), "document": document}

    def _make_call_arguments(self, config: RunnableConfig | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return LangGraph's arguments for a call of the graph, with a new `Execution` as the context.

        With checkpoints, the durability is "sync" unless the caller or the parent graph chooses another: with "async",
        hundreds of chunks may be lost if the process is killed.
        """
        if _RESULT_KEYS.isdisjoint(find_writable_keys(config, self, _RESULT_KEYS)):
            raise MemAgentError(
                "the parent graph's state has no key for the answer",
                hint='Add the key "answer" to it; "question" and "document" are read, and "memory" is written, too.',
            )
        has_checkpoints = bool(self.checkpointer or get_config_entry(config, CHECKPOINTER))
        durability, context = options.get("durability"), options.get("context")
        if has_checkpoints and not get_config_entry(config, DURABILITY):
            durability = durability or "sync"
        context = context if isinstance(context, ReaderContext) else self.reader_context
        recording = Recording(context.run_log, has_checkpoints) if context.run_log else None
        return {
            **options,
            "config": {**(config or {}), "recursion_limit": _RECURSION_LIMIT},
            "context": Execution(context, recording, has_checkpoints),
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
    graph = StrategyGraph(strategy)
    prompts = complete_prompts(strategy.roles, context.prompts, trained_prompts_only=context.trained_prompts_only)
    budget, count = context.budget, context.tokenizer.count
    if context.may_shrink_chunks:
        budget = replace(budget, chunk_tokens=max(1, fit_chunk_tokens(strategy.roles, prompts, budget, count)))
    require_room(strategy.roles, prompts, budget, count)
    compiled = graph.builder.compile(checkpointer=checkpointer, name="MemAgent")
    context = replace(
        context,
        prompts=prompts,
        budget=budget,
        strategy=strategy.name,
        strategy_fingerprint=graph.compute_fingerprint(strategy),
        uses_previous_calls=strategy.uses_previous_calls,
    )
    return ReaderGraph(reader_context=context, strategy=strategy, **vars(compiled))
