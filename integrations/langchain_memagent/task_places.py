"""Where, in the checkpoints of the graph around, a read that one of its nodes or tools makes is kept.

Such a read is found again when its node is executed again: after a kill or an error, by the graph; and at once, by
LangGraph's `RetryPolicy` and by LangChain's `ToolRetryMiddleware`. Where the graph around keeps no checkpoints, the
read is kept in memory, as long as the node is tried.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from memagent_graph.documents import DocumentRef
from memagent_graph.reading.langgraph_internals import CHECKPOINTER, RESUMING, SCRATCHPAD, inherited, task_around

_kept: dict[int, InMemorySaver] = {}
"""By the id of the task, which takes its entry with it."""


def own_place(config: RunnableConfig, name: str = "") -> RunnableConfig:
    """The config of a graph whose checkpoints lie in a place of that name below a task's own, or right there.

    LangGraph would tell several graphs that are called in one task apart by the order of their calls; after a crash
    that may be another order, and one would continue with the read of another.
    """
    place = config.get("configurable", {})
    if (scratchpad := place.get(SCRATCHPAD)) is None:
        return config
    namespace = f"{place['checkpoint_ns']}|{name}" if name else place["checkpoint_ns"]
    counter = replace(scratchpad, subgraph_counter=lambda: 0)
    return _changed(config, {"checkpoint_ns": namespace, SCRATCHPAD: counter})


def kept_for_retries(config: RunnableConfig) -> RunnableConfig:
    """The config, with checkpoints in memory for the task that it belongs to, if the graph around keeps none."""
    if inherited(config, CHECKPOINTER) or (task := task_around(config)) is None:
        return config
    if (saver := _kept.get(id(task))) is None:
        saver = _kept.setdefault(id(task), InMemorySaver())
        weakref.finalize(task, _kept.pop, id(task), None)
    thread = config["configurable"].get("thread_id") or task.id
    return _changed(config, {CHECKPOINTER: saver, "thread_id": thread})


def resuming(config: RunnableConfig) -> RunnableConfig:
    """The config of a graph that continues from its checkpoint, and leaves its input aside."""
    return _changed(config, {RESUMING: True})


def kept_at(config: RunnableConfig, namespace: str | None = None) -> RunnableConfig:
    """A config that leads to the checkpoints of the graph that is called with `config`, or to others of its thread."""
    given = config["configurable"]
    return {
        "configurable": {
            "thread_id": given["thread_id"],
            "checkpoint_ns": given["checkpoint_ns"] if namespace is None else namespace,
            CHECKPOINTER: given[CHECKPOINTER],
        }
    }


class TaskPlace:
    """The place of one read among those of its task.

    The task's first read has the task's own place, where LangGraph looks for a subgraph's state; others have one that
    is named by what they read. What is found there of the same question and document is continued. So two calls of one
    task that ask the same of the same document are one read.

    Args:
        config: with which the read is called.
        reference: the document's.
        question: the question.

    Ask the graph for the state at `to_look_up` and pass it to `found`, until there is nothing to look up.
    """

    def __init__(self, config: RunnableConfig, reference: DocumentRef, question: str) -> None:
        self.config = config
        """With which to call the graph."""
        self._reference, self._question = reference, question
        self._places: list[RunnableConfig] = []
        if inherited(config, SCRATCHPAD) is not None and inherited(config, CHECKPOINTER):
            digest = hashlib.sha256(repr((reference["key"], question)).encode("utf-8", "replace")).hexdigest()
            self._places = [own_place(config), own_place(config, f"memagent:{digest[:24]}")]

    @property
    def to_look_up(self) -> RunnableConfig | None:
        """Where the read may have been kept."""
        return kept_at(self._places[0]) if self._places else None

    def found(self, state: Mapping[str, Any]) -> None:
        """Take the state that is kept there, if one is."""
        place = self._places.pop(0)
        if state and self._is_same(state):
            self.config, self._places = resuming(place), []
        elif not self._places or (not state and self._is_first_call()):
            self.config, self._places = place, []

    def _is_first_call(self) -> bool:
        return bool(self.config["configurable"][SCRATCHPAD].subgraph_counter() == 0)

    def _is_same(self, state: Mapping[str, Any]) -> bool:
        """Whether it is a read of the same; a stream that is stored again has another key."""
        keys = {state["document"]["key"], self._reference["key"]}
        is_stream = any(key.startswith("stream:") for key in keys)
        return bool(state["question"] == self._question) and (len(keys) == 1 or is_stream)


def _changed(config: RunnableConfig, changes: Mapping[str, Any]) -> RunnableConfig:
    return {**config, "configurable": {**config.get("configurable", {}), **changes}}
