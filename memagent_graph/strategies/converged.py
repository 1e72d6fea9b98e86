"""Stop early once the answer has settled: any strategy, asked for a draft answer every few chunks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, NotRequired, get_type_hints

from typing_extensions import TypedDict

from memagent_graph.calls import Call, Writes
from memagent_graph.errors import StrategyError
from memagent_graph.events import EventKind
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.policy import FinishReason
from memagent_graph.prompts import Prompts
from memagent_graph.reading.ask import Reply
from memagent_graph.reading.state import ReaderContext
from memagent_graph.reading.steps import Change, StepContext, route_when_enough
from memagent_graph.reading.strategy import Strategy, StrategyGraph
from memagent_graph.roles import Parsed, Role

_ABSTAINS: Final = re.compile(
    r"\b(unknown|unclear|none|n/?a|not (stated|mentioned|given|known|specified|provided|available|in (the )?memory)"
    r"|(no|insufficient) (answer|information)|(does|do|did) not (hold|say|contain|mention|know)"
    r"|cannot be|don't know)\b",
    re.IGNORECASE,
)
"""English phrases of an answer that says that it is not known."""


def _draft(text: str, prompts: Prompts) -> Parsed:
    return Parsed(text, prompts.extract_answer(text) or text)


PROBE = Role(
    "probe", Writes.DECISION, frozenset({"memory"}), bound="answer_tokens", parse=_draft, stand_in="answer", greedy=True
)
"""The answer's prompt, at temperature 0, for a draft that decides whether to continue."""


class ConvergedState(TypedDict):
    """The state that a rule for stopping adds."""

    drafts: NotRequired[list[str]]
    """The newest drafts, as many as are compared."""
    enough: NotRequired[bool]
    """Whether there is enough to answer from."""
    probed_at: NotRequired[int]
    """The number of chunks that had been read at the newest probe."""


@dataclass(frozen=True)
class Converged(Strategy):
    """A strategy that runs `probe` before it chooses the next chunk (after ACS; it needs no training).

    A probe asks for the answer from the present memory, at temperature 0. Reading stops when the newest draft is
    confident, is not an abstention, and the newest drafts hardly differ. Probes count in the cost.

    Parallel strategies are probed after each wave (`width`), from as much of the findings as fits into a memory.
    """

    strategy: Strategy
    confidence: float = 0.995
    """The smallest exp(mean log-probability of the draft's tokens) that is accepted."""
    change: float = 0.05
    """The largest mean of 1 - token F1 of neighbouring drafts that is accepted."""
    drafts: int = 3
    """The number of drafts to compare, at least two."""
    every: int = 1
    """Chunks between two probes."""
    name: ClassVar[str] = "converged"

    def __post_init__(self) -> None:
        for option, fits, needed in (
            ("confidence", 0 < self.confidence <= 1, "above 0 and at most 1"),
            ("change", 0 <= self.change <= 1, "from 0 to 1"),
            ("drafts", self.drafts >= 2, "2 or more"),
            ("every", self.every >= 1, "1 or more"),
        ):
            if not fits:
                raise StrategyError(f"converged:{option}={getattr(self, option)} cannot be used", hint=f"Use {needed}.")
        inner = self.strategy
        make: Any = TypedDict
        hints = (get_type_hints(kind, include_extras=True) for kind in (inner.state, ConvergedState))
        state = make("ConvergedState", {name: kind for channels in hints for name, kind in channels.items()})
        for attribute, value in {
            "name": f"{inner.name}+converged",
            "roles": (*inner.roles, PROBE),
            "state": state,
            "choosing_node": inner.choosing_node,
            "concluding_node": inner.concluding_node,
            "looks_back": inner.looks_back,
            "reads_all": inner.reads_all,
        }.items():
            object.__setattr__(self, attribute, value)

    def wire(self, graph: StrategyGraph) -> None:
        """Add the strategy's graph, with a probe before each choice of a chunk."""
        inner = self.strategy
        before, after = inner.choosing_node, inner.concluding_node
        graph.add_node("probe", self._probe)
        graph.insert_before("probe", to=before)
        inner.wire(graph)
        if missing := {before, after} - graph.builder.nodes.keys():
            raise StrategyError(
                f"{inner.name} cannot stop early: it has no node {missing.pop()!r}",
                hint="Set `choosing_node`, which chooses what to read, and `concluding_node`, after the last chunk.",
            )
        graph.add_conditional_edges("probe", route_when_enough(before, then=after), [before, after])

    @property
    def continues_after(self) -> str:
        """As in the strategy."""
        return self.strategy.continues_after

    def current_memory(self, state: Mapping[str, Any], context: ReaderContext) -> tuple[str, Sequence[str] | None]:
        """As in the strategy."""
        return self.strategy.current_memory(state, context)

    def is_at_end(self, state: Mapping[str, Any]) -> bool:
        """As in the strategy."""
        return self.strategy.is_at_end(state)

    def edited(self, state: Mapping[str, Any], call: Call, text: str) -> Change:
        """As in the strategy; drafts from before the edit are dropped."""
        return {**self.strategy.edited(state, call, text), "drafts": [], "enough": False}

    async def _probe(self, state: Any, step: StepContext) -> Change:
        chunks = state.get("chunks_read", 0)
        if chunks - (state.get("probed_at") or 0) < self.every:
            return {}
        memory, parents = self.current_memory(state, step.context)
        if not memory:
            return {"probed_at": chunks, "drafts": []}
        reply = await step.ask(PROBE, memory=memory, parents=parents, slot=chunks)
        if reply.logprobs is None:
            if _should_have_logprobs(reply):
                raise StrategyError(
                    f"{step.context.policy.name} returns no log-probs, and this rule for stopping early needs them",
                    hint="Read without that rule, or use a server that returns logprobs (vLLM, llama.cpp).",
                )
            return {"probed_at": chunks, "drafts": []}
        drafts = [*(state.get("drafts") or []), reply.value or ""][-self.drafts :]
        confidence = math.exp(sum(reply.logprobs) / len(reply.logprobs)) if reply.logprobs else 0.0
        return {"probed_at": chunks, "drafts": drafts, "enough": self._is_enough(drafts, confidence)}

    def _is_enough(self, drafts: Sequence[str], confidence: float) -> bool:
        newest = drafts[-1]
        if len(drafts) < self.drafts or confidence < self.confidence or _abstains(newest):
            return False
        changes = [1 - _overlap(before, after) for before, after in pairwise(drafts)]
        return sum(changes) / len(changes) <= self.change


def _should_have_logprobs(reply: Reply) -> bool:
    """Return whether a draft without log-probs means that the policy has none: not if it is empty or refused.

    Log-probs may also have been dropped, because they did not belong to the tokens.
    """
    were_dropped = any(event.kind is EventKind.LOGPROBS_DROPPED for event in reply.call.events)
    return bool(reply.raw) and not were_dropped and reply.call.completion.finish_reason is not FinishReason.REFUSED


def _abstains(draft: str) -> bool:
    """Return whether a draft says that the answer is not known: as a whole, or in English in one of its phrases."""
    return gives_no_answer(draft) or _ABSTAINS.search(draft) is not None


def _overlap(one: str, other: str) -> float:
    """Return the F1 of two texts' words, without order and letter case; 1 for two empty texts."""
    first, second = Counter(one.casefold().split()), Counter(other.casefold().split())
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 1.0
