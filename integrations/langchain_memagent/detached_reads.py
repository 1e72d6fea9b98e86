"""Reads that are detached from the graph that runs around them.

A graph that is called inside another one's node takes over its callbacks, its streams and, unless it has its own, its
checkpointer. A reading on a middleware's behalf must not: every chunk of a tool result would stand in the agent's
traces, and the policy's tokens in its message stream, between the model's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from langchain_core.runnables.config import var_child_runnable_config

from memagent_graph.concurrency.background import run_sync

T = TypeVar("T")


async def detached(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that sees nothing of the graph around; everything else in the context it does see."""
    return await asyncio.get_running_loop().create_task(coroutine, context=_outside())


def detached_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """`detached` for synchronous code."""
    return _outside().run(run_sync, coroutine)


def _outside() -> Context:
    context = copy_context()
    context.run(var_child_runnable_config.set, None)
    return context
