"""The timeline of a run, which the terminal, the page and the notebook draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from memagent_graph.calls import Writes
from memagent_graph.events import EventKind, count_events
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.plain_text import format_count, list_names
from memagent_graph.provenance.evidence import Evidence, LostLine, Provenance, SupportSpan, find_support
from memagent_graph.provenance.places import section_at
from memagent_graph.provenance.word_diff import Change, DiffOp, compare_words, count_words
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate, Trace

MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a timeline: a chunk or a merge of branches, and its change of the memory."""

    update: MemoryUpdate
    name: str
    """The name for people, such as "chunk 3", "chunk 41, branch 3" or "merge of branches 0, 1, 2"."""
    kept: bool
    """Whether the policy decided not to change the memory."""
    sources: tuple[int, ...]
    """The indices in `Timeline.steps` of the steps whose joined memories are `previous`."""
    previous: str
    """The memory before the step."""
    diff: tuple[Change, ...]
    """The difference from `previous` to the new memory; empty if they are equal."""
    inserted_words: int
    deleted_words: int
    density: float
    """The fraction of changed words, 0 to 1: inserted and deleted words, divided by the words of both memories."""
    section: str | None
    """The page or source at the beginning of the chunk."""
    notable: bool
    """Whether the step changed the memory, has events, merged branches, or read what the final memory quotes."""

    @property
    def short_name(self) -> str:
        """The name in a list of chunks: for a chunk on the trunk only its number."""
        return self.name.removeprefix("chunk ").replace(", branch", " on branch", 1)

    @property
    def changed(self) -> bool:
        """Whether the memory changed."""
        return bool(self.diff)

    @property
    def state(self) -> str:
        """What became of a memory that the step did not change, for people."""
        return "kept" if self.kept else "unchanged"

    def continues(self, other: Step) -> bool:
        """Return whether the step read a later chunk than the other one, on the same branch; another pass does not."""
        update, before = self.update, other.update
        return update.branch == before.branch and (update.chunk_number or 0) > (before.chunk_number or 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of a run. Tokens and seconds include answers and decisions."""

    chunks: int
    """Number of read chunks. A chunk that was read twice counts twice."""
    changes: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: dict[EventKind, int]


@dataclass(frozen=True)
class Timeline:
    """A run with the results of computations for display."""

    view: RunView
    steps: tuple[Step, ...]
    """In topological order. The steps of a branch are adjacent."""
    step_index_by_update: tuple[int, ...]
    """By index of an update in the trace: the index of its step in `steps`."""
    support_spans: tuple[SupportSpan, ...]
    """The parts of the final memory's lines whose words the answer repeats."""
    totals: Totals

    @property
    def provenance(self) -> Provenance:
        """The origins of the final memory's lines."""
        return self.view.provenance

    @property
    def excerpt(self) -> tuple[Evidence, ...] | None:
        """The quotes that support the answer, if an excerpt was shown instead of chunks; otherwise None."""
        return None if self.view.trace.newest_excerpt_call is None else self.provenance.evidence

    @property
    def share(self) -> float:
        """The fraction of the document that was read, 0 to 1; 1 if the run ended with an answer."""
        progress = [step.update.progress for step in self.steps if step.update.progress is not None]
        return max(progress, default=1.0) if self.view.answer is None else 1.0

    @property
    def no_quote_reason(self) -> str:
        """The reason why an answer from an excerpt has no quotes."""
        step = self.view.trace.newest_excerpt_call
        if step is not None and all(self.view.span_text(span) is None for span in step.reads):
            return "the document's text is no longer stored"
        return "nothing that was shown" if gives_no_answer(self.view.answer) else "no verbatim quote"

    @property
    def memory(self) -> str:
        """The final memory."""
        return self.view.trace.final_memory

    @property
    def branches(self) -> list[str]:
        """The names of branches in the order of their steps. The trunk ("") is first, if it has steps."""
        return sorted(dict.fromkeys(step.update.branch for step in self.steps), key=bool)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is known of the run, as names and texts for people."""
        view, totals = self.view, self.totals
        branches = len([branch for branch in self.branches if branch])
        branch_note = f", on {branches:,} branch{'es' if branches > 1 else ''}" if branches else ""
        share = "" if self.share == 1 else f", {self.share:.0%} of the document"
        if view.trace.newest_excerpt_call is None:
            read = f"{format_count(totals.chunks, 'chunk')}{share}, {totals.changes:,} changed the memory{branch_note}"
        else:
            passages = format_count(len({span for call in view.trace.calls for span in call.reads}), "passage")
            read = f"{passages} of {view.trace.tokens_shown:,} tokens in total"
        began = "" if view.began is None else f", {datetime.fromtimestamp(view.began).astimezone():%Y-%m-%d %H:%M}"
        cost = f"{totals.prompt_tokens:,} tokens in, {totals.completion_tokens:,} out; {_show_duration(totals.seconds)}"
        facts = {
            "run": view.run_id + began,
            "document": view.document["name"],
            "model": view.model,
            "strategy": "" if view.strategy == "overwrite" else view.strategy,
            "ended": view.stop_reason or "not yet: it runs, or was interrupted",
            "read" if view.trace.newest_excerpt_call is None else "shown": read,
            "cost": cost,
            "events": ", ".join(f"{kind.value} {count}" for kind, count in totals.events.items()),
            "rewards": ", ".join(f"{reward.name} {reward.value:g} ({reward.source})" for reward in view.rewards),
        }
        return [(name, text) for name, text in facts.items() if text]

    def step(self, update: int) -> Step:
        """Return the step for the index of an update in the trace."""
        return self.steps[self.step_index_by_update[update]]

    def group_steps(self) -> Iterator[tuple[bool, list[Step]]]:
        """Yield groups of steps: a single notable step, or ascending chunks of a branch that are not notable."""
        group: list[Step] = []
        for step in self.steps:
            if group and (step.notable or not step.continues(group[-1])):
                yield False, group
                group = []
            if step.notable:
                yield True, [step]
            else:
                group.append(step)
        if group:
            yield False, group

    def longest_lost_lines(self, count: int) -> list[LostLine]:
        """Return the lost lines that were in memory for the largest number of steps, in the order of their loss."""
        lost = self.provenance.lost
        held = sorted(range(len(lost)), key=lambda index: lost[index].update - lost[index].gone)
        return [lost[index] for index in sorted(held[:count])]

    def lost_range(self, lost: LostLine) -> str:
        """Return the first and last step at which a lost line was in memory, in words."""
        first, gone = self.step(lost.update).name, self.step(lost.gone).name
        if all(name.removeprefix("chunk ").isdecimal() for name in (first, gone)):
            return f"chunks {first.removeprefix('chunk ')} to {gone.removeprefix('chunk ')}"
        return f"{first} to {gone}"

    def quotes(self, line_index: int) -> list[Evidence]:
        """Return the quotes of one line of the final memory, longest first."""
        return [evidence for evidence in self.provenance.evidence if evidence.line_index == line_index]

    def split_by_support(self, line_index: int) -> list[tuple[str, bool]]:
        """Return the pieces of a line of the final memory, and whether the answer repeats them."""
        line = self.provenance.lines[line_index].line
        pieces: list[tuple[str, bool]] = []
        end = 0
        for part in self.support_spans:
            if part.line_index == line_index:
                pieces += [(line[end : part.start], False), (line[part.start : part.end], True)]
                end = part.end
        pieces.append((line[end:], False))
        return [piece for piece in pieces if piece[0]]


def label_group(steps: Sequence[Step]) -> str:
    """Return the label of ascending chunks of a branch that did not change the memory."""
    name, first, last = steps[0].name, steps[0].update.chunk_number, steps[-1].update.chunk_number
    if len(steps) > 1:
        name = f"chunks {first}-{last}{name.removeprefix(f'chunk {first}')}"
    return f"{name}: {' or '.join(sorted({step.state for step in steps}, reverse=True))}"


def _show_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours and not minutes:
        return f"{seconds:.1f} s"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def build_timeline(view: RunView) -> Timeline:
    """Return the timeline of a run, the input of renderers.

    For 700 chunks and memories of 1000 tokens, it takes about half a second, and about ten seconds if every
    chunk rewrites the whole memory.
    """
    trace = view.trace
    order = _order(trace)
    step_index_by_update = [0] * len(order)
    for position, number in enumerate(order):
        step_index_by_update[number] = position
    quoted = {evidence.update for evidence in view.provenance.evidence}
    times: Counter[tuple[str, int | None]] = Counter()
    steps = []
    for number in order:
        update, sources = trace.updates[number], trace.source_indices(trace.updates[number])
        previous = trace.memory_before(update.call_id)
        change = () if update.memory == previous else tuple(compare_words(previous, update.memory))
        inserted, deleted, kept = (
            sum(count_words(part.text) for part in change if part.op is op)
            for op in (DiffOp.INSERT, DiffOp.DELETE, DiffOp.EQUAL)
        )
        # A change of white space or punctuation changes no word, but it is a change.
        share = max((inserted + deleted) / max(1, inserted + deleted + 2 * kept), 0.01) if change else 0.0
        reads = update.chunk_index is not None
        times[update.branch, update.chunk_index] += 1
        steps.append(
            Step(
                update=update,
                name=_name(
                    update,
                    [trace.updates[source].branch for source in sources],
                    again=times[update.branch, update.chunk_index] > 1,
                ),
                kept=trace.calls_by_id[update.call_id].writes is Writes.DECISION,
                sources=tuple(step_index_by_update[source] for source in sources),
                previous=previous,
                diff=change,
                inserted_words=inserted,
                deleted_words=deleted,
                density=share,
                section=section_at(view.sections, update.start_char) if reads else None,
                notable=bool(change or update.events) or not reads or number in quoted,
            )
        )
    return Timeline(
        view=view,
        steps=tuple(steps),
        step_index_by_update=tuple(step_index_by_update),
        support_spans=find_support(view.answer or "", [line.line for line in view.provenance.lines]),
        totals=Totals(
            chunks=sum(step.update.chunk_index is not None for step in steps),
            changes=sum(step.changed for step in steps),
            prompt_tokens=sum(call.usage.prompt_tokens for call in trace.calls),
            completion_tokens=sum(call.usage.completion_tokens for call in trace.calls),
            seconds=sum(call.seconds for call in trace.calls),
            events=count_events([*view.document_events, *(event for call in trace.calls for event in call.events)]),
        ),
    )


def _order(trace: Trace) -> list[int]:
    """Return the indices of a trace's updates in topological order. Parallel branches are not interleaved."""
    sources = [trace.source_indices(update) for update in trace.updates]
    ends = set(range(len(sources))).difference(*sources)
    order: list[int] = []
    visited: set[int] = set()
    for end in sorted(ends):
        stack = [end]
        while stack:
            index = stack[-1]
            missing = [source for source in sources[index] if source not in visited]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if index not in visited:
                visited.add(index)
                order.append(index)
    return order


def _name(update: MemoryUpdate, branches: Sequence[str], *, again: bool) -> str:
    """Return the name of an update. `branches` are the branches of its source updates."""
    names = list(dict.fromkeys(branch or "trunk" for branch in branches))
    suffix = f", branch {update.branch}" if update.branch else ""
    if update.chunk_index is None:
        merge = f"merge of branches {list_names(names, MAX_NAMES)}"
        return f"{merge if len(names) > 1 else 'memory rewritten'}{suffix}"
    return f"chunk {update.chunk_number}{suffix}{' (read again)' if again else ''}"
