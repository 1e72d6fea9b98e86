"""MemAgent as an MCP server: `make_server` builds one for a reader, `memagent mcp` runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memagent_graph.errors import load_extra

if TYPE_CHECKING:
    from memagent_mcp.server import make_server as make_server

__all__ = ["make_server"]


def __getattr__(name: str) -> Any:
    if name != "make_server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_extra("mcp", "mcp", "the MCP server")
    from memagent_mcp.server import make_server  # noqa: PLC0415

    return make_server
