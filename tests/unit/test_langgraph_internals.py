"""The private names of LangGraph that this package relies on: a release that changes one fails here first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph._internal import _constants
from langgraph.graph import StateGraph

import memagent_graph
from memagent_graph.reading import langgraph_internals

ROOT = Path(memagent_graph.__file__).parents[1]


def test_the_private_names_equal_those_of_langgraph() -> None:
    assert langgraph_internals.CHECKPOINTER == _constants.CONFIG_KEY_CHECKPOINTER
    assert langgraph_internals.DURABILITY == _constants.CONFIG_KEY_DURABILITY
    assert langgraph_internals.CALL == _constants.CONFIG_KEY_CALL


def test_a_node_finds_the_exit_stacks_of_all_enclosing_graphs() -> None:
    stack_counts: list[int] = []

    def record_exit_stacks(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        stack_counts.append(len({*map(id, langgraph_internals.find_enclosing_exit_stacks(config))}))
        return state

    graph: Any = record_exit_stacks
    for name in ("inner", "middle", "outer"):
        builder = StateGraph(dict)
        builder.add_node(name, graph)
        builder.set_entry_point(name)
        graph = builder.compile()
    graph.invoke({})
    assert stack_counts == [3]
    assert not list(langgraph_internals.find_enclosing_exit_stacks({}))


def test_no_other_module_has_private_names_of_langgraph() -> None:
    modules = {
        path.name
        for folder in ("memagent_graph", "integrations", "training")
        for path in (ROOT / folder).rglob("*.py")
        if "__pregel_" in path.read_text("utf-8")
    }
    assert modules == {"langgraph_internals.py"}
