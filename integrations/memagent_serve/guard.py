"""Access control of the server: it checks Host, Origin and keys, and refuses requests in the API's format."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent_graph.addresses import AllowedNames
from memagent_graph.plain_text import make_one_line
from memagent_graph.policies.redaction import make_redactor
from memagent_serve.api_errors import APIError, make_stopping_error, to_api_error
from memagent_serve.keys import Keys
from memagent_serve.metrics import Metrics
from memagent_serve.page_sessions import PAGE_PREFIX, PageSessions

logger = logging.getLogger(__name__)

_METRIC_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/models",
    "/v1/files",
    "/v1/reads",
    "/v1/responses",
    "/health",
    "/metrics",
    PAGE_PREFIX,
)
_LAST_EVENT_TIMEOUT_SECONDS: Final = 1.0
_MIN_SECRET_LENGTH: Final = 8
"""A shorter secret may be a word of an answer, so it is removed only from errors."""


@dataclass(eq=False, repr=False)
class Guard:
    """Passes a request to the application with the owner of its key in `request.state.owner`, or refuses it.

    All replies pass through it, so it also removes the policy's secrets from them.
    """

    app: ASGIApp
    names: AllowedNames
    """The host names and the web pages that clients may use."""
    keys: Keys
    metrics: Metrics
    sessions: PageSessions | None
    """The browsers that may use the live page; None if there is no live page."""
    secrets: Sequence[str]
    """The policy's keys and passwords."""

    def __post_init__(self) -> None:
        self._redact_errors = make_redactor(self.secrets)
        self._redact_texts = make_redactor(secret for secret in self.secrets if len(secret) >= _MIN_SECRET_LENGTH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        metric_path = next((prefix for prefix in _METRIC_PATHS if scope["path"].startswith(prefix)), "other")
        response = _GuardedResponse(send, self._redact, self.metrics.request_seconds.labels(metric_path).observe)
        try:
            self._admit(scope)
            await self.app(scope, receive, response.send)
            if response.is_open_stream:  # a stream ends by itself, or because the server stops
                await response.fail(make_stopping_error(), scope, receive)
        except ClientDisconnect:
            response.status = response.status or 499
        except (Exception, asyncio.CancelledError) as error:
            failure = make_stopping_error() if isinstance(error, asyncio.CancelledError) else to_api_error(error)
            if failure.status >= 500:
                logger.warning(
                    "request to %s failed: %s",
                    make_one_line(scope["path"], 200),
                    make_one_line(str(error)),
                    exc_info=failure.code == "internal",
                )
            if response.status and not response.is_open_stream:
                raise
            await response.fail(failure, scope, receive)
        finally:
            self.metrics.requests.labels(metric_path, str(response.status)).inc()

    def _redact(self, body: bytes, *, is_error: bool) -> bytes:
        redact = self._redact_errors if is_error else self._redact_texts
        return redact(bytes(body).decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have used the other length
            message = "the request has two lengths, Content-Length and Transfer-Encoding"
            raise APIError(400, message, headers={"Connection": "close"})
        if not self.names.allows_host(headers.get("host", "")):
            raise APIError(
                421,
                "this server does not accept that host name; start it with --server-name and the name that clients use",
                code="unknown_host",
            )
        if (origin := headers.get("origin")) is not None and not self.names.allows_origin(origin):
            raise APIError(
                403,
                "web pages of this origin are not allowed; start the server with --allow-origin to allow them",
                code="origin_not_allowed",
            )
        if scope["path"] == "/health":  # the reply has no private data
            return
        if self.sessions is not None and self.sessions.is_page_path(scope["path"]):
            scope.setdefault("state", {})["owner"] = self.sessions.admit(scope)
            return
        owner = self.keys.find_owner(headers.get("authorization"))
        if owner is None:
            raise APIError(
                401,
                "the request has no key, or an unknown one; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["owner"] = owner


@dataclass
class _GuardedResponse:
    """One response on its way to a client: without secrets, and with an error in the API's format if it fails."""

    _send: Send
    _redact: Callable[..., bytes]
    """Removes secrets from a part of the body."""
    _observe: Callable[[float], None]
    """Called with the seconds until the response begins."""
    _started_at: float = field(default_factory=time.perf_counter)
    _start_message: Message | None = None
    """The start of the response, which is sent when the length of the redacted body is known."""
    _is_text: bool = True
    is_open_stream: bool = False
    """Whether the response is a stream of events that has begun and not ended."""
    status: int = 0
    """The HTTP status; 0 before the response begins."""

    async def send(self, message: Message) -> None:
        """Send a message of the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._observe(time.perf_counter() - self._started_at)
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            content_type = headers.get("content-type", "")
            self._is_text = content_type != "application/octet-stream"
            self.is_open_stream = content_type.startswith("text/event-stream")
            if self._is_text and "content-length" in headers:
                self._start_message = message
                return
        elif self._is_text and message.get("body"):
            message["body"] = self._redact(message["body"], is_error=self.status >= 400)
        if self._start_message is not None:
            if not message.get("more_body"):
                MutableHeaders(scope=self._start_message)["Content-Length"] = str(len(message.get("body", b"")))
            start_message, self._start_message = self._start_message, None
            await self._send(start_message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_open_stream = False
        await self._send(message)

    async def fail(self, failure: APIError, scope: Scope, receive: Receive) -> None:
        """Send an error as the response, or as the last event of a stream that has begun."""
        if not self.is_open_stream:
            await JSONResponse(failure.to_body(), failure.status, headers=failure.headers)(scope, receive, self.send)
            return
        event = f"data: {json.dumps(failure.to_body())}\n\n".encode()
        with suppress(TimeoutError):  # the client may not read
            async with asyncio.timeout(_LAST_EVENT_TIMEOUT_SECONDS):
                await self.send({"type": "http.response.body", "body": event})
