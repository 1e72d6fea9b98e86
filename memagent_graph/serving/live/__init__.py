"""The live page: documents in, questions, and memory as it comes to be, with a person's hand in it.

page_routes   which path of the page leads where
live_reads    what a person does with a read: ask, pause, edit, pin, judge
live_events   how all reads of a key are, and one of them chunk by chunk, as a stream of events
page_values   what the page is sent, as JSON values
index.html, live.css, live.js   the page itself, as it is served; nothing is built
"""

from __future__ import annotations

from memagent_graph.serving.live.page_routes import LivePage

__all__ = ["LivePage"]
