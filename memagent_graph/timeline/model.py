"""The timeline of a run: the data that the renderers for terminal and page draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from memagent_graph.documents.omissions import list_document_events
from memagent_graph.events import EventKind, count_events
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.plain_text import format_count, list_names
from memagent_graph.provenance.evidence import Evidence, LostLine, split_by_support
from memagent_graph.provenance.overlap import TokenizedText
from memagent_graph.provenance.places import find_section_label
from memagent_graph.provenance.word_diff import Change, DiffOp, compare_words
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate, Trace, Writes
from memagent_graph.words import find_words

MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a timeline: a chunk or a merge of branches, and its change of the memory."""

    update: MemoryUpdate
    name: str
    """The name for people, such as "chunk 3", "chunk 41, branch 3" or "merge of branches 0, 1, 2"."""
    state: str
    """A word for a step that did not change the memory: "kept" if the policy decided so, else "unchanged"."""
    sources: tuple[int, ...]
    """The indices in `Timeline.steps` of the steps whose joined memories are `previous`."""
    previous: str
    """The memory before the step."""
    diff: tuple[Change, ...]
    """The changes from `previous` to the new memory; empty if they are equal."""
    inserted_words: int
    deleted_words: int
    changed_fraction: float
    """The fraction of changed words, 0 to 1: inserted and deleted words, divided by the words of both memories."""
    section: str | None
    """The page or source at the beginning of the chunk."""
    is_notable: bool
    """Whether the step changed the memory, has events, merged branches, or read what the final memory quotes."""

    @property
    def changed(self) -> bool:
        """Whether the memory changed."""
        return bool(self.diff)

    def follows(self, other: Step) -> bool:
        """Return whether neither step is notable, and this one read a later chunk on the same branch, in one pass."""
        update, other_update = self.update, other.update
        is_later = (update.chunk_number or 0) > (other_update.chunk_number or 0)
        return is_later and update.branch == other_update.branch and not (self.is_notable or other.is_notable)


@dataclass(frozen=True)
class Timeline:
    """A run, with everything that is computed for its display. Tokens and seconds include answers and decisions."""

    view: RunView
    steps: tuple[Step, ...]
    """In topological order. The steps of a branch are adjacent."""
    step_index_by_update: dict[int, int]
    """By index of an update in the trace: the index of its step in `steps`."""
    line_pieces: tuple[list[tuple[str, bool]], ...]
    """The pieces of each line of the final memory, and whether the answer repeats them."""
    chunks: int
    """Number of read chunks. A chunk that was read twice counts twice."""
    changes: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: dict[EventKind, int]

    @property
    def excerpt(self) -> tuple[Evidence, ...] | None:
        """The quotes that support the answer, if an excerpt was shown instead of chunks; otherwise None."""
        return None if self.view.trace.newest_excerpt_call is None else self.view.provenance.evidence

    @property
    def read_fraction(self) -> float:
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
    def branches(self) -> list[str]:
        """The names of branches in the order of their steps. The trunk ("") is first, if it has steps."""
        return sorted(dict.fromkeys(step.update.branch for step in self.steps), key=bool)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The facts about the run, as pairs of a name and a text for people."""
        view = self.view
        branch_count = len([branch for branch in self.branches if branch])
        branch_note = f", on {branch_count:,} branch{'es' if branch_count > 1 else ''}" if branch_count else ""
        share_note = "" if self.read_fraction == 1 else f", {self.read_fraction:.0%} of the document"
        if view.trace.newest_excerpt_call is None:
            chunk_count = format_count(self.chunks, "chunk")
            read_text = f"{chunk_count}{share_note}, {self.changes:,} changed the memory{branch_note}"
        else:
            passages = format_count(len({span for call in view.trace.calls for span in call.reads}), "passage")
            read_text = f"{passages} of {view.trace.tokens_shown:,} tokens in total"
        start_text = "" if view.began is None else f", {datetime.fromtimestamp(view.began).astimezone():%Y-%m-%d %H:%M}"
        cost = f"{self.prompt_tokens:,} tokens in, {self.completion_tokens:,} out; {_format_duration(self.seconds)}"
        facts = {
            "run": view.run_id + start_text,
            "document": view.document["name"],
            "model": view.model,
            "strategy": "" if view.strategy == "overwrite" else view.strategy,
            "ended": view.stop_reason or "not yet: it runs, or was interrupted",
            "read" if view.trace.newest_excerpt_call is None else "shown": read_text,
            "cost": cost,
            "events": ", ".join(f"{kind.value} {count}" for kind, count in self.events.items()),
            "rewards": ", ".join(f"{reward.name} {reward.value:g} ({reward.source})" for reward in view.rewards),
        }
        return [(name, text) for name, text in facts.items() if text]

    def find_step(self, update: int) -> Step:
        """Return the step for the index of an update in the trace."""
        return self.steps[self.step_index_by_update[update]]

    def group_steps(self) -> list[list[Step]]:
        """Return groups of steps: a single notable step, or ascending chunks of a branch that are not notable."""
        groups: list[list[Step]] = []
        for step in self.steps:
            if groups and step.follows(groups[-1][-1]):
                groups[-1].append(step)
            else:
                groups.append([step])
        return groups

    def select_longest_lost_lines(self, count: int) -> list[LostLine]:
        """Return the `count` lost lines that were in memory for the most steps, in the order of their loss."""
        lost = self.view.provenance.lost
        by_duration = sorted(range(len(lost)), key=lambda index: lost[index].update - lost[index].gone)
        return [lost[index] for index in sorted(by_duration[:count])]

    def describe_lost_range(self, lost: LostLine) -> str:
        """Return the first and last step at which a lost line was in memory, in words."""
        first_name, last_name = self.find_step(lost.update).name, self.find_step(lost.gone).name
        if all(name.removeprefix("chunk ").isdecimal() for name in (first_name, last_name)):
            return f"chunks {first_name.removeprefix('chunk ')} to {last_name.removeprefix('chunk ')}"
        return f"{first_name} to {last_name}"

    def list_quotes(self, line_index: int) -> list[Evidence]:
        """Return the quotes of one line of the final memory, longest first."""
        return [evidence for evidence in self.view.provenance.evidence if evidence.line_index == line_index]


def label_group(steps: Sequence[Step]) -> str:
    """Return the label of ascending chunks of a branch that did not change the memory."""
    name, first, last = steps[0].name, steps[0].update.chunk_number, steps[-1].update.chunk_number
    if len(steps) > 1:
        name = f"chunks {first}-{last}{name.removeprefix(f'chunk {first}')}"
    return f"{name}: {' or '.join(sorted({step.state for step in steps}, reverse=True))}"


def _format_duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours and not minutes:
        return f"{seconds:.1f} s"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds_left:02} s"


def build_timeline(view: RunView) -> Timeline:
    """Build the timeline of a run for the renderers.

    For 700 chunks and memories of 1000 tokens, it takes about half a second, and about ten seconds if every
    chunk rewrites the whole memory.
    """
    trace = view.trace
    order = _sort_topologically(trace)
    step_index_by_update = {update_index: position for position, update_index in enumerate(order)}
    document_events = list_document_events(view.document)
    quoted_updates = {evidence.update for evidence in view.provenance.evidence}
    read_counts: Counter[tuple[str, int | None]] = Counter()
    steps = []
    for update_index in order:
        update, sources = trace.updates[update_index], trace.source_indices(trace.updates[update_index])
        previous = trace.memory_before(update.call_id)
        diff = () if update.memory == previous else tuple(compare_words(previous, update.memory))
        inserted_words, deleted_words, kept_words = (
            sum(len(find_words(change.text)) for change in diff if change.op is op)
            for op in (DiffOp.INSERT, DiffOp.DELETE, DiffOp.EQUAL)
        )
        # A change of white space or punctuation changes no word, but it is a change.
        changed_words = inserted_words + deleted_words
        changed_fraction = max(changed_words / max(1, changed_words + 2 * kept_words), 0.01) if diff else 0.0
        has_chunk = update.chunk_index is not None
        read_counts[update.branch, update.chunk_index] += 1
        steps.append(
            Step(
                update=update,
                name=_name_update(
                    update,
                    [trace.updates[source].branch for source in sources],
                    is_reread=read_counts[update.branch, update.chunk_index] > 1,
                ),
                state="kept" if trace.calls_by_id[update.call_id].writes is Writes.DECISION else "unchanged",
                sources=tuple(step_index_by_update[source] for source in sources),
                previous=previous,
                diff=diff,
                inserted_words=inserted_words,
                deleted_words=deleted_words,
                changed_fraction=changed_fraction,
                section=find_section_label(view.places.sections, update.start_char) if has_chunk else None,
                is_notable=bool(diff or update.events) or not has_chunk or update_index in quoted_updates,
            )
        )
    answer_words = TokenizedText(view.answer or "")
    return Timeline(
        view=view,
        steps=tuple(steps),
        step_index_by_update=step_index_by_update,
        line_pieces=tuple(split_by_support(answer_words, line.line) for line in view.provenance.lines),
        chunks=sum(step.update.chunk_index is not None for step in steps),
        changes=sum(step.changed for step in steps),
        prompt_tokens=sum(call.usage.prompt_tokens for call in trace.calls),
        completion_tokens=sum(call.usage.completion_tokens for call in trace.calls),
        seconds=sum(call.seconds for call in trace.calls),
        events=count_events([*document_events, *(event for call in trace.calls for event in call.events)]),
    )


def _sort_topologically(trace: Trace) -> list[int]:
    """Return the indices of a trace's updates in topological order. Parallel branches are not interleaved."""
    sources = [trace.source_indices(update) for update in trace.updates]
    end_indices = set(range(len(sources))).difference(*sources)
    order: dict[int, None] = {}
    stack = sorted(end_indices, reverse=True)
    while stack:
        missing = [source for source in sources[stack[-1]] if source not in order]
        if missing:
            stack += reversed(missing)
        else:
            order[stack.pop()] = None
    return list(order)


def _name_update(update: MemoryUpdate, branches: Sequence[str], *, is_reread: bool) -> str:
    """Return the name of an update. `branches` are the branches of its source updates."""
    names = list(dict.fromkeys(branch or "trunk" for branch in branches))
    suffix = f", branch {update.branch}" if update.branch else ""
    if update.chunk_index is None:
        merge = f"merge of branches {list_names(names, MAX_NAMES)}"
        return f"{merge if len(names) > 1 else 'memory rewritten'}{suffix}"
    return f"chunk {update.chunk_number}{suffix}{' (read again)' if is_reread else ''}"
