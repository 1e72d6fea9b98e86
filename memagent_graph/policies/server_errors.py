"""Describes a server: how requests are sent, and the errors of failed ones, with a remedy and without secrets."""

from __future__ import annotations

import re
import shlex
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin

import aiohttp

from memagent_graph.errors import (
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyResponseError,
    PolicyUnreachableError,
)
from memagent_graph.plain_text import format_count
from memagent_graph.policies.api_variants import OPTIONAL_FIELDS, find_refused_field, is_length_error, is_retriable
from memagent_graph.policies.server_url import parse_origin, remove_password

_MAX_SERVER_TEXT: Final = 500
"""Maximum characters of the server's text in an error message."""


class MalformedReplyError(Exception):
    """A reply with a success status and an invalid body. A retry can help.

    Args:
        reason: the problem.
        content: the part of the body to show, if any.
    """

    problem = "answered with something that is not a completion"
    hint = "Is this an OpenAI-compatible API? --base-url usually ends in /v1."

    def __init__(self, reason: str, content: bytes | None = None) -> None:
        super().__init__("the reply is malformed")  # not the arguments, which may contain a key
        self.reason = reason
        self.content = content


class GenerationFailedError(MalformedReplyError):
    """A reply in which the server reports that it failed during generation."""

    problem = "still failed during a reply"
    hint = "See the server's log, then resume."


class OverlongReplyError(MalformedReplyError):
    """A reply that is too long. It is dropped."""

    problem = "still sent a reply that is too long"
    hint = "Does it respect max_tokens?"


@dataclass(frozen=True)
class Server:
    """A server, and how requests are sent to it. It builds the errors of failed requests.

    An error has the redacted message of its cause, but not the cause itself, which may contain request headers.
    """

    base_url: str
    redact: Callable[[str], str] = field(repr=False)
    connect_timeout: float
    """Seconds for a connection."""
    read_timeout: float
    """Seconds for a completion. Pauses between attempts do not count."""
    max_retries: int
    max_concurrency: int
    """The maximum number of completions in flight."""
    headers: Mapping[str, str] = field(repr=False)
    """Headers of every request."""
    proxy: str | None = field(repr=False)
    """The URL of the proxy; None for no proxy."""
    ssl_context: ssl.SSLContext | None
    """The trusted certificates; None for the default of the HTTP client."""

    def make_error(self, error: Exception, timeout_text: str = "") -> PolicyError:
        """Return the error for a request without a usable reply.

        Args:
            error: a `MalformedReplyError`, `TimeoutError` or `aiohttp.ClientError`.
            timeout_text: the time-out for the reply, to be appended to the message.
        """
        if isinstance(error, MalformedReplyError):
            detail = self.redact(error.reason)[:_MAX_SERVER_TEXT]
            if error.content is not None:
                detail = f"{self.redact(error.content.decode(errors='replace'))[:200]!r} ({detail})"
            return PolicyResponseError(
                f"{self.base_url} {error.problem}{self._after_retries}: {detail}", hint=error.hint
            )
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            reason = f"none within {self.connect_timeout:g} s"
        elif isinstance(error, TimeoutError):
            return PolicyUnreachableError(
                f"{self.base_url} did not answer in time{timeout_text}",
                hint="Is it overloaded? Raise --timeout, or lower --concurrency.",
            )
        elif isinstance(cause, ConnectionRefusedError):  # its message depends on the system
            reason = "All connection attempts failed"
        else:
            reason = self.redact(str(cause))
        hint = "Is the server running? Check --base-url."
        if isinstance(error, aiohttp.ClientSSLError):
            hint = "Pass the certificates to trust with --ca-file. The address of a server without TLS is http://..."
        return PolicyUnreachableError(f"no connection to {self.base_url}: {reason}", hint=hint)

    def resolve_redirect(self, url: str, target: str, location: str) -> str:
        """Return the address to which `target` redirects; earlier redirects of `url` led to `target`.

        Raises:
            PolicyResponseError: it is on another server. The user did not name that server, so it must not get the
                prompt. The hint has its base URL.
        """
        new_target = location
        with suppress(PolicyRequestError, ValueError):  # the location is not an address
            new_target = urljoin(target, location)
            if parse_origin(new_target) == parse_origin(self.base_url):
                return remove_password(new_target)
        address = self.redact(re.split(r"[?#]", re.sub("//.*@", "//", new_target))[0])
        base = address.removesuffix(url.removeprefix(self.base_url.rstrip("/")))
        raise PolicyResponseError(
            f"{self.base_url} redirects to another server, {address}; the request was not sent there",
            hint=f"If that is the server you mean, name it: --base-url {shlex.quote(base)}",
        )

    def make_refusal(self, status: int, message: str, retry_after: float | None) -> PolicyError:
        """Return the error for a reply with a status of 300 or above.

        Args:
            status: the HTTP status.
            message: the server's message.
            retry_after: the seconds in `Retry-After`, if there is one.
        """
        address, full_message = self.base_url, self.redact(message)
        excerpt = full_message[:_MAX_SERVER_TEXT]
        if status in {401, 403}:
            return PolicyAuthenticationError(
                f"{address} refused the key ({status}): {excerpt}",
                hint="Set OPENAI_API_KEY, or --api-key. User name and password, or a key in the query, belong in the "
                "address: http://USER:PASSWORD@HOST:PORT/v1?key=KEY.",
            )
        if is_retriable(status, message):
            outcome = f"answered {status}"
            if self.max_retries:
                outcome = f"still answered {status}{self._after_retries}"
            if retry_after is not None and retry_after > self.read_timeout:
                outcome = f"answered {status} and asks to wait for {retry_after:.0f} s"
            overload = PolicyOverloadedError(
                f"{address} {outcome}: {excerpt}",
                hint="Wait, or lower the number of requests in flight (--concurrency), then resume.",
            )
            overload.status = status
            return overload
        if is_length_error(excerpt) or status == 413:
            hint = "Lower --chunk-tokens; `memagent doctor` shows the server's window."
        elif status == 404:
            hint = "`memagent doctor` lists what is served."
            api_root = address.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1") + "/v1"
            if address.rstrip("/") != api_root:
                hint += f" Is the address right? Most end in /v1: --base-url {api_root}"
        elif refused_field := find_refused_field(excerpt, OPTIONAL_FIELDS):
            hint = f"If it does not accept {refused_field}: --unsupported {refused_field}."
        else:
            hint = "`memagent doctor` sends a small request, and shows what comes back."
        error = PolicyRequestError(f"{address} refused the request ({status}): {excerpt}", hint=hint)
        error.server_message = full_message
        return error

    @property
    def _after_retries(self) -> str:
        return f" after {format_count(self.max_retries, 'retry', 'retries')}" if self.max_retries else ""
