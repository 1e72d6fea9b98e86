"""Two runs compared: their inputs, where their memories begin to differ, and how they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memagent_graph.plain_text import plain
from memagent_graph.provenance.word_diff import Change, word_diff
from memagent_graph.timeline.model import Step, Timeline, build_timeline, same_places
from memagent_graph.timeline.terminal import DiffText
from memagent_graph.timeline.view import RunView


@dataclass(frozen=True)
class RunComparison:
    """What differs between two runs."""

    a: Timeline
    b: Timeline
    same_document: bool
    """Whether the text is the same, independent of its name."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """The settings that differ, by name; None where a run does not have one."""
    parting: Step | None = None
    """The first step of `a` after which the memories differ, of those with the same place in `b`."""
    in_common: int = 0
    """How many steps of the two runs have the same place: the same chunk on the same branch, or the same merge."""
    same_chunks: bool = True
    """Whether the chunks that both runs read have the same boundaries."""
    memory_diff: tuple[Change, ...] = ()
    """From the final memory of `a` to that of `b`."""


def compare_runs(
    a: RunView,
    b: RunView,
    *,
    settings_a: Mapping[str, Any] | None = None,
    settings_b: Mapping[str, Any] | None = None,
) -> RunComparison:
    """Compare two runs, with the same or with different questions and documents."""
    left, right = build_timeline(a), build_timeline(b)
    pairs = same_places(left, right)
    bounds = [[(step.update.start_char, step.update.end_char) for step in side] for side in zip(*pairs, strict=True)]
    given_a, given_b = dict(settings_a or {}), dict(settings_b or {})
    return RunComparison(
        a=left,
        b=right,
        same_document=a.document["key"] == b.document["key"],
        settings={
            name: (given_a.get(name), given_b.get(name))
            for name in given_a | given_b
            if given_a.get(name) != given_b.get(name)
        },
        parting=next((one for one, other in pairs if one.update.memory != other.update.memory), None),
        in_common=len(pairs),
        same_chunks=not bounds or bounds[0] == bounds[1],
        memory_diff=tuple(word_diff(left.memory, right.memory)),
    )


def render_comparison(comparison: RunComparison) -> RenderableType:
    """Return the comparison for `rich.console.Console.print`; text that only the second run has is green."""
    parts: list[RenderableType] = [_table(comparison), Text(), Text(plain(parting_told(comparison)))]
    if comparison.a.memory == comparison.b.memory:
        parts.append(Text("The final memories are the same.", style="green"))
    else:
        parts += [Text("Final memories, from A to B", style="bold underline"), DiffText(comparison.memory_diff)]
    return Group(*parts)


def _table(comparison: RunComparison) -> Table:
    a, b = comparison.a, comparison.b
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    table.add_column(Text(f"A  {plain(a.view.run_id)}"), overflow="fold", ratio=1)
    table.add_column(Text(f"B  {plain(b.view.run_id)}"), overflow="fold", ratio=1)
    for name, left, right, same in compare_facts(comparison):
        if name == "answer":
            table.add_row(name, _answer(left), _answer(right))
        else:
            told = Text("same", style="dim") if same else Text(plain(right or ""))
            table.add_row(plain(name), Text(plain(left or "")), told)
    return table


def compare_facts(comparison: RunComparison) -> list[tuple[str, str | None, str | None, bool]]:
    """Return the rows about two runs: a name, the one's value, the other's, and whether the row can be left out.

    An answer is None where there is none.
    """
    a, b = comparison.a, comparison.b
    facts: list[tuple[str, str | None, str | None, bool]] = []

    def row(name: str, left: str, right: str, *, same: bool | None = None) -> None:
        facts.append((name, left, right, left == right if same is None else same))

    row("question", a.view.question, b.view.question)
    row("document", a.view.document["name"], b.view.document["name"], same=comparison.same_document)
    row("model", a.view.model, b.view.model)
    if a.view.strategy != b.view.strategy:
        row("strategy", a.view.strategy, b.view.strategy)
    for name, (left, right) in comparison.settings.items():
        row(name, _value(left), _value(right), same=False)
    facts.append(("answer", a.view.answer, b.view.answer, False))
    row("ended", a.view.stop_reason or "not yet", b.view.stop_reason or "not yet", same=False)
    for name, left, right in (
        ("chunks", a.totals.chunks, b.totals.chunks),
        ("changes", a.totals.changes, b.totals.changes),
        ("tokens in", a.totals.prompt_tokens, b.totals.prompt_tokens),
        ("tokens out", a.totals.completion_tokens, b.totals.completion_tokens),
    ):
        row(name, f"{left:,}", f"{right:,}", same=False)
    row("seconds", f"{a.totals.seconds:,.1f}", f"{b.totals.seconds:,.1f}", same=False)
    for kind in dict.fromkeys((*a.totals.events, *b.totals.events)):
        row(kind.value, str(a.totals.events.get(kind, 0)), str(b.totals.events.get(kind, 0)), same=False)
    rewards_a = {reward.name: reward.value for reward in a.view.rewards}
    rewards_b = {reward.name: reward.value for reward in b.view.rewards}
    for name in dict.fromkeys((*rewards_a, *rewards_b)):
        row(f"reward {name}", _value(rewards_a.get(name)), _value(rewards_b.get(name)), same=False)
    return facts


def _answer(answer: str | None) -> Text:
    return Text("none", style="yellow") if answer is None else Text(plain(answer), style="bold")


def _value(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def parting_told(comparison: RunComparison) -> str:
    """Where the memories of two runs part, in a sentence."""
    if not comparison.in_common and comparison.a.steps and comparison.b.steps:
        return "The runs have no step in common: they read on different branches."
    if comparison.parting is None:
        return "The memories are the same as far as both runs read."
    bounds = "" if comparison.same_chunks else " (the chunks have other boundaries)"
    return f"The memories first differ at {comparison.parting.name}{bounds}."
