"""Runs and their documents as resources, which users can attach to a conversation.

memagent://runs/ID                  question, answer, changes of the memory and their sources
memagent://runs/ID/document         the text of the document, if it has at most 1 MiB
memagent://runs/ID/chunks/NUMBER    one chunk of it, as the policy saw it; each quote names its chunk
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from mcp.server.fastmcp import FastMCP
from mcp.types import Resource
from pydantic import AnyUrl

from memagent_graph.errors import RunError
from memagent_graph.plain_text import plain
from memagent_mcp.tool_results import shortened
from memagent_mcp.tools import Tools

_LISTED: Final = 20
_MOST_BYTES: Final = 2**20
_TEXT: Final = "text/plain"


def add_resources(server: FastMCP[Any], tools: Tools) -> None:
    """Add the resources to a server."""

    @server.resource(
        "memagent://runs/{run_id}", title="A run: answer, evidence, changes of the memory", mime_type=_TEXT
    )
    async def run(run_id: str) -> str:
        """One run, as show_run shows it."""
        return (await asyncio.to_thread(tools.shown, run_id))[1]

    @server.resource("memagent://runs/{run_id}/document", title="The document that a run read", mime_type=_TEXT)
    async def document(run_id: str) -> str:
        """The text of the document, if it has at most 1 MiB."""
        return await asyncio.to_thread(_document, tools, run_id)

    @server.resource("memagent://runs/{run_id}/chunks/{number}", title="A chunk of a run's document", mime_type=_TEXT)
    async def chunk(run_id: str, number: str) -> str:
        """The text of one chunk; chunks are counted from 0."""
        return await asyncio.to_thread(_chunk, tools, run_id, number)


async def newest_runs(tools: Tools) -> list[Resource]:
    """Return the newest runs, for a client's list of resources."""
    listing = await asyncio.to_thread(tools.listing, _LISTED, "")
    return [
        Resource(
            uri=AnyUrl(f"memagent://runs/{run.run_id}"),
            name=run.run_id,
            title=shortened(f"{run.document}: {run.question}"),
            description=shortened(run.answer or f"({run.stop_reason or 'not ended'})"),
            mimeType=_TEXT,
        )
        for run in listing.runs
    ]


def _document(tools: Tools, run_id: str) -> str:
    reference, store = tools.record(run_id).document, tools.store
    size = store.size(reference)
    if size is None or size > _MOST_BYTES:
        length = "a stream that has not ended" if size is None else f"{size:,} bytes"
        raise RunError(
            f"the document is {length}, which is too long to show as a whole",
            hint=f"Request its chunks, memagent://runs/{run_id}/chunks/0 and so on, or use ask_again.",
        )
    return plain(store.read_bytes(reference, 0, size).decode(errors="replace"))


def _chunk(tools: Tools, run_id: str, number: str) -> str:
    view = tools.view(run_id)
    texts = (view.chunk_text(each) for each in view.updates if str(each.chunk_index) == number)
    text = next((each for each in texts if each is not None), None)
    if text is None:
        raise RunError(
            f"run {run_id} has no chunk {shortened(number)}, or its text is no longer stored",
            hint="Chunks are counted from 0.",
        )
    return plain(text)
