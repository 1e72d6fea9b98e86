"""MemAgent as an MCP server: `make_server` builds one for a reader, `memagent mcp` runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memagent_graph.errors import MissingExtraError

if TYPE_CHECKING:
    from memagent_mcp.server import make_server as make_server

__all__ = ["make_server"]


def __getattr__(name: str) -> Any:  # so that the command's help does not need the extra
    if name != "make_server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from memagent_mcp.server import make_server  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtraError("mcp", "the MCP server") from error
    return make_server
