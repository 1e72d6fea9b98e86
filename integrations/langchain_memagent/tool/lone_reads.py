"""Reading for one tool call: every question over one stored document, so that a killed agent goes on where it was.

Where a read's state is kept decides how it is done:

- The reader has checkpoints of its own: there, under a run id that the same tool call always gets again.
- An agent around it has a checkpointer: in that; see `langchain_memagent.tool.agent_checkpoints`.
- Neither: nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import cast

from langchain_core.runnables import RunnableConfig

from langchain_memagent.tool.agent_checkpoints import aread_in_agent, has_checkpointer, read_in_agent
from langchain_memagent.tool.call import Outcome, ReadCall
from langchain_memagent.tool.readings import Reading, failed_reading, reading_of
from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError, RunMismatchError, RunNotFoundError
from memagent_graph.reading.state import new_run_id
from memagent_graph.results import MemoryUpdate, ReadResult


async def aread_questions(call: ReadCall, config: RunnableConfig) -> Outcome:
    """Read the document with every question.

    Raises:
        DocumentError: the document cannot be read.
        MemAgentError: a read failed, and the call wants that raised.
    """
    if has_checkpointer(config) and not call.keeps_own:
        return await aread_in_agent(call, config)
    reference = await call.store_document()
    reads = (_read_alone(call, reference, index, config) for index in range(len(call.questions)))
    # One that fails must not end the others, whose answers a resumed call would have to find again.
    readings = await asyncio.gather(*reads, return_exceptions=True)
    for reading in readings:
        if isinstance(reading, BaseException):
            raise reading
    return Outcome(reference, cast("list[Reading]", readings))


def read_questions(call: ReadCall, config: RunnableConfig) -> Outcome:
    """`aread_questions` for synchronous code. An agent's synchronous checkpointer is used from this thread."""
    if has_checkpointer(config) and not call.keeps_own:
        return read_in_agent(call, config)
    return run_sync(aread_questions(call, config))


async def _read_alone(call: ReadCall, reference: DocumentRef, index: int, config: RunnableConfig) -> Reading:
    """Read with one question, outside of any agent's checkpoints."""
    question = call.questions[index]
    earlier = call.earlier(reference, question) if call.keeps_own else None
    run_id = (earlier and earlier["run_id"]) or _run_id(call, index, config)
    goes_on = call.keeps_own and call.key is not None
    try:
        async for part in _parts(call, reference, question, run_id):
            if isinstance(part, ReadResult):
                return await asyncio.to_thread(reading_of, part, goes_on=goes_on)
            call.report(run_id, question, part)
    except MemAgentError as error:
        if call.raises:
            raise
        return failed_reading(question, error, goes_on=goes_on)
    raise AssertionError("a stream ends with its result")


async def _parts(
    call: ReadCall, reference: DocumentRef, question: str, run_id: str
) -> AsyncIterator[MemoryUpdate | ReadResult]:
    """The read's updates and its result; of a run that this agent began before, and that still fits, those left."""
    if call.keeps_own and call.key is not None:
        try:
            async for part in call.agent.astream_resume(run_id, limits=call.limits):
                yield part
            return
        except (RunNotFoundError, RunMismatchError):
            pass
    async for part in call.agent.astream(reference, question, run_id=run_id, limits=call.limits):
        yield part


def _run_id(call: ReadCall, index: int, config: RunnableConfig) -> str:
    """A question's run id; where the reader saves its runs, the same whenever this tool call is executed."""
    if call.key is None or not call.keeps_own:
        return new_run_id()
    place = config.get("configurable", {})
    names = (place.get("thread_id"), place.get("checkpoint_ns"), call.key, index)
    return "tool-" + hashlib.sha256(repr(names).encode()).hexdigest()[:24]
