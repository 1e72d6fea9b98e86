"""Renders the timeline for a terminal, with texts of documents and models free of markup and control characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from memagent_graph.errors import RunError
from memagent_graph.events import ReadEvent
from memagent_graph.plain_text import list_names, make_printable
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.provenance.word_diff import Change, DiffOp
from memagent_graph.timeline.model import MAX_NAMES, Step, Timeline, label_group
from memagent_graph.timeline.view import MAX_CUT_CHARACTERS

_STYLES = {DiffOp.EQUAL: "", DiffOp.INSERT: "green", DiffOp.DELETE: "red strike"}
_BRACKETS = {DiffOp.EQUAL: ("", ""), DiffOp.INSERT: ("{+", "+}"), DiffOp.DELETE: ("[-", "-]")}
_CONTEXT_CHARS = 160
_MAX_SUPPORTING_LINES = 4
_MAX_LOST_LINES = 12


def render_timeline(timeline: Timeline, *, chunk: int | None = None) -> RenderableType:
    """Return a timeline that `rich.console.Console.print` can print.

    Args:
        timeline: the timeline.
        chunk: the number of a chunk (from 1) to show alone: its memory before and after, the difference, and its text.
            All of its reads are shown.

    Raises:
        RunError: the run has not read that chunk.
    """
    if chunk is not None:
        return _render_chunk(timeline, chunk)
    return Group(
        _render_header(timeline),
        Text(),
        _render_answer(timeline),
        *_render_section("Where memory changed", _render_steps(timeline)),
        *_render_section("What supports the answer", _render_excerpt(timeline)),
        *_render_section("Final memory, and where it comes from", _render_memory_lines(timeline)),
        *_render_section("Lost on the way", _render_lost_lines(timeline)),
    )


@dataclass(frozen=True, slots=True)
class DiffText:
    """A difference, in color if the console has color, otherwise with brackets, as in `[-old-]{+new+}`.

    With `context_chars`, unchanged text is cut to about this many characters next to each change.
    """

    diff: Sequence[Change]
    context_chars: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        colored = console.color_system is not None and not console.no_color
        line = Text()
        for index, change in enumerate(self.diff):
            text = make_printable(change.text)
            if change.op is DiffOp.EQUAL and self.context_chars is not None:
                has_change_after = index < len(self.diff) - 1
                text = _shorten(
                    text, self.context_chars, has_change_before=index > 0, has_change_after=has_change_after
                )
            opening, closing = ("", "") if colored else _BRACKETS[change.op]
            line.append(f"{opening}{text}{closing}", _STYLES[change.op])
        yield line


def _render_header(timeline: Timeline) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in timeline.facts:
        table.add_row(name, Text(make_printable(value)))
    return table


def _render_answer(timeline: Timeline) -> RenderableType:
    view = timeline.view
    parts: list[RenderableType] = [Text(make_printable(view.question), style="bold")]
    if view.answer is not None:
        parts.append(Text(make_printable(view.answer), style="bold green"))
    else:
        parts.append(Text("no answer", style="yellow"))
    parts += _render_events(view.answer_events)
    lines = [pieces for pieces in timeline.line_pieces if any(is_repeated for _, is_repeated in pieces)]
    if lines:
        lines.sort(key=lambda pieces: -sum(len(piece) for piece, is_repeated in pieces if is_repeated))
        parts.append(Text("In memory:", style="dim"))
        parts += [Padding(_render_pieces(line), (0, 0, 0, 2)) for line in lines[:_MAX_SUPPORTING_LINES]]
    return Panel(Group(*parts), box=box.ROUNDED, border_style="dim")


def _render_pieces(pieces: Sequence[tuple[str, bool]]) -> Text:
    styles = {True: "bold green", False: ""}
    return Text.assemble(*((make_printable(piece), styles[is_repeated]) for piece, is_repeated in pieces))


def _render_steps(timeline: Timeline) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for step, *later_steps in timeline.group_steps():
        if not step.is_notable:
            parts.append(Text(make_printable(label_group([step, *later_steps])), style="dim"))
            continue
        parts.append(_render_step_title(step))
        if step.changed:
            parts.append(Padding(DiffText(step.diff, _CONTEXT_CHARS), (0, 0, 0, 2)))
        parts += [Padding(event, (0, 0, 0, 2)) for event in _render_events(step.update.events)]
    return parts


def _render_step_title(step: Step) -> Text:
    update = step.update
    change = [(f"  {step.state}", "dim")]
    if step.changed:
        change = [(f"  +{step.inserted_words}", "green"), (f" -{step.deleted_words}", "red"), (" words", "dim")]
    section = "" if step.section is None else f", {make_printable(step.section)}"
    cost = f"  {update.prompt_tokens:,} in, {update.completion_tokens:,} out, {update.seconds:.1f} s{section}"
    return Text.assemble((make_printable(step.name), "bold"), *change, (cost, "dim"))


def _render_events(events: Iterable[ReadEvent]) -> list[Text]:
    lines = []
    for event in events:
        rule = "" if event.rule is None else f", {event.rule.value}"
        detail = f": {make_printable(event.detail)}" if event.detail else ""
        lines.append(Text(f"! {event.kind.value}{rule}{detail}", style="yellow"))
    return lines


def _render_excerpt(timeline: Timeline) -> list[RenderableType]:
    """Return the quotes of the answer, if an excerpt was shown instead of chunks."""
    if timeline.excerpt is None:
        return []
    quotes = [_render_quote(timeline, evidence) for evidence in timeline.excerpt]
    return [Padding(quote, (0, 0, 0, 2)) for quote in quotes] or [Text(timeline.no_quote_reason, style="dim")]


def _render_memory_lines(timeline: Timeline) -> list[RenderableType]:
    if timeline.excerpt is not None and not timeline.view.trace.final_memory:
        return []
    parts: list[RenderableType] = []
    for index, line in enumerate(timeline.view.provenance.lines):
        parts.append(_render_pieces(timeline.line_pieces[index]))
        first_step = timeline.find_step(line.update).name
        origin = f"edited by a person at {first_step}" if line.edited else first_step
        if line.reworded:
            names = [timeline.find_step(update).name.removeprefix("chunk ") for update in line.reworded]
            short_names = [name.replace(", branch", " on branch", 1) for name in names]
            origin += f", reworded at {list_names(short_names, MAX_NAMES)}"
        quotes = timeline.list_quotes(index)
        origin += f"; {line.coverage:.0%} of its words quoted" if quotes else "; no verbatim quote"
        parts.append(Padding(Text(make_printable(origin), style="dim"), (0, 0, 0, 2)))
        parts += [Padding(_render_quote(timeline, quote), (0, 0, 0, 4)) for quote in quotes]
    return parts or [Text("(empty)", style="dim")]


def _render_quote(timeline: Timeline, quote: Evidence) -> Text:
    name = "" if quote.update < 0 else f"{make_printable(timeline.find_step(quote.update).name)}, "
    text = Text(f"“{' '.join(make_printable(quote.quote).split())}”", style="cyan")
    text.append(f"  {name}characters {quote.start_char:,}-{quote.end_char:,}", "dim")
    if quote.place is not None:
        text.append(", ", "dim")
        text.append(make_printable(quote.place), Style(dim=True, link=quote.link))
    return text


def _render_lost_lines(timeline: Timeline) -> list[RenderableType]:
    lost = timeline.view.provenance.lost
    lines = timeline.select_longest_lost_lines(_MAX_LOST_LINES)
    parts: list[RenderableType] = []
    for line in lines:
        text = Text(f"“{make_printable(line.line)}”", style="strike dim")
        text.append(f"  {make_printable(timeline.describe_lost_range(line))}", "not strike dim")
        parts.append(text)
    if len(lost) > len(lines):
        parts.append(Text(f"and {len(lost) - len(lines):,} that were there for fewer chunks", style="dim"))
    return parts


def _render_chunk(timeline: Timeline, chunk: int) -> RenderableType:
    steps = [step for step in timeline.steps if step.update.chunk_number == chunk]
    if not steps:
        numbers = [step.update.chunk_number for step in timeline.steps if step.update.chunk_number is not None]
        chunks_read = f"chunks {min(numbers)} to {max(numbers)}" if numbers else "none yet"
        raise RunError(
            f"the run has not read chunk {chunk}; it has read {chunks_read}",
            hint="Choose a chunk that was read; chunks are counted from 1.",
            run_id=timeline.view.run_id,
        )
    parts = [part for step in steps for part in (*_render_chunk_step(timeline, step), Text())]
    text = timeline.view.chunk_text(steps[0].update)
    chunk_text = Text("its text is no longer stored" if text is None else make_printable(text))
    return Group(*parts[:-1], *_render_section("Chunk", [chunk_text]))


def _render_chunk_step(timeline: Timeline, step: Step) -> list[RenderableType]:
    """Return the full difference of a step."""
    update = step.update
    location = f"{timeline.view.document['name']}, characters {update.start_char:,}-{update.end_char:,}"
    difference = [DiffText(step.diff)] if step.changed else [Text(step.state, style="dim")]
    return [
        Text(make_printable(f"run {timeline.view.run_id}, {location}"), style="dim"),
        _render_step_title(step),
        *_render_events(update.events),
        *_render_section("Memory before", [Text(make_printable(step.previous) or "(empty)")]),
        *_render_section("Difference", difference),
        *_render_section("Memory after", [Text(make_printable(update.memory) or "(empty)")]),
    ]


def _render_section(title: str, parts: Sequence[RenderableType]) -> list[RenderableType]:
    return [Text(), Text(title, style="bold underline"), *parts] if parts else []


def _shorten(text: str, context_chars: int, *, has_change_before: bool, has_change_after: bool) -> str:
    """Return unchanged text, cut to the parts next to changes."""
    if len(text) <= context_chars * (has_change_before + has_change_after) + context_chars:
        return text
    head, tail = text[: context_chars * has_change_before], text[len(text) - context_chars * has_change_after :]
    if "\n" in head:
        head = head[: head.rindex("\n") + 1]
    elif head:
        head = head[: head.rfind(" ", -MAX_CUT_CHARACTERS) + 1] or head
    if "\n" in tail:
        tail = tail[tail.index("\n") :]
    elif tail:
        tail = tail[max(0, tail.find(" ", 0, MAX_CUT_CHARACTERS)) :]
    return f"{head}…{tail}"
