"""`memagent_node`: reading as one node of any `StateGraph`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, ensure_config

from langchain_memagent.subgraph_reads import PreparedGraph, aread, aread_each, read, read_each
from memagent_graph import MemAgent, ReaderGraph, ReadResult
from memagent_graph.errors import MemAgentError
from memagent_graph.response_format import ResponseFormatSource

From: TypeAlias = str | Callable[[Any], Any]
"""A key of the parent's state, or a function of it."""


def memagent_node(
    agent: MemAgent | ReaderGraph,
    *,
    question: From = "question",
    document: From = "document",
    answer: str | None = "answer",
    memory: str | None = None,
    run_id: str | None = None,
    evidence: str | None = None,
    stop_reason: str | None = None,
    response_format: ResponseFormatSource | None = None,
    value: str | None = None,
    write: Callable[[Any, Any], Mapping[str, Any]] | None = None,
    name: str = "memagent",
) -> Runnable[Any, dict[str, Any]]:
    """A node that reads a document for one question or several, and writes the answers into the parent's state.

    It runs as a subgraph: on the parent's checkpointer, store, callbacks and stream (progress comes with
    `subgraphs=True`, `stream_mode="custom"`), under `invoke` and `ainvoke`, and without counting against the parent's
    recursion limit. When the parent is resumed after an error or a kill, it continues at the chunk it was at. Every
    execution of the node is a separate read: in parallel branches, in a loop, and several documents by `Send`.

    >>> builder.add_node("read", memagent_node(agent, document="report"))  # doctest: +SKIP

    If the question is a list of texts, the document is read once for all of them, and every written key gets a list in
    their order: the state has `question: list[str]` and `answer: list[str | None]`. An error of one is raised when the
    others are done; with a checkpointer their results are kept, and they are not read again.

    Args:
        agent: the reader; it is prepared at the first call. Pass `agent.graph()` instead to have the reader's steps in
            the parent's drawing, and its memory in the parent's `get_state(subgraphs=True)` and `update_state`.
        question: a key of the state, or a function of it (of the argument, for `Send`), for a text or a list of texts.
        document: the same for the document: text, `pathlib.Path`, LangChain documents, or, so that the parent's
            checkpoints stay small, a reference from `agent.store.add`.
        answer: the key for the answer (text; None if a limit stopped the read); None writes none.
        memory: the key for the final memory.
        run_id: the key for the run's id, for the run log and the command line.
        evidence: the key for the quotes that support the memory: a list of `Evidence` as dicts.
        stop_reason: the key for why the read ended, as text.
        response_format: the form of the answer: a Pydantic model, or a JSON schema as a dict. `answer` is then JSON.
        value: the key for its content as JSON values, which checkpoints can store; None if it does not have the form.
        write: for everything else, a function of the state and the `ReadResult` (for several questions, a list of them)
            that returns more changes, for example a list of answers with `Send`:
            `lambda state, result: {"findings": [(state["title"], result.answer)]}`.
        name: its name in drawings and traces.

    Raises:
        ResponseFormatError, MissingExtraError: `response_format` cannot be used.
        MemAgentError: when it runs: a key is missing in the state, or has no question; and everything that
            `MemAgent.read` raises.
    """
    prepared = PreparedGraph(agent, response_format)
    # LangGraph finds subgraphs among the names that a node's function uses.
    subgraph = prepared.get() if isinstance(agent, ReaderGraph) else None

    def given(state: Any) -> tuple[Any, str | list[str]]:
        return _taken(state, document, "document"), _asked(_taken(state, question, "question"))

    def plain(result: ReadResult) -> dict[str, Any]:
        """The values of one result. Quotes are looked up in the document's text, which may take a moment."""
        values = {answer: result.answer, memory: result.memory, run_id: result.run_id}
        values[stop_reason] = result.stop_reason.value
        written: dict[str, Any] = {key: value for key, value in values.items() if key is not None}
        if value is not None:
            written[value] = result.json_value
        if evidence is not None:
            written[evidence] = [asdict(each) for each in result.evidence]
        return written

    def changes(state: Any, found: ReadResult | list[ReadResult]) -> dict[str, Any]:
        """What the node writes."""
        if isinstance(found, ReadResult):
            written = plain(found)
        else:
            each = [plain(result) for result in found]
            written = {key: [values[key] for values in each] for key in each[0]}
        return written | dict(write(state, found) if write else {})

    def run(state: Any, config: RunnableConfig) -> dict[str, Any]:
        source, asked = given(state)
        graph = subgraph or prepared.get()
        if isinstance(asked, str):
            return changes(state, read(graph, source, asked, config))
        return changes(state, read_each(graph, source, asked, config))

    async def arun(state: Any, config: RunnableConfig) -> dict[str, Any]:
        source, asked = given(state)
        graph = subgraph or await prepared.aget()
        if isinstance(asked, str):
            return await asyncio.to_thread(changes, state, await aread(graph, source, asked, config))
        return await asyncio.to_thread(changes, state, await aread_each(graph, source, asked, config))

    return _UntracedState(run, arun, name=name)


class _UntracedState(RunnableLambda[Any, dict[str, Any]]):
    """A function of the state whose run shows the state's keys, but not their values, which may be documents.

    The run of the parent's own node around it shows the state, unless that was added with a `TracePolicy`.
    """

    def invoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:  # noqa: A002
        """Run it."""
        function: Any = self.func

        def run(shown: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> dict[str, Any]:
            written: dict[str, Any] = function(input, config)
            return written

        return self._call_with_config(run, _keys(input), ensure_config(config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:  # noqa: A002
        """`invoke` for asynchronous code."""
        function: Any = self.afunc

        async def run(
            shown: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> dict[str, Any]:
            written: dict[str, Any] = await function(input, config)
            return written

        return await self._acall_with_config(run, _keys(input), ensure_config(config))


def _keys(state: Any) -> dict[str, list[str]]:
    return {"keys of the state": list(state if isinstance(state, Mapping) else getattr(state, "__dict__", ()))}


def _taken(state: Any, source: From, what: str) -> Any:
    if callable(source):
        return source(state)
    value = state.get(source) if isinstance(state, Mapping) else getattr(state, source, None)
    if value is None:
        raise MemAgentError(
            f'the state that reached this node has no "{source}" to take the {what} from',
            hint=f'Set it in a node before, or name another key: memagent_node(..., {what}="...").',
        )
    return value


def _asked(question: Any) -> str | list[str]:
    if isinstance(question, str):
        return question
    if isinstance(question, list | tuple):
        return list(question)
    raise MemAgentError(
        f"the question is of type {type(question).__name__}, not a text or a list of texts",
        hint="Name the key that has it, or compute it from the state: memagent_node(..., question=lambda state: ...).",
    )
