"""Detaches reads from the surrounding graph, and reports each read to the graph's callback handlers as one run.

A graph that is called inside another graph's node inherits its callbacks, its streams and, unless it has its own, its
checkpointer. A read by a middleware must not: every chunk of a tool result would be in the agent's traces, and the
policy's tokens in its message stream, between the model's own. Instead, handlers see one run for the read,
with one model run in it that counts all of its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig

from langchain_memagent.graph_reads import OnUpdate
from memagent_graph.policy import TokenUsage
from memagent_graph.reading.tracing import NOT_STREAMED, make_model_result
from memagent_graph.trace import MemoryUpdate


@dataclass
class ReadReport:
    """The tokens that a read has used so far, and the outputs of its run."""

    model: str
    """The policy's name."""
    on_update: OnUpdate
    """Called with every update."""
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(0, 0))
    """The tokens of the updates so far; if the read ends, those of all its calls."""
    outputs: dict[str, Any] = field(default_factory=dict)

    def add_update(self, run_id: str, question: str, update: MemoryUpdate) -> None:
        """Count the tokens of an update, and report it."""
        prompt_tokens = self.usage.prompt_tokens + update.prompt_tokens
        self.usage = TokenUsage(prompt_tokens, self.usage.completion_tokens + update.completion_tokens)
        self.on_update(run_id, question, update)


@asynccontextmanager
async def report_read(
    config: RunnableConfig, model: str, inputs: Mapping[str, Any], on_update: OnUpdate
) -> AsyncIterator[ReadReport]:
    """Report a detached read as one child of the run in `config`; handlers see no text of the document.

    Args:
        config: the calling graph's config.
        model: the policy's name.
        inputs: the inputs of the run.
        on_update: called with every update that is added to the report.
    """
    callback_manager = AsyncCallbackManager.configure(
        inheritable_callbacks=config.get("callbacks"), inheritable_metadata=config.get("metadata")
    )
    read_run = await callback_manager.on_chain_start({}, dict(inputs), name="MemAgent")
    child_manager = read_run.get_child(NOT_STREAMED)
    child_manager.add_metadata({"ls_model_type": "chat", "ls_model_name": model}, inherit=False)
    placeholder = HumanMessage("(the prompts of a whole read, kept out of traces)")
    (model_run,) = await child_manager.on_chat_model_start(
        {}, [[placeholder]], name="MemAgent policy", invocation_params={"model": model}
    )
    read_report = ReadReport(model, on_update)
    try:
        try:
            yield read_report
        finally:
            await model_run.on_llm_end(make_model_result("", read_report.usage, model_name=read_report.model))
    except BaseException as error:
        await read_run.on_chain_error(error)
        raise
    await read_run.on_chain_end(read_report.outputs)
