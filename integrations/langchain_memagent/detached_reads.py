"""Detaches reads from the surrounding graph, and reports each of them to its handlers as one run.

A graph that is called inside another graph's node inherits its callbacks, its streams and, unless it has its own, its
checkpointer. A read by a middleware must not: every chunk of a tool result would be in the agent's traces, and the
policy's tokens in its message stream, between the model's own. Handlers see one run for the whole read instead, with
one model run in it that has all of its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from langchain_memagent.graph_reads import Report
from memagent_graph.reading.tracing import NOT_STREAMED
from memagent_graph.results import Usage
from memagent_graph.trace import MemoryUpdate

T = TypeVar("T")


async def detach(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in a context without the calling graph's callbacks and streams."""
    return await asyncio.get_running_loop().create_task(_run_untraced(coroutine), context=_copy_without_callbacks())


@dataclass
class ReadCost:
    """The cost of a read so far, and the output of its run."""

    model: str
    """The policy's name."""
    report: Report
    """Called with every update."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    outputs: dict[str, Any] = field(default_factory=dict)

    def add(self, run_id: str, question: str, update: MemoryUpdate) -> None:
        """Count and report an update. The count is used if the read fails before its total is known."""
        self.prompt_tokens += update.prompt_tokens
        self.completion_tokens += update.completion_tokens
        self.report(run_id, question, update)

    def settle(self, usages: Sequence[Usage], **outputs: Any) -> None:
        """Replace the counts by the totals of the reads."""
        self.prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        self.completion_tokens = sum(usage.completion_tokens for usage in usages)
        self.cached_tokens = sum(usage.cached_tokens for usage in usages)
        self.outputs = outputs

    def as_result(self) -> LLMResult:
        """Return the output of a model's run."""
        message = AIMessage(
            "",
            usage_metadata=UsageMetadata(
                input_tokens=self.prompt_tokens,
                output_tokens=self.completion_tokens,
                total_tokens=self.prompt_tokens + self.completion_tokens,
                input_token_details=InputTokenDetails(cache_read=self.cached_tokens),
            ),
            response_metadata={"model_name": self.model},
        )
        return LLMResult(generations=[[ChatGeneration(message=message)]])


@asynccontextmanager
async def report_read(
    config: RunnableConfig, model: str, inputs: Mapping[str, Any], report: Report
) -> AsyncIterator[ReadCost]:
    """Report a detached read as one child of the run in `config`; handlers see no text of the document.

    Args:
        config: the calling graph's config.
        model: the policy's name.
        inputs: the inputs of the run.
        report: called with every update that is added to the cost.
    """
    manager = AsyncCallbackManager.configure(
        inheritable_callbacks=config.get("callbacks"), inheritable_metadata=config.get("metadata")
    )
    run = await manager.on_chain_start({}, dict(inputs), name="MemAgent")
    children = run.get_child(NOT_STREAMED)
    children.add_metadata({"ls_model_type": "chat", "ls_model_name": model}, inherit=False)
    placeholder = HumanMessage("(the prompts of a whole read, kept out of traces)")
    (calls,) = await children.on_chat_model_start(
        {}, [[placeholder]], name="MemAgent policy", invocation_params={"model": model}
    )
    cost = ReadCost(model, report)
    try:
        yield cost
    except BaseException as error:
        await calls.on_llm_end(cost.as_result())
        await run.on_chain_error(error)
        raise
    await calls.on_llm_end(cost.as_result())
    await run.on_chain_end(cost.outputs)


async def _run_untraced(coroutine: Coroutine[Any, Any, T]) -> T:
    from langsmith.run_helpers import tracing_context  # noqa: PLC0415  slow to import, and seldom needed

    with tracing_context(enabled=False):
        return await coroutine


def _copy_without_callbacks() -> Context:
    context = copy_context()
    context.run(var_child_runnable_config.set, None)
    for variable, value in context.items():
        if isinstance(value, BaseCallbackHandler):
            context.run(variable.set, None)
    return context
