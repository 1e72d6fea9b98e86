"""A result for a notebook: a static fragment of HTML without script, with inline styles."""

from __future__ import annotations

from html import escape

from memagent_graph.plain_text import counted, plain
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.timeline.model import Timeline

_COLUMNS = 240
_STRIP_WIDTH, _STRIP_HEIGHT = 480, 28
_LANE_HEIGHT, _MOST_LANES = 14, 16
_MOST_LINES = 40
_LONGEST_QUOTE = 240
# Half-transparent text and borders of the current color are readable on light and dark pages alike.
_MUTED = "opacity:.65;font-size:.875em"
_RULE = "border-top:1px solid rgba(128,128,128,.3)"


def render_notebook(timeline: Timeline) -> str:
    """Return a fragment for `_repr_html_`: question, answer, memory with sources, where it changed, and the cost."""
    view, totals = timeline.view, timeline.totals
    answer = "no answer" if view.answer is None else view.answer
    read = f"{counted(totals.chunks, 'chunk')}, {totals.changes:,} changed memory"
    if timeline.excerpt is not None:
        read = f"{view.trace.tokens_shown:,} tokens shown"
    strategy = "" if view.strategy == "overwrite" else f" · {_text(view.strategy)}"
    cost = (
        f"{_text(view.document['name'])} · {_text(view.model)}{strategy} · {read} · "
        f"{totals.prompt_tokens:,} tokens in, {totals.completion_tokens:,} out · {totals.seconds:.1f} s · "
        f"run {_text(view.run_id)}"
    )
    return (
        '<div style="max-width:60em;line-height:1.5;font-variant-numeric:tabular-nums">'
        f'<div style="{_MUTED}">{_text(view.question)}</div>'
        '<div style="font-size:1.15em;font-weight:600;margin:.25em 0 .75em;white-space:pre-wrap">'
        f"{_text(answer)}</div>{_strip(timeline)}{_memory(timeline)}"
        f'<div style="{_MUTED};margin-top:.75em">{cost}</div></div>'
    )


def _strip(timeline: Timeline) -> str:
    """Where memory changed: a bar, or several bars for branches."""
    lanes = list(timeline.lanes)
    shown = lanes[:_MOST_LANES]
    more = len(lanes) - len(shown)
    rest = f'<div style="{_MUTED}">and {more} more branches</div>' if more else ""
    height = _STRIP_HEIGHT if len(lanes) == 1 else _LANE_HEIGHT
    return "".join(_lane(timeline, branch, height, named=len(lanes) > 1) for branch in shown) + rest


def _lane(timeline: Timeline, branch: str, height: int, *, named: bool) -> str:
    values = timeline.density(_COLUMNS, branch)
    bar = _STRIP_WIDTH / len(values)
    bars = "".join(
        f'<rect x="{index * bar:.2f}" y="{height - tall:.1f}" width="{max(1.0, bar - 0.4):.2f}" height="{tall:.1f}"/>'
        for index, value in enumerate(values)
        if value and (tall := max(3.0, value**0.5 * height))
    )
    on = f" on {'branch ' + _text(branch) if branch else 'the trunk'}" if named else ""
    chunks = len(timeline.lanes[branch]) if named else timeline.totals.chunks
    label = f"where memory changed{on}, over {chunks} {'steps' if named else 'chunks'}"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_STRIP_WIDTH} {height}" '
        f'preserveAspectRatio="none" style="display:block;width:100%;height:{height}px{";margin-top:2px" * named}">'
        f'<rect width="{_STRIP_WIDTH}" height="{height}" fill="rgba(128,128,128,.14)"/>'
        f'<g fill="#4b87c2">{bars}</g></svg>'
    )


def _memory(timeline: Timeline) -> str:
    if timeline.excerpt is not None:
        return "".join(
            f'<div style="{_RULE};padding:.3em 0;{_MUTED}">{_quoted(quote)}</div>' for quote in timeline.excerpt
        )
    lines = timeline.provenance.lines
    if not lines:
        return ""
    rows = "".join(_row(timeline, index) for index in range(min(len(lines), _MOST_LINES)))
    more = len(lines) - _MOST_LINES
    rest = f'<div style="{_MUTED}">and {more} more lines</div>' if more > 0 else ""
    return (
        f'<details open style="margin-top:.75em"><summary style="{_MUTED};cursor:pointer">Final memory</summary>'
        f"{rows}{rest}</details>"
    )


def _row(timeline: Timeline, index: int) -> str:
    line = timeline.provenance.lines[index]
    pieces = timeline.supported(index)
    text = "".join(f"<b>{_text(piece)}</b>" if repeated else _text(piece) for piece, repeated in pieces)
    origin = f"{'edited by a person at' if line.edited else 'from'} {_text(timeline.step(line.update).name)}"
    quotes = timeline.quotes(index)
    if quotes:
        origin += f" · {_quoted(quotes[0], timeline.step(quotes[0].update).name)}"
    return f'<div style="{_RULE};padding:.3em 0">{text}<div style="{_MUTED}">{origin}</div></div>'


def _quoted(quote: Evidence, where: str = "") -> str:
    """Return a quote with its place, or `where` if that is not known."""
    words = " ".join(quote.quote.split())
    shown = words if len(words) <= _LONGEST_QUOTE else words[: _LONGEST_QUOTE - 1] + "…"
    place = quote.place or where or f"characters {quote.start_char:,}-{quote.end_char:,}"
    return f"“{_text(shown)}” ({_text(place)})"


def _text(text: str) -> str:
    return escape(plain(text))
