"""MemAgent as an MCP server: `make_server` builds one for a reader, `memagent mcp` runs it."""

from __future__ import annotations

from memagent_graph.errors import MissingExtraError

try:
    import mcp  # noqa: F401  the modules below need it
except ImportError as error:
    raise MissingExtraError("mcp", "the MCP server") from error

from memagent_mcp.server import make_server

__all__ = ["make_server"]
