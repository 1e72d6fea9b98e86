"""Tracing for external tools: the ids of the trace around a step, and a model run for each completion.

LangChain's callbacks (LangSmith, `get_usage_metadata_callback`, any tracer) see the graph, its nodes and its state, and
one model run per completion, for every kind of policy. Its token counts agree with `ReadResult.usage`. By default it
has only the length of the prompt, because the prompt contains the chunk. To see all texts:

>>> graph.invoke(inputs, {"metadata": {TRACE_TEXTS: True}})  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler
from langchain_core.messages import AIMessage, convert_to_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from memagent_graph.policy import Completion, Messages, Policy, SamplingParams, TokenUsage
from memagent_graph.reading.state import ReaderContext
from memagent_graph.reasoning import extract_reply
from memagent_graph.tokenizers import Tokenizer

T = TypeVar("T")
TRACE_TEXTS: Final = "memagent_trace_texts"
"""The metadata key that, if True, gives tracers the complete prompts and completions."""

NOT_STREAMED: Final = "nostream"
"""LangGraph's tag for model runs that `stream_mode="messages"` leaves out. Without it, a chat would show hundreds of
memories as messages of the agent."""


def get_trace_ids(config: RunnableConfig | None) -> dict[str, str]:
    """Return the ids of the LangChain run and the OpenTelemetry span around a step, if tracing is on."""
    ids: dict[str, str] = {}
    callbacks = (config or {}).get("callbacks")
    if getattr(callbacks, "handlers", None) and (parent := getattr(callbacks, "parent_run_id", None)):
        ids["langchain_run_id"] = str(parent)
    if (opentelemetry := sys.modules.get("opentelemetry.trace")) is not None:
        span = opentelemetry.get_current_span().get_span_context()
        if span.is_valid:
            ids["otel_trace_id"] = f"{span.trace_id:032x}"
            ids["otel_span_id"] = f"{span.span_id:016x}"
    return ids


def observe_policy(context: ReaderContext, config: RunnableConfig | None) -> ReaderContext:
    """Return the context for a step under `config`. Its policy reports to the handlers of the config.

    Without handlers, it is the same context, which costs no time.
    """
    callbacks = (config or {}).get("callbacks")
    if config is None or not getattr(callbacks, "handlers", callbacks):
        return context
    return replace(context, policy=ObservedPolicy(context.policy, context.tokenizer, config))


@dataclass(frozen=True)
class ObservedPolicy:
    """A policy that reports its completions to the handlers of a config, as runs of a chat model.

    Calls inside the policy are not reported. Otherwise a LangChain chat model in it would show the whole prompt to the
    same tracers, and count the same tokens again.
    """

    policy: Policy
    tokenizer: Tokenizer
    """Counts tokens if the server does not report them."""
    config: RunnableConfig

    @property
    def name(self) -> str:
        """The model's name."""
        return self.policy.name

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return one completion. Errors come from the policy."""
        with_texts = bool((self.config.get("metadata") or {}).get(TRACE_TEXTS))
        shown_messages = convert_to_messages(
            (
                message["role"],
                message["content"] if with_texts else f"({len(message['content']):,} characters, kept out of traces)",
            )
            for message in prompt
        )
        manager = AsyncCallbackManager.configure(
            inheritable_callbacks=self.config.get("callbacks"),
            local_tags=[NOT_STREAMED],
            local_metadata={"ls_model_type": "chat", "ls_model_name": self.name},
        )
        settings = {"model": self.name, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        (run,) = await manager.on_chat_model_start(
            {}, [shown_messages], name="MemAgent policy", invocation_params=settings
        )
        try:
            # Only the callbacks are removed: chat models may need `configurable` of the config.
            call = partial(self.policy.complete, prompt, sampling)
            completion = await await_detached(call, {**self.config, "callbacks": None})
        except BaseException as error:
            await run.on_llm_error(error)
            raise
        result = make_model_result(
            completion.text if with_texts else extract_reply(completion.text).strip(),
            completion.count_tokens(prompt, self.tokenizer.count),
            model_name=completion.model or self.name,
            finish_reason=completion.finish_reason.value,
            **completion.origin,
        )
        await run.on_llm_end(result)
        return completion


async def await_detached(call: Callable[[], Awaitable[T]], config: RunnableConfig | None = None) -> T:
    """Await a call in a task under `config`, without the callbacks and streams of the calling graph."""

    async def run() -> T:
        from langsmith.run_helpers import tracing_context  # noqa: PLC0415  slow to import, and rarely needed

        with tracing_context(enabled=False):
            return await call()

    context = copy_context()
    context.run(var_child_runnable_config.set, config)
    for variable, value in context.items():
        if isinstance(value, BaseCallbackHandler):
            context.run(variable.set, None)
    return await asyncio.get_running_loop().create_task(run(), context=context)


def make_model_result(text: str, usage: TokenUsage, **metadata: Any) -> LLMResult:
    """Return the output of a model run for handlers: a message, its token counts and its metadata."""
    counts = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
    message = AIMessage(text, usage_metadata=counts, response_metadata=metadata)
    return LLMResult(generations=[[ChatGeneration(message=message)]])
