"""All names of LangGraph that are not public; `tests/unit/test_langgraph_internals.py` checks them.

LangGraph keeps them in the `configurable` part of a run's config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any, Final

from langchain_core.runnables import Runnable, RunnableConfig

CHECKPOINTER: Final = "__pregel_checkpointer"
"""The checkpointer of the graph that runs, its own or its parent's."""
DURABILITY: Final = "__pregel_durability"
"""When checkpoints are written, if the parent graph chose it."""

CALL: Final = "__pregel_call"
"""What a node calls a task with; it leads to the loop of the graph that the node belongs to."""


def config_entry(config: RunnableConfig | None, name: str) -> Any:
    """Return an entry of the config; None if there is none."""
    return (config or {}).get("configurable", {}).get(name)


def enclosing_exit_stacks(config: RunnableConfig | None) -> Iterator[ExitStack]:
    """Yield what is left when the stream of an enclosing graph ends, or its caller breaks it off; the innermost first.

    A graph's stream waits for its nodes' threads only after what was added to its stack last was called.
    """
    seen: set[int] = set()
    while (call := config_entry(config, CALL)) is not None:
        loop = call.keywords["schedule_task"].__self__
        if id(loop) in seen:
            return
        seen.add(id(loop))
        yield loop.stack
        config = loop.config


def state_keys(config: RunnableConfig | None, node: Runnable[Any, Any], otherwise: Collection[str]) -> Collection[str]:
    """Return the keys of the state that `node` writes into; LangGraph drops what it returns under others, silently.

    `otherwise` outside of a graph, within another node, and for a state that is one value without keys.
    """
    if (call := config_entry(config, CALL)) is None:
        return otherwise
    loop = call.keywords["schedule_task"].__self__
    running = loop.nodes.get((config or {}).get("metadata", {}).get("langgraph_node"))
    return loop.specs if running is not None and running.bound is node and "__root__" not in loop.specs else otherwise
