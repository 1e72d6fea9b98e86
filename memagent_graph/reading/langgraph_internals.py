"""Names of LangGraph that it has no public ones for, all of them; `tests/unit/test_langgraph_internals.py` holds them.

LangGraph keeps them in the `configurable` part of a run's config.
"""

from __future__ import annotations

from typing import Any, Final

from langchain_core.runnables import RunnableConfig

CHECKPOINTER: Final = "__pregel_checkpointer"
"""The checkpointer of the graph that runs, its own or its parent's."""
DURABILITY: Final = "__pregel_durability"
"""When checkpoints are written, where the parent graph chose."""
RESUMING: Final = "__pregel_resuming"
"""Whether a graph continues from its checkpoint, and leaves its input aside."""
SCRATCHPAD: Final = "__pregel_scratchpad"
"""It counts the graphs that a task has called."""


def inherited(config: RunnableConfig | None, name: str) -> Any:
    """An entry of the config; None where there is none."""
    return (config or {}).get("configurable", {}).get(name)
