"""All names of LangGraph that are not public; `tests/unit/test_langgraph_internals.py` checks them.

LangGraph keeps them in the `configurable` part of a run's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

CHECKPOINTER: Final = "__pregel_checkpointer"
"""The checkpointer of the graph that runs, its own or its parent's."""
DURABILITY: Final = "__pregel_durability"
"""When checkpoints are written, if the parent graph chose it."""

CALL: Final = "__pregel_call"
"""What a node calls a task with; it leads to the loop of the graph that the node belongs to."""


def inherited(config: RunnableConfig | None, name: str) -> Any:
    """Return an entry of the config; None if there is none."""
    return (config or {}).get("configurable", {}).get(name)


def exits_of_graphs_around(config: RunnableConfig | None) -> Iterator[ExitStack]:
    """Yield what is left when the stream of an enclosing graph ends, or its caller breaks it off; the innermost first.

    A graph's stream waits for its nodes' threads only after what was added to its stack last was called.
    """
    seen: set[int] = set()
    while (call := inherited(config, CALL)) is not None:
        loop = call.keywords["schedule_task"].__self__
        if id(loop) in seen:
            return
        seen.add(id(loop))
        yield loop.stack
        config = loop.config
