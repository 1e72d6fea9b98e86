"""Reads in tools, nodes and middleware. When a graph executes a task again, its reads continue where they stopped.

The run id of such a read is derived from the task and from what is read. Its state is in the reader's own checkpoints
or, if it has none, in the user's data folder. So a task that is executed again finds its reads, whoever executes it:
the graph, after a kill, an error or an interrupt; LangGraph's `RetryPolicy`; or LangChain's `ToolRetryMiddleware`. The
checkpoints of the graph itself contain no state of a read.
"""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.config import get_stream_writer

from memagent_graph import MemAgent, ReadResult
from memagent_graph.concurrency.background import Cancellation, run_sync
from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, Barrier, read_in_passes
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.inputs import store_document
from memagent_graph.reading.langgraph_internals import find_enclosing_exit_stacks
from memagent_graph.reading.state import Limits, ReaderContext, new_run_id
from memagent_graph.reading.structured import with_response_format
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource
from memagent_graph.storage.private_files import get_default_checkpoints_path
from memagent_graph.trace import MemoryUpdate

T = TypeVar("T")
OnUpdate = Callable[[str, str, MemoryUpdate], None]
"""Called with a run's id, its question, and each of its memory updates."""


class GraphReads:
    """The reads of one tool, node or middleware.

    Args:
        agent: the reader. If it has no checkpoints, they are created in the user's data folder at the first read.
        response_format: the form of the answers, if they are structured.
    """

    def __init__(self, agent: MemAgent, response_format: ResponseFormatSource | None = None) -> None:
        if not isinstance(agent, MemAgent):
            raise MemAgentError(
                f"the reader must be a MemAgent, got {type(agent).__name__}",
                hint="Pass the MemAgent. Its graph, agent.graph(), can be a node by itself: add_node(name, graph).",
            )
        self._agent = agent
        self._response_format = None if response_format is None else ResponseFormat.of(response_format)

    @cached_property
    def reader(self) -> MemAgent:
        """The reader, which has checkpoints."""
        if self._agent.keeps_checkpoints:
            return self._agent
        return self._agent.copy(checkpoints=get_default_checkpoints_path())

    async def prepare(self) -> ReaderContext:
        """Return the reader's context. Raises what `MemAgent.aprepare` raises."""
        return with_response_format(await self.reader.aprepare(), self._response_format)

    async def store(self, document: Any) -> DocumentRef:
        """Store a document that `Document.of` accepts, and return its reference; a reference is returned unchanged."""
        return await store_document(document, self.reader.store)

    async def read_each(
        self,
        document: DocumentRef | Callable[[], Awaitable[DocumentRef]],
        run_ids: Mapping[str, str | None],
        report: OnUpdate,
        *,
        limits: Limits | None = None,
        past_limit: Container[str] = (),
    ) -> list[ReadResult | Exception]:
        """Read a document once for several questions; a run that has begun continues at the chunk it had reached.

        Args:
            document: a document's reference, or a function that returns it, called for every run that has not begun.
            run_ids: each question's run id, from `derive_run_id`; None for a run that nobody continues.
            report: called with every update.
            limits: where the read for one question stops early; the reader's own if left out.
            past_limit: the questions whose runs continue even if they stopped at a limit.

        Returns:
            The result or the error of each question, in order. All reads run to their end.
        """

        async def read(question: str, task_run_id: str | None, barrier: Barrier) -> ReadResult:
            run_id = task_run_id or new_run_id()
            return await self.reader.aresume_or_read(
                run_id, document, question, may_resume=task_run_id is not None, past_limit=question in past_limit,
                on_update=partial(report, run_id, question), response_format=self._response_format, limits=limits,
                barrier=barrier
            )  # fmt: skip

        reads = [partial(read, question, task_run_id) for question, task_run_id in run_ids.items()]
        return await read_in_passes(reads, MAX_SHARED_READS)


def derive_run_id(config: RunnableConfig, *key: object) -> str | None:
    """Return a run id that is the same in every execution of the task of `config`; None outside a graph.

    Args:
        config: the config of the node or tool.
        key: values that distinguish the read from other reads of the task, such as the names of tool and policy.
    """
    configurable = config.get("configurable", {})
    if not configurable.get("checkpoint_ns"):
        return None
    key_text = repr((configurable.get("thread_id"), configurable["checkpoint_ns"], *key))
    return "in-" + hashlib.sha256(key_text.encode("utf-8", "replace")).hexdigest()[:24]


def run_in_graph(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for a synchronous node or tool. Closing the stream of an enclosing graph cancels it.

    Raises:
        PermanentError: the stream was closed early.
    """
    cancellation = Cancellation()
    for exit_stack in find_enclosing_exit_stacks(ensure_config()):
        exit_stack.callback(cancellation.cancel)
    return run_sync(coroutine, cancellation)


@dataclass(frozen=True)
class CallingGraph:
    """The graph that calls a read: its config, and its custom stream, which exists only in its context."""

    config: RunnableConfig
    write_event: Callable[[Any], None]
    context: contextvars.Context
    tool_call_id: str | None = None

    @classmethod
    def capture(cls, tool_call_id: str | None = None) -> CallingGraph:
        """Return the graph that runs the calling code. Outside a graph, events are dropped."""
        write_event: Callable[[Any], None] = lambda event: None  # noqa: E731  outside a graph
        with suppress(RuntimeError, KeyError):
            write_event = get_stream_writer()
        return cls(ensure_config(), write_event, contextvars.copy_context(), tool_call_id)

    def report_update(self, run_id: str, question: str, update: MemoryUpdate, kind: str = "memory_update") -> None:
        """Write a memory update to the custom stream."""
        event = {
            "type": f"memagent.{kind}",
            "run_id": run_id,
            "question": question,
            "tool_call_id": self.tool_call_id,
            "chunk_index": update.chunk_index,
            "progress": update.progress,
            "memory": update.memory,
        }
        self.context.copy().run(self.write_event, event)
