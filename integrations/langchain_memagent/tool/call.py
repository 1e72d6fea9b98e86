"""One call of `ReadLongDocument`: the data of its parts, and the reads outside of an agent's checkpoints.

How a call is executed depends on where a read's state is kept, so that a killed agent continues where it was:

- The reader has its own checkpoints: there, under a run id that is the same whenever the tool call is executed.
- The surrounding agent has a checkpointer: in that; see `agent_checkpoints`.
- Neither: in memory, while this call is retried; outside of an agent nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig

from langchain_memagent.tool.readings import Reading, failed_reading, reading_of
from memagent_graph import MemAgent
from memagent_graph.concurrency.pace import AT_ONCE, Reach, in_passes
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError, RunMismatchError, RunNotFoundError
from memagent_graph.events import StopReason
from memagent_graph.reading.outcome import result_of
from memagent_graph.reading.state import Limits, new_run_id
from memagent_graph.response_format import ResponseFormat
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate


@dataclass(frozen=True)
class ReadCall:
    """What to read, for which questions, and how to report progress."""

    agent: MemAgent
    questions: tuple[str, ...]
    """All different."""
    store_document: Callable[[], Awaitable[DocumentRef]]
    """Opens and stores the document. Not called again when a read in an agent's checkpoints continues."""
    report: Callable[[str, str, MemoryUpdate], None]
    """Called with (run id, question, update) at every chunk."""
    limits: Limits | None = None
    response_format: ResponseFormat | None = None
    """The form of the answers, if they are structured."""
    raises: bool = False
    """Whether the error of a failed read is raised; otherwise it becomes a reading with the error."""
    is_kept: bool = False
    """Whether the surrounding agent has checkpoints, in which a later call finds this call's reads."""
    key: str | None = None
    """Distinguishes an agent's tool call from others of its task; None outside an agent."""
    unfinished: Mapping[tuple[str, str], Reading] = field(default_factory=dict)
    """Earlier readings of this agent that can be continued, by the document's key and the question."""

    @property
    def keeps_own(self) -> bool:
        """Whether the reader has its own checkpoints."""
        return self.agent.keeps_checkpoints

    def earlier(self, document: DocumentRef, question: str) -> Reading | None:
        """The unfinished reading for the same document and question."""
        return self.unfinished.get((document["key"], question))


@dataclass(frozen=True)
class Outcome:
    """The document's reference, and a reading for each different question."""

    document: DocumentRef
    readings: list[Reading]

    def for_each(self, asked: Iterable[str]) -> list[Reading]:
        """A reading for each question in the order asked, including equal ones."""
        by_question = {reading["question"]: reading for reading in self.readings}
        return [by_question[question] for question in asked]


def unfinished_readings(state: Any, tool_name: str) -> dict[tuple[str, str], Reading]:
    """Unfinished readings of a tool's earlier calls, from the artifacts in an agent's messages."""
    found: dict[tuple[str, str], Reading] = {}
    for message in (state.get("messages") if isinstance(state, Mapping) else None) or ():
        if not isinstance(message, ToolMessage) or message.name != tool_name or not isinstance(message.artifact, dict):
            continue
        document = message.artifact.get("document", {})
        for reading in message.artifact.get("readings", ()):
            key = (document.get("key", ""), reading["question"])
            found.pop(key, None)
            if reading["goes_on"] and _is_unfinished(reading):
                found[key] = reading
    return found


async def read_alone(call: ReadCall, config: RunnableConfig) -> Outcome:
    """Read the document with every question, outside of any agent's checkpoints.

    Raises:
        DocumentError: the document cannot be read.
        MemAgentError: a read failed, and the call raises errors.
    """
    reference = await call.store_document()
    reads = [partial(_read_one, call, reference, index, config) for index in range(len(call.questions))]
    # An error does not end the others, whose answers a resumed call would have to find again.
    outcomes = await in_passes(reads, AT_ONCE)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return Outcome(reference, cast("list[Reading]", outcomes))


def _is_unfinished(reading: Reading) -> bool:
    """Whether a read failed or stopped at a limit."""
    return reading["stop_reason"] is None or StopReason(reading["stop_reason"]).resumable


async def _read_one(call: ReadCall, reference: DocumentRef, index: int, config: RunnableConfig, pace: Reach) -> Reading:
    question = call.questions[index]
    earlier = call.earlier(reference, question) if call.keeps_own else None
    run_id = (earlier and earlier["run_id"]) or _run_id(call, index, config)
    goes_on = call.keeps_own and call.key is not None
    try:
        parts = _parts(call, reference, question, run_id, pace)
        result = await result_of(parts, partial(call.report, run_id, question))
    except MemAgentError as error:
        if call.raises:
            raise
        return failed_reading(question, error, goes_on=goes_on)
    return await asyncio.to_thread(reading_of, result, goes_on=goes_on)


async def _parts(
    call: ReadCall, reference: DocumentRef, question: str, run_id: str, pace: Reach
) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
    """The read's updates and its result; if this agent began the run before and it still fits, the remaining ones."""
    if call.keeps_own and call.key is not None:
        try:
            resumed = call.agent.astream_resume(
                run_id, response_format=call.response_format, limits=call.limits, pace=pace
            )
            async for part in resumed:
                yield part
            return
        except (RunNotFoundError, RunMismatchError):
            pass
    begun = call.agent.astream(
        reference, question, response_format=call.response_format, run_id=run_id, limits=call.limits, pace=pace
    )
    async for part in begun:
        yield part


def _run_id(call: ReadCall, index: int, config: RunnableConfig) -> str:
    """A question's run id; if the reader has checkpoints, the same whenever this tool call is executed."""
    if call.key is None or not call.keeps_own:
        return new_run_id()
    place = config.get("configurable", {})
    names = (place.get("thread_id"), place.get("checkpoint_ns"), call.key, index)
    return "tool-" + hashlib.sha256(repr(names).encode()).hexdigest()[:24]
