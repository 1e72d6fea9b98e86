"""Every way of reading that ships, the example's, and one of the tests' own with segments, and who reads perfectly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from langgraph.graph import END

from memagent_graph import ANSWER, UPDATE, Role, Strategy, StrategyGraph, branch
from memagent_graph.reading.branching import Segment, cut_segments
from memagent_graph.reading.state import ReaderState, merge_entries
from memagent_graph.reading.steps import answer_from
from support.scripts import part, perfect_reader

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'own_strategy.py'}:OwnGate"
SEGMENTS = f"{__file__}:Segments"
EVERY = (
    "overwrite",
    "gated:stop=yes",
    "gated:passes=2",
    "refine",
    "map_reduce",
    "parallel",
    "segments:count=3",
    "reread",
    "recall",
    EXAMPLE,
    SEGMENTS,
)


def short(name: str) -> str:
    """A strategy's name without the folder that its file is in."""
    return name.rpartition("/")[2]


_FACT = re.compile(r"The key of (\w+) is (\d+)\.|^(\w+) (\d+)$", re.MULTILINE)


def reads_perfectly(prompt: str) -> str:
    """A policy that does in each role what it is asked."""
    problem = part(prompt, "problem")
    if prompt.rstrip().endswith(("KEEP or REWRITE:", "KEEP, REWRITE or STOP:")):
        memory = perfect_reader(prompt)
        return "KEEP" if memory in {part(prompt, "memory"), "nothing yet"} else f"REWRITE\n{memory}"
    if "RECALL:" in prompt:
        memory, facts = perfect_reader(prompt), _FACT.findall(part(prompt, "section"))
        return f"{memory}\nRECALL: key of harbor" if any("castle" in fact for fact in facts) else memory
    if prompt.rstrip().endswith("ANSWER or ASK:"):
        return "ANSWER" if "castle" in part(prompt, "memory") + problem else "ASK\nWhat is the key of castle?"
    if "<found>" in prompt:
        lines = [*part(prompt, "found").splitlines(), *part(prompt, "memory").splitlines()]
        return "\n".join(line for line in lines if line not in {"nothing yet", "(empty)"}) or "nothing yet"
    if "<parts>" in prompt or "<findings>" in prompt or "one of many parts" in prompt:
        facts = _FACT.findall(part(prompt, "parts") + part(prompt, "findings") + part(prompt, "section"))
        lines = [f"{name or again} {key or once}" for name, key, again, once in facts if (name or again) in problem]
        return "\n".join(line for line in dict.fromkeys(lines) if line not in part(prompt, "memory")) or "none"
    if "Reply with yes or no" in prompt:
        return "yes" if any(name in problem for name, *_ in _FACT.findall(part(prompt, "section"))) else "no"
    prompt = prompt.replace("draft>", "memory>")
    memory = part(prompt, "memory")
    lines = [line for line in memory.splitlines() if line != "nothing yet"]
    if "<section>" not in prompt and lines:  # of several memories below each other, some may say that they hold nothing
        prompt = prompt.replace(memory, "\n".join(lines))
    return perfect_reader(prompt)


MERGE = Role(
    "merge",
    fields=frozenset({"parts"}),
    template="<parts>\n{parts}\n</parts>\n\nBring the parts together.\n\n<problem>\n{prompt}\n</problem>",
)


class SegmentsState(ReaderState):
    segments: NotRequired[list[Segment]]
    lines: NotRequired[Annotated[dict[str, Any], merge_entries]]
    """By segment: where its next chunk begins, its memory, and the step that wrote it."""
    wave: NotRequired[list[str]]


@dataclass(frozen=True)
class Segments(Strategy):
    """Several segments side by side, each with a memory of its own, which are merged at the end."""

    count: int = 3
    name = "three_segments"
    roles = (UPDATE, MERGE, ANSWER)
    state = SegmentsState

    def wire(self, graph: StrategyGraph) -> None:
        graph.add_node("cut", self._cut)
        graph.add_node("next_chunks", self._next_chunks)
        graph.add_node("read_segment", self._read_segment)
        graph.add_node("merge", self._merge)
        graph.add_edge("open_document", "cut")
        graph.add_edge("cut", "next_chunks")
        graph.add_conditional_edges("next_chunks", self._after_next, ["read_segment", "merge", END])
        graph.add_edge("read_segment", "next_chunks")
        graph.add_edge("merge", END)

    @property
    def continues_after(self) -> str:
        return "cut"

    def edited(self, state, call, text):
        return {"lines": {call.branch: {**state["lines"][call.branch], "memory": text}}}

    async def _cut(self, state, step):
        return {"segments": await cut_segments(step, self.count)}

    def _open(self, state):
        lines = state.get("lines", {})
        places = {
            str(number): {"memory": "", **segment, **lines.get(str(number), {})}
            for number, segment in enumerate(state["segments"])
        }
        return {name: line for name, line in places.items() if line["cursor"]["index"] < line["end"]}

    async def _next_chunks(self, state, step):
        if stop := step.limit():
            return stop
        open_ = list(self._open(state))
        return {"wave": open_[: step.chunks_left(len(open_))]}

    def _after_next(self, state):
        if state.get("stop_reason"):
            return END
        open_ = self._open(state)
        return [
            branch("read_segment", state, name, cursor=open_[name]["cursor"], memory=open_[name]["memory"])
            for name in state["wave"]
        ] or "merge"

    async def _read_segment(self, state, step):
        span, cursor = await step.next_chunk(state["cursor"])
        memory = state["memory"]
        reply = await step.ask(UPDATE, memory=memory, chunk=step.text(span), previous=memory, reads=[span])
        step.mark_read(span)
        return {"lines": {step.branch: {"cursor": cursor, "memory": reply.text, "step": reply.step}}}

    async def _merge(self, state, step):
        lines = [state["lines"][name] for name in sorted(state["lines"])]
        parts = "\n".join(line["memory"] for line in lines)
        merged = await step.ask(MERGE, parts=parts, parents=[line["step"] for line in lines])
        return await answer_from(merged.text, step, [merged.step])


def policy_prompt_ids(prompt: str) -> list[int]:
    """Token ids as a policy might tell them: made from the text."""
    return [ord(character) % 60 + 3 for character in prompt][-40:]
