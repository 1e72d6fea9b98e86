"""`memagent_node`: reading as one node of any `StateGraph`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from langchain_core.runnables import Runnable, RunnableConfig, ensure_config

from langchain_memagent.graph_reads import CallingGraph, GraphReads, derive_run_id, run_in_graph
from memagent_graph import MemAgent, ReadResult
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.inputs import check_questions
from memagent_graph.reading.langgraph_internals import find_writable_keys
from memagent_graph.reading.run_history import require_results
from memagent_graph.response_format import ResponseFormatSource

StateSource: TypeAlias = str | Callable[[Any], Any]
"""A key of the parent's state, or a function of it."""


def memagent_node(
    agent: MemAgent,
    *,
    question: StateSource = "question",
    document: StateSource = "document",
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
    """Return a node that reads a document for one question or several, and writes the answers into the parent's state.

    It works under `invoke` and `ainvoke`, with the parent's callbacks, and without counting against the parent's
    recursion limit. Every memory update is on the parent's stream (`stream_mode="custom"`). When the parent is resumed
    after an error or a kill, the read continues at the chunk it had reached. Its state is in the reader's checkpoints,
    by default in the user's data folder; if a parent may be resumed on another machine, give the reader a database that
    both machines reach: `MemAgent(checkpoints="postgresql://...")`. Every execution of the node is a separate read: in
    parallel branches, in a loop, and several documents by `Send`.

    >>> builder.add_node("read", memagent_node(agent, document="report"))  # doctest: +SKIP

    If the question is a list of texts, the document is read once for all of them, and every written key gets a list in
    their order: the state has `question: list[str]` and `answer: list[str | None]`. If one question fails, its error is
    raised when the others are done. Their results are kept, and they are not read again.

    To have the reader's steps in the parent's drawing, its memory in the parent's `get_state(subgraphs=True)` and
    `update_state`, and its state in the parent's checkpoints, add the reader's graph instead:
    `builder.add_node("read", agent.graph())`, in a state with the keys `question`, `document` and `answer`.

    Args:
        agent: the reader; it is prepared at the first call.
        question: a key of the state with a text or a list of texts, or a function of the state (with `Send`: of its
            argument) that returns them.
        document: the same for the document: text, `pathlib.Path`, LangChain documents, or, so that the parent's
            checkpoints stay small, a reference from `agent.store.add`.
        answer: the key for the answer (text; None if a limit stopped the read); None writes none.
        memory: the key for the final memory.
        run_id: the key for the run's id, for the run log and the command line.
        evidence: the key for the quotes that support the answer: a list of `Evidence` as dicts.
        stop_reason: the key for why the read ended, as text.
        response_format: the form of the answer: a Pydantic model, or a JSON schema as a dict. `answer` is then JSON.
        value: the key for the answer as JSON values, which checkpoints can store; None if it does not have the form.
        write: for everything else, a function of the state and the `ReadResult` (for several questions, a list of them)
            that returns more changes, for example a list of answers with `Send`:
            `lambda state, result: {"findings": [(state["title"], result.answer)]}`.
        name: the node's name in drawings and traces.

    Raises:
        ResponseFormatError, MissingExtraError: `response_format` cannot be used.
        MemAgentError: when the node runs: the state lacks a key that it reads or writes, or has no question; and
            everything that `MemAgent.read` raises.
    """
    reads = GraphReads(agent, response_format)

    def select_values(result: ReadResult) -> dict[str, Any]:
        """Return the values of one result. Quotes are looked up in the document's text, which may take a moment."""
        values_by_key = {answer: result.answer, memory: result.memory, run_id: result.run_id, value: result.json_value}
        values_by_key[stop_reason] = result.stop_reason.value
        if evidence is not None:
            values_by_key[evidence] = [asdict(quote) for quote in result.evidence]
        return {key: content for key, content in values_by_key.items() if key is not None}

    def make_change(state: Any, results: list[ReadResult], *, is_list: bool) -> dict[str, Any]:
        """Return what the node writes."""
        rows = [select_values(result) for result in results]
        changes = {key: [row[key] for row in rows] for key in rows[0]} if is_list else rows[0]
        return changes | dict(write(state, results if is_list else results[0]) if write else {})

    def get_inputs(state: Any) -> tuple[Any, Any]:
        return _get_value(state, document, "document"), _get_value(state, question, "question")

    async def read(document_value: Any, questions: Any, config: RunnableConfig) -> list[ReadResult]:
        texts = check_questions(questions, await reads.prepare())
        reference = await reads.store(document_value)
        key = name, agent.policy.name, reference["key"]
        run_ids = {text: derive_run_id(config, *key, text) for text in texts}
        outcomes = dict(
            zip(run_ids, await reads.read_each(reference, run_ids, CallingGraph.capture().report_update), strict=True)
        )
        return require_results([outcomes[text] for text in texts])

    def run(state: Any, config: RunnableConfig) -> dict[str, Any]:
        document_value, questions = get_inputs(state)
        return make_change(
            state, run_in_graph(read(document_value, questions, config)), is_list=not isinstance(questions, str)
        )

    async def arun(state: Any, config: RunnableConfig) -> dict[str, Any]:
        document_value, questions = get_inputs(state)
        results = await read(document_value, questions, config)
        return await asyncio.to_thread(make_change, state, results, is_list=not isinstance(questions, str))

    written_keys = [key for key in (answer, memory, run_id, evidence, stop_reason, value) if key is not None]
    return _StateNode(name, run, arun, written_keys)


@dataclass(eq=False)
class _StateNode(Runnable[Any, dict[str, Any]]):
    """A function of the state whose run shows the state's keys, but not their values, which may be documents.

    The parent's run of the node still shows the state, unless the node was added with a `TracePolicy`.
    """

    name: str | None
    run: Callable[[Any, RunnableConfig], dict[str, Any]]
    arun: Callable[[Any, RunnableConfig], Awaitable[dict[str, Any]]]
    written_keys: Collection[str]
    """The keys that every execution writes."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:  # noqa: A002
        """Run it. Raises MemAgentError if LangGraph would drop what it writes, before it reads if that is known."""
        self._require_keys(self.written_keys, config)
        change = self._call_with_config(
            lambda _, config: self.run(input, config), _list_keys(input), ensure_config(config)
        )
        self._require_keys(change, config)
        return change

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:  # noqa: A002
        """`invoke` for asynchronous code."""
        self._require_keys(self.written_keys, config)
        change = await self._acall_with_config(
            lambda _, config: self.arun(input, config), _list_keys(input), ensure_config(config)
        )
        self._require_keys(change, config)
        return change

    def _require_keys(self, keys: Collection[str], config: RunnableConfig | None) -> None:
        if missing_keys := [f'"{key}"' for key in keys if key not in find_writable_keys(config, self, keys)]:
            raise MemAgentError(
                f"the graph's state has no {' and no '.join(missing_keys)}, "
                "and LangGraph drops what a node writes there",
                hint='Add the key to the state, or name another: memagent_node(..., answer="...").',
            )


def _list_keys(state: Any) -> dict[str, list[str]]:
    return {"keys of the state": list(state if isinstance(state, Mapping) else getattr(state, "__dict__", ()))}


def _get_value(state: Any, source: StateSource, name: str) -> Any:
    if callable(source):
        return source(state)
    value = state.get(source) if isinstance(state, Mapping) else getattr(state, source, None)
    if value is None:
        raise MemAgentError(
            f'the state that reached this node has no "{source}" to take the {name} from',
            hint=f'Set it in a node before, or choose another key: memagent_node(..., {name}="...").',
        )
    return value
