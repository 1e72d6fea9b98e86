"""A loop without supersteps, for reads that nothing observes.

A superstep of LangGraph costs nearly as much processor time as everything else for a chunk. It exists so that what
is between two steps can be saved and seen. If nothing does either (no checkpoints, callbacks or stream), a loop
of two nodes runs within one superstep: the second node's step, then the first's, as long as each one's route leads
to the other. The result is the same, and the drawn graph is the one that runs in all other cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.channels import BinaryOperatorAggregate
from langgraph.runtime import get_runtime

from memagent_graph.errors import MemAgentError
from memagent_graph.reading.langgraph_internals import CHECKPOINTER, inherited
from memagent_graph.reading.nodes import Change, Route, StepNode
from memagent_graph.reading.state import ReaderContext
from memagent_graph.reading.strategy import StrategyGraph
from memagent_graph.reading.tracing import observed


@dataclass(frozen=True)
class FusedNode(StepNode):
    """The second node of a loop. If nothing observes the read, it runs the loop to its end."""

    first: StepNode = field(kw_only=True)
    route: Route = field(kw_only=True)
    """The first node's."""
    leave: Route | None = field(kw_only=True)
    """This node's own route, if it may leave the loop."""
    reducers: Mapping[str, Callable[[Any, Any], Any]] = field(kw_only=True, repr=False)
    """The reducers by channel."""

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        runtime = get_runtime(ReaderContext)
        context = runtime.context
        change = await self.run(input, runtime, config)
        if context.unseen_update is None or _is_observed(context, config):
            return change
        state, total = dict(input), dict[str, Any]()
        while True:
            self._merge(change, state, total)
            if context.meter.exceeded(context.limits) or (self.leave and self.leave(state) != self.first.node):
                return total
            try:
                chosen = await self.first.run(state, runtime, config)
            except MemAgentError:
                return total  # the graph runs this step again, and fails with it
            self._merge(chosen, state)
            if self.route(state) != self.node:
                return total  # the graph runs this step again, and follows its route
            context.unseen_update({**change, "memory": state.get("memory", "")})
            # Other tasks get their turn here, as between supersteps, even if the policy never waits.
            await asyncio.sleep(0)
            self._merge(chosen, total)
            change = await self.run(state, runtime, config)

    def _merge(self, change: Change, *into: dict[str, Any]) -> None:
        """Apply a change to states, or to earlier changes, with the channels' reducers, as the graph does."""
        for key, value in change.items():
            reducer = self.reducers.get(key)
            for each in into:
                before = each.get(key) if reducer else None
                each[key] = value if before is None or reducer is None else reducer(before, value)


def fuse(graph: StrategyGraph, loop: tuple[str, str]) -> None:
    """Let a loop's second node run the loop if nothing observes it."""
    first, second = loop
    nodes = graph.builder.nodes
    choosing, working = nodes[first].runnable, nodes[second].runnable
    if not isinstance(choosing, StepNode) or not isinstance(working, StepNode):
        raise TypeError(f"{first} and {second} are not both steps")
    channels = working.channels
    nodes[second].runnable = FusedNode(
        second,
        working.step,
        channels,
        first=choosing,
        route=graph.routes[first],
        leave=graph.routes.get(second),
        reducers={key: each.operator for key, each in channels.items() if isinstance(each, BinaryOperatorAggregate)},
    )


def _is_observed(context: ReaderContext, config: RunnableConfig | None) -> bool:
    """Whether checkpoints or callbacks would see a superstep with several steps in it."""
    return inherited(config, CHECKPOINTER) is not None or observed(context, config) is not context
