"""Map and reduce: finds the facts of all chunks in parallel, then merges the findings as a tree; in one or more passes.

Strategies with other branches extend `BranchingStrategy`. A branch reads one chunk, or merges one group, in one
superstep. Its finding is stored under its name, so a killed run loses only its running branches.

A finding is named after its chunk, "12", or after the first and the last, "12-15"; in a later pass, the pass is
in front, "2.12".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NotRequired

from langgraph.graph import END
from langgraph.types import Send
from typing_extensions import TypedDict

from memagent_graph.documents.chunking import Cursor, start_cursor
from memagent_graph.errors import BudgetError
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.policy_request import Reply
from memagent_graph.reading.state import ReaderContext, ReaderState, merge_entries
from memagent_graph.reading.steps import Change, Step, StepContext, branch, end_with_answer, get_chosen_chunk
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, ParsedReply, Role
from memagent_graph.trace import Call

_SEPARATOR_TOKENS = 2
"""Maximum number of tokens of a line break between two findings."""


class Finding(TypedDict):
    """A branch's memory, and the id of the call that wrote it."""

    call_id: str
    text: str


class BranchingState(ReaderState):
    """The state of a parallel read: the next chunks, the chosen chunks, and the findings."""

    cursor: NotRequired[Cursor]
    spans: NotRequired[list[dict[str, Any]] | None]
    """The chosen chunks, as `Span.stored`."""
    findings: NotRequired[Annotated[dict[str, Finding], merge_entries]]
    """By branch (the index of a chunk, or the name of a merge). Merged findings are removed."""
    groups: NotRequired[list[list[str]]]
    """The groups to merge, each a list of findings by branch; empty when all findings fit into one memory."""


class BranchState(BranchingState):
    """The state of a branch: the chunk that it reads, or the findings that it merges."""

    branch: str
    span: NotRequired[dict[str, Any]]
    group: NotRequired[dict[str, Finding]]


class BranchingStrategy(Strategy):
    """A strategy that reads in parallel, merges the findings of its branches, and answers from the result."""

    state: ClassVar[type] = BranchingState

    def wire_merging(self, graph: StrategyGraph, *, next_node: str = "answer") -> None:
        """Add gather -> merge_findings, in parallel -> gather -> ... -> `next_node`, and the answer.

        Args:
            graph: the graph of the strategy.
            next_node: the node that follows when all findings fit into one memory.
        """

        def branch_per_group(state: BranchingState) -> str | Sequence[Send]:
            findings = state.get("findings", {})
            return [
                branch("merge_findings", state, _merge_name(group), group={name: findings[name] for name in group})
                for group in state.get("groups", ())
            ] or next_node

        graph.add_node("gather", gather)
        graph.add_node("merge_findings", merge_findings)
        graph.add_node("answer", answer_from_findings)
        graph.add_conditional_edges("gather", branch_per_group, ["merge_findings", next_node])
        graph.add_edge("merge_findings", "gather")
        graph.add_edge("answer", END)

    def compute_current_memory(self, state: Mapping[str, Any], context: ReaderContext) -> str:
        """Return all findings, cut to the budget of a memory."""
        findings = sort_findings(state).values()
        return context.truncate(join_findings(findings, context), context.budget.memory_tokens)

    def apply_edit(self, state: Any, call: Call, text: str) -> Change:
        """Replace a branch's finding."""
        return {"findings": {call.branch: Finding(call_id=call.id, text=text)}}


async def gather(state: BranchingState, step: StepContext) -> Change:
    """Group the findings so that one call can merge a group. Empty findings are dropped."""
    findings, prompts = sort_findings(state), step.context.prompts
    empty_names = [name for name, finding in findings.items() if not parse_finding(finding["text"], prompts).text]
    nonempty = {name: finding for name, finding in findings.items() if name not in empty_names}
    return {"findings": dict.fromkeys(empty_names), "groups": group_findings(nonempty, step.context)}


def add_finding(reply: Reply, step: StepContext, *, replaces: Iterable[str] = (), memory: str = "") -> Change:
    """Return the change that adds the reply of a branch as a finding.

    Args:
        reply: the reply. If it is empty or equal to `memory`, nothing is added.
        step: the context of the branch's step.
        replaces: the findings that the branch merged.
        memory: the memory that the prompt showed.
    """
    finding = Finding(call_id=reply.call_id, text=reply.text) if reply.text and reply.text != memory else None
    return {"findings": {**dict.fromkeys(replaces), step.branch: finding}}


async def merge_findings(state: BranchState, step: StepContext) -> Change:
    """Merge a group of findings into one."""
    group = state["group"]
    texts = join_findings(group.values(), step.context)
    previous = step.context.truncate(texts, step.context.budget.memory_tokens)
    reply = await step.ask(MERGE, chunk=texts, previous=previous, parents=_get_call_ids(group.values()))
    return add_finding(reply, step, replaces=group)


async def answer_from_findings(state: BranchingState, step: StepContext) -> Change:
    """Ask for the answer from the remaining findings."""
    findings = sort_findings(state).values()
    memory = join_findings(findings, step.context)
    return end_with_answer(await step.ask(ANSWER, memory=memory, parents=_get_call_ids(findings)), memory, step)


def _get_call_ids(findings: Iterable[Finding]) -> list[str]:
    return [finding["call_id"] for finding in findings]


def sort_findings(state: Mapping[str, Any]) -> dict[str, Finding]:
    """Return the findings in the order of their passes and chunks."""

    def get_pass_and_chunk(name: str) -> tuple[int, int]:
        pass_number, _, chunk = name.split("-", maxsplit=1)[0].rpartition(".")
        return int(pass_number or 1), int(chunk)

    findings = state.get("findings", {})
    return {name: findings[name] for name in sorted(findings, key=get_pass_and_chunk)}


def _merge_name(names: Sequence[str]) -> str:
    """Return the name of a merge: its first and last chunk, such as "12-15"."""
    return f"{names[0].split('-')[0]}-{names[-1].split('-')[-1]}"


def parse_finding(text: str, prompts: Prompts) -> ParsedReply:
    """Parse a reply. "Nothing" becomes an empty memory."""
    word = text.strip().strip(".\"'()").casefold()
    return ParsedReply("" if word in {"", "none", prompts.empty_memory.strip("()").casefold()} else text)


MERGE = Role(
    "merge", fields=frozenset({"chunk"}), template=read_template("merge"), parse=parse_finding, fallback="update"
)


def join_findings(findings: Iterable[Finding], context: ReaderContext) -> str:
    """Return findings joined by line breaks. If there are several, they are cut so that any two can be merged."""
    texts = [finding["text"] for finding in findings]
    if len(texts) > 1:
        max_tokens = _compute_max_finding_tokens(context)
        texts = [context.truncate(text, max_tokens) for text in texts]
    return "\n".join(texts)


def group_findings(findings: Mapping[str, Finding], context: ReaderContext) -> list[list[str]]:
    """Return groups of neighbouring findings (by name) that one call can merge; none if all fit into one memory.

    Findings are cut so that any two can be merged, so a round leaves at most half of them, rounded up.

    Raises:
        BudgetError: there is no room for two findings of one token.
    """
    if len(findings) <= 1:
        return []
    max_tokens, group_tokens = _compute_max_finding_tokens(context), context.budget.chunk_tokens
    lengths = {name: context.count_shown_tokens(finding["text"]) for name, finding in findings.items()}
    sizes = {name: min(max_tokens, length) + _SEPARATOR_TOKENS for name, length in lengths.items()}
    if sum(sizes.values()) <= context.budget.memory_tokens:
        return []
    groups: list[list[str]] = []
    used_tokens = group_tokens
    for name, size in sizes.items():
        if used_tokens + size > group_tokens:
            groups.append([])
            used_tokens = 0
        groups[-1].append(name)
        used_tokens += size
    return [group for group in groups if len(group) > 1]


def _compute_max_finding_tokens(context: ReaderContext) -> int:
    """Return the maximum number of tokens of a finding."""
    budget = context.budget
    max_tokens = min(budget.memory_tokens, budget.chunk_tokens // 2 - _SEPARATOR_TOKENS)
    if max_tokens < 1:
        raise BudgetError(
            f"there is no room to merge the findings of two chunks (chunk_tokens is {budget.chunk_tokens})",
            hint="Raise chunk_tokens.",
        )
    return max_tokens


MAP = Role("map", fields=frozenset({"chunk"}), template=read_template("map"), parse=parse_finding, fallback="update")
EXTRACT = Role("extract", template=read_template("extract"), parse=parse_finding, fallback="update")


@dataclass(frozen=True)
class MapReduce(BranchingStrategy):
    """choose_chunks -> map_chunk, in parallel -> ... -> gather -> merge_findings, in parallel -> ... -> answer."""

    width: int = 64
    """Number of chunks that are chosen at once. The reader's `branches` limits how many are read in parallel."""
    name: ClassVar[str] = "map_reduce"
    roles: ClassVar[tuple[Role, ...]] = (MAP, MERGE, ANSWER)

    def __post_init__(self) -> None:
        self.require_at_least(1, "width")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the map and the reduce step."""
        self.wire_merging(graph)
        self.wire_chunks(graph, "map_chunk", _map_chunk)

    def wire_chunks(self, graph: StrategyGraph, node: str, read_chunk: Step) -> None:
        """Add choose_chunks -> `node`, in parallel -> choose_chunks -> ... -> gather; `read_chunk` reads a chunk."""

        def branch_per_chunk(state: ParallelState) -> str | Sequence[Send]:
            if state.get("stop_reason"):
                return END
            pass_number = state.get("number") or 1
            prefix = f"{pass_number}." if pass_number > 1 else ""
            previous = {key: state.get(key) for key in ("previous_memory", "previous_steps")}
            return [
                branch(node, state, f"{prefix}{span['index']}", span=span, **previous)
                for span in state.get("spans") or ()
            ] or "gather"

        graph.add_node("choose_chunks", self._choose_chunks)
        graph.add_node(node, read_chunk)
        graph.add_edge(OPEN_DOCUMENT, "choose_chunks")
        graph.add_conditional_edges("choose_chunks", branch_per_chunk, [node, "gather", END])
        graph.add_edge(node, "choose_chunks")

    async def _choose_chunks(self, state: BranchingState, step: StepContext) -> Change:
        """Choose the next chunks; none at the document's end. At a limit the read stops."""
        cursor, spans = state.get("cursor") or start_cursor(), list[dict[str, Any]]()
        if stop := step.stop_if_limit_reached():
            return {"spans": [], **stop}
        count = step.count_chunks_left(self.width)
        while len(spans) < count and (choice := await step.next_chunk(cursor)):
            span, cursor = choice
            spans.append(span.stored)
        return {"spans": spans, "cursor": cursor}


async def _map_chunk(state: BranchState, step: StepContext) -> Change:
    return add_finding(await step.read(MAP, get_chosen_chunk(state)), step)


class ParallelState(BranchingState):
    """The branches' findings, and the number of the pass."""

    number: NotRequired[int]
    """The number of the pass, from 1; None means 1."""
    previous_memory: NotRequired[str]
    """The memory after the previous passes."""
    previous_steps: NotRequired[list[str]]
    """The ids of the calls that wrote `previous_memory`."""


@dataclass(frozen=True)
class Parallel(MapReduce):
    """choose_chunks -> extract, in parallel -> ... -> gather -> merge_findings -> ... -> end_pass -> ... -> answer.

    After PI-Mem (arXiv 2608.03048), with two changes: findings are merged as a tree within the memory's budget, so no
    prompt grows with the document, and findings keep their chunks.
    """

    passes: int = 2
    """Maximum number of passes, each of which sees the memory of the previous one. A pass that finds nothing new is the
    last."""
    width: int = field(default=64, kw_only=True)  # so that `passes` comes first
    """Number of chunks that are chosen at once. The reader's `branches` limits how many are read in parallel."""
    name: ClassVar[str] = "parallel"
    roles: ClassVar[tuple[Role, ...]] = (EXTRACT, MERGE, ANSWER)
    state: ClassVar[type] = ParallelState

    def __post_init__(self) -> None:
        self.require_at_least(1, "passes", "width")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the steps of a pass, and the edge to the next pass."""
        graph.add_node("end_pass", self._end_pass)
        self.wire_merging(graph, next_node="end_pass")
        self.wire_chunks(graph, "extract", _extract)
        graph.add_conditional_edges("end_pass", _route_after_pass, ["choose_chunks", "answer"])

    async def _end_pass(self, state: ParallelState, step: StepContext) -> Change:
        """Begin the next pass, unless this was the last one or found nothing new."""
        pass_number, findings = state.get("number") or 1, sort_findings(state).values()
        call_ids = _get_call_ids(findings)
        if pass_number >= self.passes or call_ids == (state.get("previous_steps") or []):
            return {"spans": None}
        return {
            "spans": [],
            "cursor": start_cursor(),
            "number": pass_number + 1,
            "previous_memory": join_findings(findings, step.context),
            "previous_steps": call_ids,
        }


async def _extract(state: ParallelState, step: StepContext) -> Change:
    memory, parents = state.get("previous_memory") or "", state.get("previous_steps") or []
    reply = await step.read(EXTRACT, get_chosen_chunk(state), memory=memory, parents=parents)
    return add_finding(reply, step, memory=memory)


def _route_after_pass(state: ParallelState) -> str:
    return "answer" if state.get("spans") is None else "choose_chunks"
