"""A run's timeline, computed once and drawn by several hands: terminal, page, notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from memagent_graph.events import EventKind, ReadEvent, count_events
from memagent_graph.provenance.evidence import Evidence, Provenance, Support, section_at, support, trace
from memagent_graph.provenance.word_diff import Change, DiffOp, count_words, word_diff
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk read, and what it did to the memory."""

    update: MemoryUpdate
    previous: str
    """The memory before the chunk."""
    diff: tuple[Change, ...]
    """From `previous` to the update's memory; empty where they are the same."""
    inserted_words: int
    deleted_words: int
    density: float
    """The share of words changed: those inserted and deleted, of those in both memories together. 0 to 1."""
    section: str | None
    """The page or source that the chunk begins in."""

    @property
    def changed(self) -> bool:
        """Whether the memory is another than before."""
        return bool(self.diff)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a run amounts to. Tokens are those of the updates that count and of the answer, seconds likewise."""

    chunks: int
    changes: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: dict[EventKind, int]

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run with all that can be said of it without a model."""

    view: RunView
    steps: tuple[Step, ...]
    provenance: Provenance
    support: tuple[Support, ...]
    """The stretches of the final memory's lines whose words the answer repeats."""
    totals: Totals

    @property
    def memory(self) -> str:
        """The final memory."""
        return self.steps[-1].update.memory if self.steps else ""

    def density(self, columns: int) -> list[float]:
        """The greatest density in each of `columns` equal stretches of the run; fewer where there are fewer chunks."""
        count = min(columns, len(self.steps))
        bounds = [index * len(self.steps) // count for index in range(count + 1)] if count else []
        return [max(step.density for step in self.steps[a:b]) for a, b in pairwise(bounds)]

    def stretches(self) -> Iterator[tuple[bool, list[Step]]]:
        """The steps in groups: one to show by itself (it changed memory or something happened), or a dull stretch."""
        for notable, steps in groupby(self.steps, key=is_notable):
            if notable:
                yield from ((True, [step]) for step in steps)
            else:
                yield False, list(steps)

    def quotes(self, line_index: int) -> list[Evidence]:
        """The quotes of one line of the final memory, longest first."""
        return [each for each in self.provenance.evidence if each.line_index == line_index]

    def supported(self, line_index: int) -> list[tuple[str, bool]]:
        """A line of the final memory in pieces, and which of them the answer repeats."""
        line = self.provenance.lines[line_index].line
        pieces: list[tuple[str, bool]] = []
        end = 0
        for each in self.support:
            if each.line_index == line_index:
                pieces += [(line[end : each.start], False), (line[each.start : each.end], True)]
                end = each.end
        pieces.append((line[end:], False))
        return [piece for piece in pieces if piece[0]]

    def quote_context(self, quote: Evidence, characters: int) -> tuple[str, str]:
        """What stands around a quote in its chunk, `characters` on either side; empty where the text is gone."""
        for step in self.steps:
            if step.update.chunk_index == quote.chunk_index:
                text = self.view.chunk_text(step.update) or ""
                start, end = quote.start_char - step.update.start_char, quote.end_char - step.update.start_char
                return text[max(0, start - characters) : start], text[end : end + characters]
        return "", ""


def is_notable(step: Step) -> bool:
    """Whether a step changed memory, or something happened at it."""
    return step.changed or bool(step.update.events)


def build_timeline(view: RunView) -> Timeline:
    """Everything that the renderers draw.

    For 700 chunks and memories of 1000 tokens it takes about half a second, and a few seconds where every chunk
    rewrites the whole memory.
    """
    steps = []
    previous = ""
    for update in view.updates:
        steps.append(_step(previous, update, section_at(view.sections, update.start_char)))
        previous = update.memory
    provenance = trace(view.updates, view.chunk_text, view.sections)
    events: Sequence[ReadEvent] = [event for update in view.updates for event in update.events]
    return Timeline(
        view=view,
        steps=tuple(steps),
        provenance=provenance,
        support=support(view.answer or "", [line.line for line in provenance.lines]),
        totals=Totals(
            chunks=len(steps),
            changes=sum(step.changed for step in steps),
            prompt_tokens=sum(update.prompt_tokens for update in view.updates) + view.answer_prompt_tokens,
            completion_tokens=sum(update.completion_tokens for update in view.updates) + view.answer_completion_tokens,
            seconds=sum(update.seconds for update in view.updates) + view.answer_seconds,
            events=count_events([*events, *view.answer_events]),
        ),
    )


def _step(previous: str, update: MemoryUpdate, section: str | None) -> Step:
    if update.memory == previous:
        return Step(update, previous, (), 0, 0, 0.0, section)
    diff = tuple(word_diff(previous, update.memory))
    inserted, deleted, kept = (
        sum(count_words(change.text) for change in diff if change.op is op)
        for op in (DiffOp.INSERT, DiffOp.DELETE, DiffOp.EQUAL)
    )
    # A change of white space or punctuation alone counts no word, and is a change.
    density = max((inserted + deleted) / max(1, inserted + deleted + 2 * kept), 0.01)
    return Step(update, previous, diff, inserted, deleted, density, section)
