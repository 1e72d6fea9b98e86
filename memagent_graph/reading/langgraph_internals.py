"""All names of LangGraph that are not public; `tests/unit/test_langgraph_internals.py` checks them.

LangGraph keeps them in the `configurable` part of a run's config.
"""

from __future__ import annotations

from typing import Any, Final

from langchain_core.runnables import RunnableConfig

CHECKPOINTER: Final = "__pregel_checkpointer"
"""The checkpointer of the graph that runs, its own or its parent's."""
DURABILITY: Final = "__pregel_durability"
"""When checkpoints are written, if the parent graph chose it."""
RESUMING: Final = "__pregel_resuming"
"""Whether a graph continues from its checkpoint and ignores its input."""
SCRATCHPAD: Final = "__pregel_scratchpad"
"""Counts the graphs that a task has called."""


def inherited(config: RunnableConfig | None, name: str) -> Any:
    """An entry of the config; None if there is none."""
    return (config or {}).get("configurable", {}).get(name)
