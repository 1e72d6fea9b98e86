"""Reading inside an agent's checkpoints: a graph over the questions of one tool call.

It has no checkpointer of its own, so it uses the agent's, and so do its readers; each step is saved before the next
begins, however the agent was invoked. When an agent that was killed resumes, the tool is called again, and the graph
continues: the document is not opened again, answered questions keep their readings, and the others continue at
the chunk they were at. The questions are read in parallel in one pass, each in its own task.

Each tool call's checkpoints have their own namespace.
"""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, cast

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from langchain_memagent.subgraph_reads import PARTS, FollowedRead
from langchain_memagent.task_places import kept_at, own_place, resuming
from langchain_memagent.tool.call import Outcome, ReadCall
from langchain_memagent.tool.readings import Reading, failed_reading, reading_of
from memagent_graph.concurrency.background import run_sync
from memagent_graph.concurrency.pace import AT_ONCE, Pace, Reach
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.graph import ReaderGraph
from memagent_graph.reading.langgraph_internals import CHECKPOINTER, inherited
from memagent_graph.reading.state import ReaderContext, new_run_id

_FEW_STEPS = 25
"""Supersteps of the graph over the questions, whose readers count their own; a caller's limit may be lower."""


def has_checkpointer(config: RunnableConfig) -> bool:
    """Whether the config is that of a graph with a checkpointer."""
    return bool(inherited(config, CHECKPOINTER))


def read_in_agent(call: ReadCall, config: RunnableConfig) -> Outcome:
    """Read with every question, in the checkpoints of the agent that calls the tool with `config`.

    Raises:
        DocumentError: the document cannot be read.
        MemAgentError: a read failed, and the call raises errors.
    """
    graph = _over_questions(call, call.agent.graph(response_format=call.response_format))
    place = _own_place(call, config)
    if call.key is not None and graph.get_state(kept_at(place)).values:
        place = resuming(place)  # a middleware called the tool again
    return _outcome(graph.invoke({}, place, durability="sync"))


async def aread_in_agent(call: ReadCall, config: RunnableConfig) -> Outcome:
    """`read_in_agent` for asynchronous agents."""
    graph = _over_questions(call, await call.agent.agraph(response_format=call.response_format))
    place = _own_place(call, config)
    if call.key is not None and (await graph.aget_state(kept_at(place))).values:
        place = resuming(place)
    return _outcome(await graph.ainvoke({}, place, durability="sync"))


def _own_place(call: ReadCall, config: RunnableConfig) -> RunnableConfig:
    """The config of a graph whose checkpoints are in this tool call's own namespace."""
    own = config if call.key is None else own_place(config, f"read_long_document:{call.key}")
    # Without a number, LangGraph would limit the questions in parallel by the machine's processors.
    return {**own, "recursion_limit": _FEW_STEPS, "max_concurrency": config.get("max_concurrency") or AT_ONCE}


class _Questions(TypedDict, total=False):
    """State of the graph over the questions."""

    document: DocumentRef
    readings: Annotated[dict[str, Reading], operator.or_]
    """By the question's index. A retried call replaces its entry."""


class _Asked(TypedDict):
    """The input of the task for one question."""

    index: int
    document: DocumentRef


def _over_questions(call: ReadCall, reader: ReaderGraph) -> Any:
    pace = Pace()

    async def astore(given: Any) -> Any:
        return {"document": await call.store_document()}

    def store(given: Any) -> Any:
        return run_sync(astore(given))

    def read(asked: _Asked, config: RunnableConfig) -> Any:
        with pace.reader() as reach:
            read = _Read(call, reader, asked, config, reach)
            try:
                if read.earlier and not reader.get_state(read.place()).values:
                    left_off = read.left_off(reader.get_state(read.place(read.earlier[-1])).values)
                    if left_off is not None:
                        reader.update_state(read.place(), left_off, as_node=reader.strategy.continues_after)
                for mode, part in reader.stream(*read.start, **read.options):
                    if read.followed.began_earlier(mode, part):
                        for place in read.earlier_places:
                            read.followed.complete(reader.get_state_history(place))
                reading = read.reading()
            except MemAgentError as error:
                reading = read.failed(error)
        return {"readings": {str(asked["index"]): reading}}

    async def aread(asked: _Asked, config: RunnableConfig) -> Any:
        with pace.reader() as reach:
            read = _Read(call, reader, asked, config, reach)
            try:
                if read.earlier and not (await reader.aget_state(read.place())).values:
                    left_off = read.left_off((await reader.aget_state(read.place(read.earlier[-1]))).values)
                    if left_off is not None:
                        await reader.aupdate_state(read.place(), left_off, as_node=reader.strategy.continues_after)
                async for mode, part in reader.astream(*read.start, **read.options):
                    if read.followed.began_earlier(mode, part):
                        for place in read.earlier_places:
                            read.followed.complete([each async for each in reader.aget_state_history(place)])
                reading = await asyncio.to_thread(read.reading)
            except MemAgentError as error:
                reading = read.failed(error)
        return {"readings": {str(asked["index"]): reading}}

    def each_question(state: _Questions) -> list[Send]:
        tasks = range(len(call.questions))
        return [Send("read_question", _Asked(index=index, document=state["document"])) for index in tasks]

    builder = StateGraph(_Questions)
    builder.add_node("store_document", RunnableLambda(store, astore, name="store_document"))
    builder.add_node("read_question", cast("Any", RunnableLambda(read, aread, name="read_question")))
    builder.add_edge(START, "store_document")
    builder.add_conditional_edges("store_document", each_question, ["read_question"])
    builder.add_edge("read_question", END)
    return builder.compile(name="ReadLongDocument")


def _outcome(state: Any) -> Outcome:
    readings = state["readings"]
    return Outcome(state["document"], [readings[key] for key in sorted(readings, key=int)])


@dataclass
class _Read:
    """One running reader: where its checkpoints are, what it starts from, and what its stream has shown."""

    call: ReadCall
    reader: ReaderGraph
    asked: _Asked
    config: RunnableConfig
    pace: Reach
    continues: bool = False
    """Whether it continues where an earlier tool call stopped."""

    @cached_property
    def followed(self) -> FollowedRead:
        return FollowedRead(lambda run_id, update: self.call.report(run_id, self.question, update))

    @property
    def question(self) -> str:
        return self.call.questions[self.asked["index"]]

    @property
    def earlier(self) -> list[str]:
        """The namespaces in which this question was read before and left unfinished, oldest first."""
        earlier = self.call.earlier(self.asked["document"], self.question)
        return earlier["namespaces"] if earlier else []

    @property
    def namespace(self) -> str:
        namespace: str = self.config["configurable"]["checkpoint_ns"]
        return namespace

    def place(self, namespace: str | None = None) -> RunnableConfig:
        """A config that leads to the reader's checkpoints: to its own, or to those of an earlier tool call."""
        return kept_at(self.config, namespace)

    def left_off(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The state to start from, if an earlier call's is there and still fits the reader."""
        if state.get("settings") != self._context.settings:
            return None
        self.continues = True
        return {**state, "stop_reason": None}

    @property
    def start(self) -> tuple[dict[str, Any] | None, RunnableConfig]:
        """The reader's input and config. When the agent resumes, LangGraph ignores the input."""
        if self.continues:
            return None, resuming(self.config)
        return {"question": self.question, "document": self.asked["document"], "run_id": new_run_id()}, self.config

    @property
    def options(self) -> dict[str, Any]:
        return {
            "context": self._context,
            "stream_mode": [*PARTS, "custom"],  # the last keeps the reader's own reports off the agent's stream
            "output_keys": list(self.reader.builder.channels),
        }

    @property
    def _context(self) -> ReaderContext:
        context = self.reader.reader_context
        return replace(context, limits=self.call.limits or context.limits, pace=self.pace)

    @property
    def earlier_places(self) -> list[RunnableConfig]:
        """Where the chunks read before this execution are stored."""
        return [self.place(), *map(self.place, reversed(self.earlier))]

    def reading(self) -> Reading:
        """The whole read, as `MemAgent` would return it."""
        return reading_of(self.followed.result(self.reader), **self._kept)

    def failed(self, error: MemAgentError) -> Reading:
        if self.call.raises:
            raise error
        return failed_reading(self.question, error, **self._kept)

    @property
    def _kept(self) -> dict[str, Any]:
        """Whether and where a later call of the tool finds this read."""
        if not self.call.is_kept:
            return {}
        return {"goes_on": True, "namespaces": [*self.earlier, self.namespace]}
