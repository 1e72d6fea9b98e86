"""LangGraph's private names are what this package takes them for; a release that changes one fails here first."""

from __future__ import annotations

from pathlib import Path

from langgraph._internal import _constants

import memagent_graph
from memagent_graph.reading import langgraph_internals as ours

ROOT = Path(memagent_graph.__file__).parents[1]


def test_they_are_langgraphs_own() -> None:
    assert ours.CHECKPOINTER == _constants.CONFIG_KEY_CHECKPOINTER
    assert ours.DURABILITY == _constants.CONFIG_KEY_DURABILITY
    assert ours.RESUMING == _constants.CONFIG_KEY_RESUMING
    assert ours.SCRATCHPAD == _constants.CONFIG_KEY_SCRATCHPAD


def test_no_other_module_names_them() -> None:
    naming = {
        path.name
        for folder in ("memagent_graph", "integrations", "training")
        for path in (ROOT / folder).rglob("*.py")
        if "__pregel_" in path.read_text("utf-8")
    }
    assert naming == {"langgraph_internals.py"}
