"""The live page: people upload documents, ask questions, watch the memory grow, and can edit it.

page_routes   the page's routes
live_reads    the actions of a person on a read: ask, pause, edit, judge
live_events   a stream of events: the states of a key's reads, and the updates of one read
index.html, live.css, live.js   the page itself; there is no build step
"""

from __future__ import annotations

from memagent_serve.live.page_routes import LivePage

__all__ = ["LivePage"]
