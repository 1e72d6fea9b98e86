"""One read inside someone else's graph or chain: its callbacks, checkpointer and stream, and a `ReadResult` at the end.

`MemAgent.read` is independent, with its own checkpoints. Here the reader's graph is called with the caller's config, so
that a read is a part of the run around it, and continues at its chunk when that run is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.types import StateSnapshot, StreamMode

from langchain_memagent.task_places import TaskPlace, kept_for_retries, own_place
from memagent_graph import MemAgent, MemoryUpdate, ReaderGraph, ReadResult
from memagent_graph.calls import calls_of
from memagent_graph.concurrency.pace import AT_ONCE, Reach, in_passes, in_passes_of_threads
from memagent_graph.reading.history import Lineage
from memagent_graph.reading.inputs import checked_questions, stored_document
from memagent_graph.reading.outcome import Progress, raise_first, result_from_state
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource

PARTS: Final[list[StreamMode]] = ["updates", "values"]
"""The parts of a reader's stream that `FollowedRead` needs."""


class PreparedGraph:
    """A reader's graph, made when it is first needed: only then may its policy be asked about its model.

    Args:
        agent: the reader, or its graph, which is used directly.
        response_format: the form of the answers, if they are structured.
    """

    def __init__(self, agent: MemAgent | ReaderGraph, response_format: ResponseFormatSource | None = None) -> None:
        self._format = None if response_format is None else ResponseFormat.of(response_format)
        self._reader = agent.with_response_format(self._format) if isinstance(agent, ReaderGraph) else agent

    def get(self) -> ReaderGraph:
        """The graph. Raises what `MemAgent.graph` raises."""
        if not isinstance(self._reader, ReaderGraph):
            self._reader = self._reader.graph(response_format=self._format)
        return self._reader

    async def aget(self) -> ReaderGraph:
        """The graph. Raises what `MemAgent.agraph` raises."""
        if not isinstance(self._reader, ReaderGraph):
            self._reader = await self._reader.agraph(response_format=self._format)
        return self._reader


def read(
    graph: ReaderGraph, document: Any, question: str, config: RunnableConfig | None = None, pace: Reach | None = None
) -> ReadResult:
    """Read as a part of the run of `config`, or of the calling context.

    Args:
        graph: from `MemAgent.graph`; it must have no checkpointer of its own.
        document: anything that `Document.of` accepts, or a reference from a `DocumentStore`.
        question: the question.
        config: the caller's; by default that of the surrounding runnable, if there is one.
        pace: keeps the read together with others of the document.

    Raises:
        DocumentError, BudgetError, PolicyError: as `MemAgent.read`.
    """
    reference, followed = stored_document(document, graph.reader_context), FollowedRead()
    place = TaskPlace(kept_for_retries(ensure_config(config)), reference, question)
    while (held := place.to_look_up) is not None:
        place.found(graph.get_state(held).values)
    given, context = {"question": question, "document": reference}, replace(graph.reader_context, pace=pace)
    for mode, part in graph.stream(given, place.config, context=context, stream_mode=PARTS):
        if followed.began_earlier(mode, part):
            followed.complete(graph.get_state_history(place.config))
    return followed.result(graph)


async def aread(
    graph: ReaderGraph, document: Any, question: str, config: RunnableConfig | None = None, pace: Reach | None = None
) -> ReadResult:
    """`read` for asynchronous code."""
    reference, followed = await asyncio.to_thread(stored_document, document, graph.reader_context), FollowedRead()
    place = TaskPlace(kept_for_retries(ensure_config(config)), reference, question)
    while (held := place.to_look_up) is not None:
        place.found((await graph.aget_state(held)).values)
    given, context = {"question": question, "document": reference}, replace(graph.reader_context, pace=pace)
    async for mode, part in graph.astream(given, place.config, context=context, stream_mode=PARTS):
        if followed.began_earlier(mode, part):
            followed.complete([snapshot async for snapshot in graph.aget_state_history(place.config)])
    return followed.result(graph)


def read_each(
    graph: ReaderGraph, document: Any, questions: Iterable[str], config: RunnableConfig | None = None
) -> list[ReadResult]:
    """Read once for several questions, as `MemAgent.read` does, as a part of the run around it.

    Each question has its own checkpoint namespace. When the run is resumed, every question continues at its chunk, and
    one that was answered returns its result again.

    Args:
        graph: from `MemAgent.graph`; it must have no checkpointer of its own.
        document: anything that `Document.of` accepts, or a reference from a `DocumentStore`.
        questions: at least one. Equal ones are read for once, and share the result.
        config: as for `read`.

    Raises:
        MemAgentError, BudgetError: a question is missing, empty or too long; nothing was read.
        DocumentError, PolicyError: the first error of a question, when the others are done.
    """
    context, config = graph.reader_context, ensure_config(config)
    asked = checked_questions(questions, context)
    reference, places = stored_document(document, context), _places(asked, config)
    reads = [partial(read, graph, reference, question, place) for question, place in places.items()]
    outcomes = dict(zip(places, in_passes_of_threads(reads, AT_ONCE), strict=True))
    return raise_first([outcomes[question] for question in asked])


async def aread_each(
    graph: ReaderGraph, document: Any, questions: Iterable[str], config: RunnableConfig | None = None
) -> list[ReadResult]:
    """`read_each` for asynchronous code."""
    context, config = graph.reader_context, ensure_config(config)
    asked = checked_questions(questions, context)
    reference, places = await asyncio.to_thread(stored_document, document, context), _places(asked, config)
    reads = [partial(aread, graph, reference, question, place) for question, place in places.items()]
    outcomes = dict(zip(places, await in_passes(reads, AT_ONCE), strict=True))
    return raise_first([outcomes[question] for question in asked])


def _places(asked: list[str], config: RunnableConfig) -> dict[str, RunnableConfig]:
    """Each different question's config. The names are those that LangGraph uses for a task's first graph and for
    others.
    """
    return {
        question: own_place(config, str(number) if number else "")
        for number, question in enumerate(dict.fromkeys(asked))
    }


@dataclass
class FollowedRead:
    """Collects a read's states and changes from the stream of another graph.

    Args:
        report: is given the run's id and every update as it is made.
    """

    report: Callable[[str, MemoryUpdate], None] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    def began_earlier(self, mode: str, part: Any) -> bool:
        """Take the next part of the stream.

        Returns:
            Whether an earlier execution has read chunks, which `complete` has to add before the next part.
        """
        if mode == "values":
            is_first, self.state = not self.state, part
            if is_first:
                self.progress = Progress(document_bytes=part["document"]["size"])
            return is_first and bool(part.get("chunks_read"))
        for change in part.values() if mode == "updates" else ():
            before, state = len(self.progress.steps), {"memory": self.state.get("memory", ""), **(change or {})}
            self.progress.steps += calls_of(state.get("steps", ()), state)
            if self.report:
                for update in self.progress.updates_since(before, complete=bool(state.get("chunks_read"))):
                    self.report(self.state["run_id"], update)
        return False

    def complete(self, snapshots: Iterable[StateSnapshot]) -> None:
        """Add the chunks that were read earlier.

        After an edited memory there are two branches; only the one that leads to the newest state counts.
        """
        steps, lineage = self.progress.steps, Lineage()
        for snapshot in snapshots:
            if lineage.includes(snapshot) and snapshot.values.get("run_id") == self.state["run_id"]:
                steps = [*calls_of(snapshot.values.get("steps", ()), snapshot.values), *steps]
        self.progress = Progress({step.id: step for step in steps}.values(), self.progress.document_bytes)

    def result(self, graph: ReaderGraph) -> ReadResult:
        """The whole read, as `MemAgent` would return it."""
        return result_from_state(self.state, self.progress.trace, graph.reader_context)
