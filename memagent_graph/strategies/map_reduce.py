"""Map and reduce: finds the facts of all chunks in parallel, then merges the findings as a tree.

Strategies with other branches extend `BranchingStrategy`. A branch reads one chunk, or merges one group, in one
superstep. Its finding is stored under its name, so a killed run loses only its running branches.

A finding is named after its chunk, "12", or after the first and the last, "12-15"; in a later pass, the pass is
in front, "2.12".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NotRequired

from langgraph.graph import END
from langgraph.types import Send
from typing_extensions import TypedDict

from memagent_graph.calls import Call
from memagent_graph.documents.chunking import Cursor, start_cursor
from memagent_graph.errors import BudgetError
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.policy_request import Reply
from memagent_graph.reading.state import ReaderContext, ReaderState, merge_entries
from memagent_graph.reading.steps import Change, Step, StepContext, answer_from, branch, get_chosen_chunk
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, ParsedReply, Role

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

    def wire_chunks(
        self,
        graph: StrategyGraph,
        node: str,
        read_chunk: Step,
        width: int,
        shared_keys: Iterable[str] = (),
    ) -> None:
        """Add the first nodes: choose_chunks -> `node`, in parallel -> choose_chunks -> ... -> gather.

        Args:
            graph: the graph of the strategy.
            node: the name of the step that reads a chunk.
            read_chunk: the step.
            width: the number of chunks that are chosen at once.
            shared_keys: further keys of the state that the branches read.
        """

        async def choose_chunks(state: BranchingState, step: StepContext) -> Change:
            """Choose the next chunks; none at the document's end. At a limit the read stops."""
            cursor, spans = state.get("cursor") or start_cursor(), list[dict[str, Any]]()
            if stop := step.stop_if_limit_reached():
                return {"spans": [], **stop}
            count = step.count_chunks_left(width)
            while len(spans) < count and (choice := await step.next_chunk(cursor)):
                span, cursor = choice
                spans.append(span.stored)
            return {"spans": spans, "cursor": cursor}

        def branch_per_chunk(state: Any) -> str | Sequence[Send]:
            if state.get("stop_reason"):
                return END
            pass_number = state.get("number") or 1
            prefix = f"{pass_number}." if pass_number > 1 else ""
            values, spans = {key: state[key] for key in shared_keys if key in state}, state.get("spans") or ()
            return [branch(node, state, f"{prefix}{span['index']}", span=span, **values) for span in spans] or "gather"

        graph.add_node("choose_chunks", choose_chunks)
        graph.add_node(node, read_chunk)
        graph.add_edge(OPEN, "choose_chunks")
        graph.add_conditional_edges("choose_chunks", branch_per_chunk, [node, "gather", END])
        graph.add_edge(node, "choose_chunks")

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
        findings = sort_findings(state.get("findings", {})).values()
        return context.truncate(join_findings(findings, context), context.budget.memory_tokens)

    def apply_edit(self, state: Any, call: Call, text: str) -> Change:
        """Replace a branch's finding."""
        return {"findings": {call.branch: Finding(call_id=call.id, text=text)}}


async def gather(state: BranchingState, step: StepContext) -> Change:
    """Group the findings so that one call can merge a group. Empty findings are dropped."""
    findings, prompts = sort_findings(state.get("findings", {})), step.context.prompts
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
    findings = sort_findings(state.get("findings", {})).values()
    return await answer_from(join_findings(findings, step.context), step, _get_call_ids(findings))


def _get_call_ids(findings: Iterable[Finding]) -> list[str]:
    return [finding["call_id"] for finding in findings]


def sort_findings(findings: Mapping[str, Finding]) -> dict[str, Finding]:
    """Return findings in the order of their passes and chunks."""
    return {name: findings[name] for name in sorted(findings, key=_make_finding_sort_key)}


def _make_finding_sort_key(name: str) -> tuple[int, int]:
    """Return the pass (from 1) and the first chunk in the name of a finding."""
    pass_number, _, chunk = name.split("-", maxsplit=1)[0].rpartition(".")
    return int(pass_number or 1), int(chunk)


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
        self.wire_chunks(graph, "map_chunk", _map_chunk, self.width)


async def _map_chunk(state: BranchState, step: StepContext) -> Change:
    return add_finding(await step.read(MAP, get_chosen_chunk(state)), step)
