"""Strategies: a strategy is a graph of steps, with the roles in which it calls the policy, and its own state.

A strategy is a subclass of `Strategy`: a frozen dataclass whose fields are its options. From `strategies/overwrite.py`:

    @dataclass(frozen=True)
    class SequentialStrategy(Strategy):
        passes: int = field(default=1, kw_only=True)
        state: ClassVar[type] = PassState

        def wire(self, graph: StrategyGraph) -> None:
            graph.add_loop("read_chunk", self._read_chunk, self.update_node, self._update_memory)
            ...

    @dataclass(frozen=True)
    class Overwrite(SequentialStrategy):
        name: ClassVar[str] = "overwrite"
        roles: ClassVar[tuple[Role, ...]] = (UPDATE, ANSWER)

Its runs can then be logged, resumed, edited, shown, evaluated and used for training.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, ClassVar

from langgraph.channels import BinaryOperatorAggregate, Topic
from langgraph.graph import START, StateGraph
from langgraph.types import Overwrite as Reset

from memagent_graph.errors import StrategyError
from memagent_graph.reading.execution import Execution
from memagent_graph.reading.nodes import LoopNode, RouteNode, StepNode
from memagent_graph.reading.state import ReaderContext, ReaderInput, ReaderOutput, ReaderState
from memagent_graph.reading.steps import Change, Route, Step, StepContext
from memagent_graph.roles import Role
from memagent_graph.trace import Call

OPEN_DOCUMENT = "open_document"
"""The first node of every graph. It resets the state of an earlier run on the same thread."""
_INPUT_KEYS = frozenset({"question", "document"})


class Strategy(ABC):
    """A reading strategy. Its fields are its options."""

    name: ClassVar[str] = ""
    """The unique name in logs and on the command line."""
    roles: ClassVar[tuple[Role, ...]] = ()
    """All roles that the steps use."""
    state: ClassVar[type] = ReaderState
    """The class of the state: a TypedDict that extends `ReaderState` or `SequentialState`. After a resume, strings,
    numbers, dates, lists, dicts, and sets of strings, numbers or dates are unchanged; other sets are lists, and
    messages and objects of your own classes are plain values. A state of more than 128 KiB needs texts as the keys of
    its dicts, and at most 6 objects inside each other. Arrays of NumPy are refused."""
    continues_after: ClassVar[str] = OPEN_DOCUMENT
    """The node after which a run that was stopped at a limit continues."""
    uses_previous_calls: ClassVar[bool] = False
    """Whether the steps use `StepContext.load_previous_calls`. It is available only then."""
    reads_all: ClassVar[bool] = True
    """Whether the policy sees all of the document. A profile may only name a strategy that does."""
    shown_extent: ClassVar[str] = (
        "all of it, from beginning to end, unless the read stops early, which the answer then says"
    )
    """The parts of a document that the policy sees, in words for agents. See also `ReadResult.extent`."""

    def require_at_least(self, minimum: int, *options: str, alternative: str = "") -> None:
        """Refuse options whose number is below `minimum`.

        Args:
            minimum: the smallest allowed number.
            options: the names of the options.
            alternative: another remedy for the hint, such as a strategy without this option.

        Raises:
            StrategyError: an option is below `minimum`.
        """
        for option in options:
            if (value := getattr(self, option)) < minimum:
                remedy = f"Use {minimum} or more"
                raise StrategyError(
                    f"{self.name}:{option} must be at least {minimum}, got {value}",
                    hint=f"{remedy}, or {alternative}." if alternative else f"{remedy}.",
                )

    @abstractmethod
    def wire(self, graph: StrategyGraph) -> None:
        """Add nodes and edges from the existing node `OPEN_DOCUMENT` to END."""

    def compute_current_memory(self, state: Mapping[str, Any], context: ReaderContext) -> str:
        """Return the memory from which the policy would answer now."""
        del context
        return state.get("memory") or ""

    def apply_edit(self, state: Mapping[str, Any], call: Call, text: str) -> Change:
        """Return the change of state when a person replaces the memory that a call wrote.

        Args:
            state: the state after the call.
            call: the call.
            text: the new memory.

        Raises:
            RunError: this memory cannot be replaced.
        """
        return {"memory": text}


class StrategyGraph:
    """The graph that a strategy builds: LangGraph's builder, with steps as nodes.

    Raises:
        StrategyError: name or roles are missing, the state lacks keys of `ReaderState`, or the graph is not valid.
    """

    def __init__(self, strategy: Strategy) -> None:
        if not strategy.name:
            raise StrategyError(
                f"{type(strategy).__name__} has no name", hint='Set `name` in its class, such as "my_way".'
            )
        names = [role.name for role in strategy.roles]
        if not names:
            raise StrategyError(
                f"the strategy {strategy.name} has no roles",
                hint="List in `roles` every role that its steps use, such as (UPDATE, ANSWER).",
            )
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise StrategyError(
                f"the strategy {strategy.name} has two roles {duplicate!r}", hint="Use a unique name for every role."
            )
        self.builder: StateGraph[Any, Execution, ReaderInput, ReaderOutput] = StateGraph(
            strategy.state, context_schema=Execution, input_schema=ReaderInput, output_schema=ReaderOutput
        )
        if missing := ReaderState.__annotations__.keys() - self.builder.channels.keys():
            raise StrategyError(
                f"the state of {strategy.name} lacks {', '.join(sorted(missing))}",
                hint="Make its state class extend ReaderState.",
            )
        self._routes: dict[str, Route] = {}
        """The conditional edges, by their start node."""
        self.add_node(OPEN_DOCUMENT, self._open_document)
        self.builder.add_edge(START, OPEN_DOCUMENT)
        try:
            strategy.wire(self)
            for node in [node.runnable for node in self.builder.nodes.values()]:
                if isinstance(node, LoopNode) and node.first_node.node not in self._routes:
                    raise ValueError(f"{node.first_node.node} begins a loop, but has no conditional edges")
            if strategy.continues_after not in self.builder.nodes:
                raise ValueError(f"`continues_after` is {strategy.continues_after!r}, which is not one of its nodes")
            self.builder.validate()
        except ValueError as error:
            raise StrategyError(
                f"the graph of {strategy.name} is not valid: {error}", hint="See the strategy's `wire`."
            ) from error

    def add_node(self, name: str, step: Step) -> None:
        """Add a step as a node."""
        self.builder.add_node(name, StepNode(name, step, self.builder.channels))

    def add_loop(self, first: str, first_step: Step, second: str, second_step: Step) -> None:
        """Add two alternating nodes. If nothing observes the read, the second node runs both; see `LoopNode`."""
        channels = self.builder.channels
        first_node = StepNode(first, first_step, channels)
        self.builder.add_node(first, first_node)
        self.builder.add_node(second, LoopNode(second, second_step, channels, first_node, self._routes))

    def add_edge(self, start: str | list[str], end: str) -> None:
        """Add an edge between nodes. With several start nodes, the target runs when all of them have finished."""
        self.builder.add_edge(start, end)

    def add_conditional_edges(self, start: str, choose: Route, targets: Sequence[str]) -> None:
        """Add edges from a node to the node or branches that `choose` returns.

        Args:
            start: the node.
            choose: a function of the state that returns the name of a node, END, or a list of `branch(...)`.
            targets: all nodes that it may return.
        """
        self._routes[start] = choose
        name = getattr(choose, "__name__", start)
        self.builder.add_conditional_edges(start, RouteNode(choose, name), list(targets))

    async def _open_document(self, state: ReaderState, step: StepContext) -> Change:
        """Begin a run: reset every channel."""
        if recording := step.execution.recording:
            recording.begin(step, replaces_run=True)
        channels = self.builder.channels.items()
        empty_values = {name: _make_empty_value(channel) for name, channel in channels if name not in _INPUT_KEYS}
        return {**empty_values, "memory": "", "run_id": state["run_id"], "settings": step.context.settings}

    def compute_fingerprint(self, strategy: Strategy) -> str:
        """Return a hash of the strategy's name, options, roles, state and edges."""
        options: Sequence[Field[Any]] = fields(strategy) if is_dataclass(strategy) else ()
        parts = [
            strategy.name,
            repr(sorted((option.name, getattr(strategy, option.name)) for option in options if option.compare)),
            *(role.signature for role in strategy.roles),
            *sorted(self.builder.nodes),
            *sorted(f"{start}>{end}" for start, end in self.builder.edges),
            *sorted(f"{'+'.join(sorted(starts))}>{end}" for starts, end in self.builder.waiting_edges),
            *sorted(
                f"{start}>{'|'.join(sorted((branch.ends or {}).values()))}"
                for start, node_branches in self.builder.branches.items()
                for branch in node_branches.values()
            ),
            *sorted(self.builder.channels),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _make_empty_value(channel: Any) -> Any:
    """Return the value that makes a channel empty again."""
    if isinstance(channel, BinaryOperatorAggregate):
        return Reset(type(channel)(channel.typ, channel.operator).get())
    return [] if isinstance(channel, Topic) else None
