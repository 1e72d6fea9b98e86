"""Which files one request may read: those below the server's roots and below its client's.

    server's roots   client's roots   files that may be read
    given            not offered      below the server's
    given            offered          below both
    none             offered          below the client's, where the client is trusted to name them
    none             not offered      none, only text that is passed in

A client that offers roots but names none, or only some that are not on this machine, may read no file. A client that
starts the server as a child process could read the same files without it, so its roots are trusted; a client over HTTP
may be anyone, so its roots only narrow the server's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from memagent_graph.documents.allowed_roots import AllowedRoots
from memagent_graph.errors import RefusedSourceError

ToolContext: TypeAlias = Context[ServerSession, Any, Any]

_PATIENCE = timedelta(seconds=10)
"""Seconds that a client may take to list its roots."""


class Roots:
    """The server's roots, and which of them each client may use.

    Args:
        own: the server's folders (or single files).
        max_bytes: the largest file, and the longest text.
        trust_client: whether a client's roots count if the server has none.

    Raises:
        FileNotFoundError: a root does not exist.
    """

    def __init__(self, own: Iterable[Path | str] = (), *, max_bytes: int, trust_client: bool) -> None:
        self.own = AllowedRoots(own, max_bytes=max_bytes)
        self._trust_client = trust_client

    async def for_request(self, context: ToolContext) -> AllowedRoots:
        """What the client of this request may read.

        Raises:
            RefusedSourceError: the client offers roots but does not list them.
        """
        declared = await _declared(context)
        if declared is None:
            return self.own
        granted = self.own.roots or (declared if self._trust_client else ())
        return AllowedRoots(overlap(granted, declared), max_bytes=self.own.max_bytes)


def overlap(first: Sequence[Path], second: Sequence[Path]) -> tuple[Path, ...]:
    """The folders whose contents are below one of `first` and one of `second`; all paths resolved."""
    inner = [_inner(one, other) for one in first for other in second]
    return tuple(dict.fromkeys(path for path in inner if path is not None))


def _inner(one: Path, other: Path) -> Path | None:
    if one == other or one in other.parents:
        return other
    return one if other in one.parents else None


async def _declared(context: ToolContext) -> tuple[Path, ...] | None:
    """The client's roots that are on this machine, links resolved; None if it offers none."""
    session = context.request_context.session
    if not session.check_client_capability(ClientCapabilities(roots=RootsCapability())):
        return None
    try:
        # Not `session.list_roots`: over HTTP that waits without limit for a stream that a client may not have opened.
        told = await session.send_request(
            ServerRequest(ListRootsRequest()),
            ListRootsResult,
            request_read_timeout_seconds=_PATIENCE,
            metadata=ServerMessageMetadata(related_request_id=context.request_id),
        )
    except (McpError, ValidationError) as error:
        raise RefusedSourceError(
            "the client offers roots but did not list them, so no file may be read", hint="Pass the text itself."
        ) from error
    found = (local_path(str(root.uri)) for root in told.roots)
    return tuple(path for path in found if path is not None)


def local_path(uri: str) -> Path | None:
    """The existing file or folder on this machine that a file:// URI names, links resolved."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not parts.path:
        return None
    try:
        return Path(url2pathname(parts.path)).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None
