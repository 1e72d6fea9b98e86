"""What a client hears while its documents are read."""

from __future__ import annotations

from memagent_graph.results import MemoryUpdate
from memagent_graph.timeline.terminal import plain
from memagent_mcp.client_roots import ToolContext


class Progress:
    """How far the reads that answer one request have come, told after each chunk.

    One share from 0 to 1 for all of them, of a total of 1; for a stream whose end is not known, the bytes read, of no
    known total. It never falls.

    Args:
        context: of the request; a client that asked for no progress is told none.
        name: the document's.
        reads: how many read it side by side.
    """

    def __init__(self, context: ToolContext, name: str, reads: int) -> None:
        self._context = context
        self._name = plain(name)
        self._newest: list[MemoryUpdate | None] = [None] * reads

    async def advance(self, read: int, update: MemoryUpdate) -> None:
        """A read has come one chunk further."""
        self._newest[read] = update
        begun = [each for each in self._newest if each is not None]
        chunk = f"{self._name}: chunk {update.chunk_index}"
        if len(self._newest) > 1:
            chunk += f" for question {read + 1} of {len(self._newest)}"
        if any(each.progress is None for each in begun):
            read_bytes = sum(each.end_byte for each in begun)
            await self._context.report_progress(read_bytes, None, f"{chunk}, {read_bytes:,} bytes read")
            return
        share = sum(each.progress or 0.0 for each in begun) / len(self._newest)
        await self._context.report_progress(share, 1.0, f"{chunk}, {share:.0%} read")
