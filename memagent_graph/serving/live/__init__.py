"""The live page: documents, questions, and the memory while it is built; people can change it.

page_routes   the page's routes
live_reads    a person's actions on a read: ask, pause, edit, pin, judge
live_events   the states of a key's reads, and one of them chunk by chunk, as a stream of events
page_values   the data for the page, as JSON values
index.html, live.css, live.js   the page itself; there is no build step
"""

from __future__ import annotations

from memagent_graph.serving.live.page_routes import LivePage

__all__ = ["LivePage"]
