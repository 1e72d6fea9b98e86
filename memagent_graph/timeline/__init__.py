"""Views of one run: how its memory was built, chunk by chunk, and what supports its answer."""

from __future__ import annotations

from memagent_graph.timeline.compare import RunComparison, compare_runs, render_comparison
from memagent_graph.timeline.model import Timeline, build_timeline
from memagent_graph.timeline.page import render_notebook, render_page, write_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import RunView

__all__ = [
    "RunComparison",
    "RunView",
    "Timeline",
    "build_timeline",
    "compare_runs",
    "render_comparison",
    "render_notebook",
    "render_page",
    "render_timeline",
    "write_page",
]
