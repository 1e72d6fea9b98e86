"""The reader as a LangGraph state machine that works inside any graph, chain or tool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Checkpointer, Durability

from memagent_graph.documents import Document, DocumentRef
from memagent_graph.documents.conversion import ConversionCancellation, in_thread
from memagent_graph.errors import BudgetError, MemAgentError
from memagent_graph.reading.fused import fuse
from memagent_graph.reading.langgraph_internals import (
    CHECKPOINTER,
    DURABILITY,
    exits_of_graphs_around,
    inherited,
)
from memagent_graph.reading.state import ReaderContext, ReaderInput, ReaderOutput, ReaderState, new_run_id
from memagent_graph.reading.strategy import Strategy, wired
from memagent_graph.reading.structured import structured
from memagent_graph.response_format import ResponseFormatSource
from memagent_graph.roles import excess_tokens, prompts_for, require_room

_RECURSION_LIMIT = 2**31 - 1
"""Every superstep moves the cursor or ends the run, so the document's length bounds the number of steps."""


class ReaderGraph(CompiledStateGraph[ReaderState, ReaderContext, ReaderInput, ReaderOutput]):
    """A compiled reader. It differs from a plain compiled graph in these points, however it is called:

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
        """The same graph with structured answers.

        Args:
            response_format: a Pydantic model, a JSON schema, or None for this graph.

        Raises:
            ResponseFormatError, MissingExtraError, BudgetError: as `reading.structured.structured`.
        """
        if response_format is None:
            return self
        other = copy(self)
        other.reader_context = structured(self.reader_context, response_format)
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
        """As in LangGraph; see the class for what is different."""
        own = self._for_this_call(context, config)
        # Whoever breaks a stream off, this one or that of a graph around, does not wait for what the steps wait for.
        cancellation = own.meter.cancellation
        for around in exits_of_graphs_around(ensure_config(config)):
            around.callback(cancellation.cancel)
        parts = super().stream(
            self._with_reference(input),
            _unbounded(config),
            context=own,
            durability=self._durability(config, durability),
            **options,
        )
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
    ) -> AsyncIterator[Any]:
        """As in LangGraph; see the class for what is different."""
        is_ready = isinstance(input, dict) and _is_reference(input.get("document"))
        given = input if is_ready else await in_thread(partial(self._with_reference, input))
        own = self._for_this_call(context, config)
        await own.meter.turn.begin()
        try:
            async for part in super().astream(
                given,
                _unbounded(config),
                context=own,
                durability=self._durability(config, durability),
                **options,
            ):
                yield part
        finally:
            own.meter.turn.end()

    def _with_reference(self, given: Any, cancellation: ConversionCancellation | None = None) -> Any:
        if not isinstance(given, dict):
            return given
        if "document" not in given or not isinstance(given.get("question"), str):
            raise MemAgentError(
                'the input lacks "question" (text) or "document"',
                hint='Call the graph with {"question": "...", "document": ...}.',
            )
        check_question(given["question"], self.reader_context)
        given = {**given, "run_id": given.get("run_id") or new_run_id()}
        return {**given, "document": stored(given["document"], self.reader_context, cancellation)}

    def _for_this_call(self, context: ReaderContext | None, config: RunnableConfig | None) -> ReaderContext:
        chosen = context if isinstance(context, ReaderContext) else self.reader_context
        return chosen.for_one_call(checkpointed=bool(self.checkpointer or inherited(config, CHECKPOINTER)))

    def _durability(self, config: RunnableConfig | None, asked: Durability | None) -> Durability | None:
        """Sync with checkpoints, unless the caller chose otherwise: with async a kill may lose hundreds of chunks."""
        checkpointed = self.checkpointer or inherited(config, CHECKPOINTER)
        return asked or ("sync" if checkpointed and not inherited(config, DURABILITY) else None)


def build_graph(context: ReaderContext, strategy: Strategy, *, checkpointer: Checkpointer = None) -> ReaderGraph:
    """Wire and compile a reader.

    Args:
        context: policy, tokenizer, document store, prompts and budgets.
        strategy: the way of reading.
        checkpointer: where state is saved at every step. With None a parent graph's is used.

    Raises:
        StrategyError: the strategy is not valid.
        PromptError: a role's template lacks a field, or has one that is not allowed.
        BudgetError: a role's prompt does not fit the window.
    """
    graph, identity = wired(strategy)
    prompts = prompts_for(strategy.roles, context.prompts, own_words_only=context.own_words_only)
    budget = context.budget
    if context.may_shrink and (excess := excess_tokens(strategy.roles, prompts, budget, context.tokenizer.count)) > 0:
        budget = replace(budget, chunk_tokens=max(1, budget.chunk_tokens - excess))
    require_room(strategy.roles, prompts, budget, context.tokenizer.count)
    if strategy.loop is not None:
        fuse(graph, strategy.loop)
    compiled = graph.builder.compile(checkpointer=checkpointer, name="MemAgent")
    context = replace(
        context,
        prompts=prompts,
        budget=budget,
        strategy=identity,
        looks_back=strategy.looks_back,
        is_at_end=strategy.is_at_end,
    )
    return ReaderGraph(reader_context=context, strategy=strategy, **vars(compiled))


def check_question(question: str, context: ReaderContext) -> None:
    """Raise `MemAgentError` for a question that is empty or not text, `BudgetError` for one that exceeds its budget."""
    if not isinstance(question, str):
        raise MemAgentError(f"a question is of type {type(question).__name__}", hint="Questions are text.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise MemAgentError(f"the question is not valid Unicode: {error}", hint="Pass it in UTF-8.") from error
    if not question.strip():
        raise MemAgentError("the question is empty", hint="Ask something, with -q on the command line.")
    budget = context.budget.question_tokens
    shown = context.prompts.neutralise(context.question_shown(question))
    if len(shown.encode("utf-8", "replace")) > budget and (tokens := context.tokenizer.count(shown)) > budget:
        fields = " with the answer's fields" if context.question_shown(question) != question else ""
        raise BudgetError(
            f"the question{fields} has {tokens} tokens and its budget is {budget}",
            hint="Shorten it, or raise question_tokens (--question-tokens) and lower chunk_tokens by as much.",
        )


def checked_questions(questions: Iterable[str], context: ReaderContext) -> list[str]:
    """The questions as a list; a single text is one question.

    Raises:
        MemAgentError: there is none, or one is empty or not text.
        BudgetError: one exceeds its budget.
    """
    asked = [questions] if isinstance(questions, str) else list(questions)
    if not asked:
        raise MemAgentError("there is no question", hint="Give at least one.")
    for question in asked:
        check_question(question, context)
    return asked


def stored(document: Any, context: ReaderContext, cancellation: ConversionCancellation | None = None) -> DocumentRef:
    """A document's reference; another source is stored first.

    Raises:
        DocumentError: it cannot be read.
    """
    if _is_reference(document):
        return cast("DocumentRef", document)
    return context.store.add(
        Document.of(document), replace_undecodable=context.replace_undecodable, cancellation=cancellation
    )


def _is_reference(document: Any) -> bool:
    return isinstance(document, dict) and "key" in document and "size" in document


def _unbounded(config: RunnableConfig | None) -> RunnableConfig:
    return {**(config or {}), "recursion_limit": _RECURSION_LIMIT}
