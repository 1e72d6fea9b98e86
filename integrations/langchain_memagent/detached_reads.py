"""Detaches reads from the surrounding graph, and reports each read to the graph's callback handlers as one run.

A graph that is called inside another graph's node inherits its callbacks, its streams and, unless it has its own, its
checkpointer. A read by a middleware must not: every chunk of a tool result would be in the agent's traces, and the
policy's tokens in its message stream, between the model's own. Instead, handlers see one run for the read,
with one model run in it that counts all of its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.messages import HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig

from langchain_memagent.graph_reads import OnUpdate
from memagent_graph.policy import TokenUsage
from memagent_graph.reading.tracing import NOT_STREAMED, make_model_result
from memagent_graph.results import Usage
from memagent_graph.trace import MemoryUpdate


@dataclass
class ReadCost:
    """The tokens that a read has used so far, and the outputs of its run."""

    model: str
    """The policy's name."""
    report: OnUpdate
    """Called with every update."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    outputs: dict[str, Any] = field(default_factory=dict)

    def add_update(self, run_id: str, question: str, update: MemoryUpdate) -> None:
        """Count the tokens of an update, and report it. If the read fails, these counts are its totals."""
        self.prompt_tokens += update.prompt_tokens
        self.completion_tokens += update.completion_tokens
        self.report(run_id, question, update)

    def set_totals(self, usages: Sequence[Usage], **outputs: Any) -> None:
        """Replace the counts with the totals of the reads, and set the outputs of the run."""
        self.prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        self.completion_tokens = sum(usage.completion_tokens for usage in usages)
        self.cached_tokens = sum(usage.cached_tokens for usage in usages)
        self.outputs = outputs

    def to_llm_result(self) -> LLMResult:
        """Return the output of the model run."""
        usage = TokenUsage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        return make_model_result("", usage, model_name=self.model)


@asynccontextmanager
async def report_read(
    config: RunnableConfig, model: str, inputs: Mapping[str, Any], report: OnUpdate
) -> AsyncIterator[ReadCost]:
    """Report a detached read as one child of the run in `config`; handlers see no text of the document.

    Args:
        config: the calling graph's config.
        model: the policy's name.
        inputs: the inputs of the run.
        report: called with every update that is added to the cost.
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
    cost = ReadCost(model, report)
    try:
        yield cost
    except BaseException as error:
        await model_run.on_llm_end(cost.to_llm_result())
        await read_run.on_chain_error(error)
        raise
    await model_run.on_llm_end(cost.to_llm_result())
    await read_run.on_chain_end(cost.outputs)
