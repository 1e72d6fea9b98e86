"""Where a read by a node or a tool is kept in the checkpoints of the surrounding graph.

Such a read is found when its node is executed again: after a kill or an error, by the graph; or immediately, by
LangGraph's `RetryPolicy` or LangChain's `ToolRetryMiddleware`. If the surrounding graph has no checkpoints, the read is
kept in memory while the node is retried.
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
"""By the task's id; an entry is removed with its task."""


def own_place(config: RunnableConfig, name: str = "") -> RunnableConfig:
    """The config of a graph whose checkpoints are in a namespace of that name below the task's own, or in the task's
    own.

    LangGraph distinguishes several graphs in one task by the order of their calls; after a crash the order may differ,
    and one would continue with the read of another.
    """
    place = config.get("configurable", {})
    if (scratchpad := place.get(SCRATCHPAD)) is None:
        return config
    namespace = f"{place['checkpoint_ns']}|{name}" if name else place["checkpoint_ns"]
    counter = replace(scratchpad, subgraph_counter=lambda: 0)
    return _changed(config, {"checkpoint_ns": namespace, SCRATCHPAD: counter})


def kept_for_retries(config: RunnableConfig) -> RunnableConfig:
    """The config, with checkpoints in memory for its task, if the surrounding graph has none."""
    if inherited(config, CHECKPOINTER) or (task := task_around(config)) is None:
        return config
    if (saver := _kept.get(id(task))) is None:
        saver = _kept.setdefault(id(task), InMemorySaver())
        weakref.finalize(task, _kept.pop, id(task), None)
    thread = config["configurable"].get("thread_id") or task.id
    return _changed(config, {CHECKPOINTER: saver, "thread_id": thread})


def resuming(config: RunnableConfig) -> RunnableConfig:
    """The config of a graph that continues from its checkpoint and ignores its input."""
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
    """The namespace of one read of a task.

    The task's first read has the task's own namespace, where LangGraph looks for a subgraph's state; others have one
    named by what they read. A read of the same question and document that is found there is continued. So two calls in
    one task with the same question and document are one read.

    Args:
        config: the config that the read is called with.
        reference: the document's.
        question: the question.

    Ask the graph for the state at `to_look_up` and pass it to `found`, until `to_look_up` is None.
    """

    def __init__(self, config: RunnableConfig, reference: DocumentRef, question: str) -> None:
        self.config = config
        """The config for the graph."""
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
        """Take the state that is stored there, if there is one."""
        place = self._places.pop(0)
        if state and self._is_same(state):
            self.config, self._places = resuming(place), []
        elif not self._places or (not state and self._is_first_call()):
            self.config, self._places = place, []

    def _is_first_call(self) -> bool:
        return bool(self.config["configurable"][SCRATCHPAD].subgraph_counter() == 0)

    def _is_same(self, state: Mapping[str, Any]) -> bool:
        """Whether it is a read of the same document and question; a stream that is stored again has another key."""
        keys = {state["document"]["key"], self._reference["key"]}
        is_stream = any(key.startswith("stream:") for key in keys)
        return bool(state["question"] == self._question) and (len(keys) == 1 or is_stream)


def _changed(config: RunnableConfig, changes: Mapping[str, Any]) -> RunnableConfig:
    return {**config, "configurable": {**config.get("configurable", {}), **changes}}
