"""The names in a run's config that LangGraph has not made public; `tests/unit/test_langgraph_internals.py` checks them.

LangGraph keeps them in the `configurable` part. (The format of its checkpoints is decoded in `storage`.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any, Final

from langchain_core.runnables import Runnable, RunnableConfig

CHECKPOINTER: Final = "__pregel_checkpointer"
"""Key of the checkpointer of the running graph, its own or its parent's."""
DURABILITY: Final = "__pregel_durability"
"""Key of the durability that the parent graph chose."""

CALL: Final = "__pregel_call"
"""Key of the function that a node calls a task with. It leads to the loop of the node's graph."""


def get_config_entry(config: RunnableConfig | None, name: str) -> Any:
    """Return an entry of the config; None if there is none."""
    return (config or {}).get("configurable", {}).get(name)


def find_enclosing_exit_stacks(config: RunnableConfig | None) -> Iterator[ExitStack]:
    """Yield the stacks to close when the stream of a parent graph ends or is closed early, the innermost first.

    A stream that closes calls the callbacks on its stack, the last one first, and then waits for its nodes' threads.
    """
    while (call_task := get_config_entry(config, CALL)) is not None:
        loop = call_task.keywords["schedule_task"].__self__
        yield loop.stack
        config = loop.config  # of the caller, whose loop is older


def find_writable_keys(
    config: RunnableConfig | None, node: Runnable[Any, Any], default: Collection[str]
) -> Collection[str]:
    """Return the state keys that `node` may write. LangGraph silently drops other keys.

    Returns `default` outside of a graph, inside another node, or if the state is a single value.
    """
    if (call_task := get_config_entry(config, CALL)) is None:
        return default
    loop = call_task.keywords["schedule_task"].__self__
    running_node = loop.nodes.get((config or {}).get("metadata", {}).get("langgraph_node"))
    is_direct_node = running_node is not None and running_node.bound is node
    return loop.specs if is_direct_node and "__root__" not in loop.specs else default
