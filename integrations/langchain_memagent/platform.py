"""The reader for `langgraph dev` and LangGraph Platform; `integrations/langgraph.json` names `make_graph`.

Everything is set by environment variables. OPENAI_BASE_URL and OPENAI_API_KEY name the policy's server; without a
server and a model, a policy that was added to this machine reads. Each field of `ReadSettings` has a variable:
MEMAGENT_MODEL, MEMAGENT_TOKENIZER, MEMAGENT_CHUNK_TOKENS, MEMAGENT_TEMPERATURE and so on. Documents and the run log are
kept in the folder MEMAGENT_HOME, which must be shared between replicas. Checkpoints are the platform's own, so threads
can be listed, edited (`memory`, as the node `update_memory`) and resumed through its API and in LangGraph Studio.

    cd integrations && langgraph dev
    client.runs.wait(thread_id, "memagent", input={"question": "...", "document": "the text itself"})
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any, NoReturn

from langchain_core.runnables import RunnableConfig
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from memagent_graph import Document, MemAgent, ReaderGraph
from memagent_graph.errors import BudgetError, EmptyDocumentError, EncodingError, MemAgentError, NoPolicyError
from memagent_graph.reading.state import ReaderInput, ReaderOutput, ReaderState
from memagent_graph.settings import ReadSettings

_build_lock = threading.Lock()


class InputError(MemAgentError, ValueError):
    """An invalid question or document, or no policy.

    The platform shows its callers the message of a `ValueError` and hides all others, which may contain addresses or
    paths.
    """


class ServedGraph(ReaderGraph):
    """A reader for remote callers: text in `document` is never taken as the path of a file on this machine."""

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        """As in `ReaderGraph`.

        Raises:
            InputError: the caller's question or document is invalid; the message says why.
        """
        if isinstance(input, dict) and isinstance(text := input.get("document"), str):
            input = {**input, "document": Document.from_text(text)}  # noqa: A001
        try:
            async with aclosing(super().astream(input, config, **options)) as stream:
                async for item in stream:
                    yield item
        except MemAgentError as error:
            if type(error) is MemAgentError or isinstance(error, BudgetError | EmptyDocumentError | EncodingError):
                raise InputError(error.message, hint=error.make_remedy(_name_variable), run_id=error.run_id) from error
            raise


async def make_graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """Return the graph without a checkpointer: the platform has its own. It is built once, at the first request.

    Without a policy the server starts, and every run says how to add one.

    Raises:
        MemAgentError: a variable cannot be parsed, or the policy cannot be reached or loaded.
    """
    try:
        # Loading a policy or a tokenizer takes seconds, and the platform's event loop must not be blocked.
        return await asyncio.to_thread(_build)
    except MemAgentError as error:
        error.hint = error.make_remedy(_name_variable)
        if isinstance(error, NoPolicyError):
            return _make_refusing_graph(error)
        raise


def _name_variable(name: str) -> str:
    """Return the environment variable of an option; see `.env.example`."""
    return f"OPENAI_{name.upper()}" if name in {"base_url", "api_key"} else f"MEMAGENT_{name.upper()}"


def _make_refusing_graph(error: NoPolicyError) -> CompiledStateGraph[Any, Any, Any, Any]:
    def refuse(state: ReaderInput) -> NoReturn:
        raise InputError(error.message, hint=error.hint)

    graph = StateGraph(ReaderState, input_schema=ReaderInput, output_schema=ReaderOutput)
    return graph.add_node("refuse", refuse).set_entry_point("refuse").compile()


def _build() -> ReaderGraph:
    with _build_lock:
        return _build_once()


@cache
def _build_once() -> ReaderGraph:
    graph = MemAgent(settings=ReadSettings.from_environment(os.environ)).graph()
    # The context holds clients and stores: nothing that a caller could send, or that has a JSON schema.
    return ServedGraph(**{**vars(graph), "context_schema": None})
