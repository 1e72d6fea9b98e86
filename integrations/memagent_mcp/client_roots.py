"""Decides which files a request may read: those below the roots of both the server and its client.

    server's roots   client's roots   files that may be read
    given            not declared     those below the server's roots
    given            declared         those below both
    none             declared         those below the client's roots, if the client is trusted
    none             not declared     none; only text in the request

If a client declares roots but lists none, or only ones that are not on this machine, it may read no file. A client that
starts the server as a child process can read the same files anyway, so its roots are trusted. A client over HTTP may be
anyone, so its roots can only narrow the server's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mcp.server.fastmcp import Context
from mcp.server.session import ServerSession
from mcp.shared.exceptions import McpError
from mcp.shared.message import ServerMessageMetadata
from mcp.types import ClientCapabilities, ListRootsRequest, ListRootsResult, RootsCapability, ServerRequest
from pydantic import ValidationError

from memagent_graph.documents.allowed_paths import AllowedRoots
from memagent_graph.errors import RefusedSourceError

ToolContext: TypeAlias = Context[ServerSession, Any, Any]

_ROOTS_TIMEOUT = timedelta(seconds=10)
"""The time that a client may take to list its roots."""


@dataclass(frozen=True)
class RequestRoots:
    """The server's roots, and those of each request's client."""

    server_roots: AllowedRoots
    trust_client: bool
    """Whether a client's roots count if the server has none."""

    async def find_allowed(self, context: ToolContext) -> AllowedRoots:
        """Return the roots for the client of this request.

        Raises:
            RefusedSourceError: the client declares roots but does not list them.
        """
        client_roots = await _request_client_roots(context)
        if client_roots is None:
            return self.server_roots
        if not self.server_roots.roots and self.trust_client:
            return AllowedRoots(client_roots, max_bytes=self.server_roots.max_bytes)
        return self.server_roots.within(client_roots)


async def _request_client_roots(context: ToolContext) -> tuple[Path, ...] | None:
    """Return the client's roots on this machine, with links resolved; None if it does not declare roots."""
    session = context.request_context.session
    if not session.check_client_capability(ClientCapabilities(roots=RootsCapability())):
        return None
    try:
        # `session.list_roots` has no time-out: over HTTP it waits for a stream that the client may never open.
        result = await session.send_request(
            ServerRequest(ListRootsRequest()),
            ListRootsResult,
            request_read_timeout_seconds=_ROOTS_TIMEOUT,
            metadata=ServerMessageMetadata(related_request_id=context.request_id),
        )
    except (McpError, ValidationError) as error:
        raise RefusedSourceError(
            "the client declares roots but did not list them, so no file may be read", hint="Pass the text itself."
        ) from error
    paths = (get_local_path(str(root.uri)) for root in result.roots)
    return tuple(path for path in paths if path is not None)


def get_local_path(uri: str) -> Path | None:
    """Return the path of a file:// URI with links resolved; None if it does not exist on this machine."""
    url_parts = urlsplit(uri)
    if url_parts.scheme != "file" or url_parts.netloc not in {"", "localhost"} or not url_parts.path:
        return None
    try:
        return Path(url2pathname(url_parts.path)).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None
