"""Describes a server: the limits of requests, and the errors of failed ones, with a remedy and without secrets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

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
from memagent_graph.policies.api_variants import (
    OPTIONAL_FIELDS,
    find_refused_field,
    is_length_error,
    is_retriable,
)

_MAX_SERVER_TEXT: Final = 500
"""Maximum characters of the server's text in an error message."""


class MalformedReplyError(Exception):
    """A reply with a success status and an invalid body. A retry can help.

    Args:
        reason: the problem.
        content: the part of the body to show.
    """

    def __init__(self, reason: str, content: bytes = b"") -> None:
        super().__init__("the reply is malformed")  # not the arguments, which may contain a key
        self.reason = reason
        self.content = content


class GenerationFailedError(MalformedReplyError):
    """A reply in which the server reports that it failed during generation."""


class OverlongReplyError(MalformedReplyError):
    """A reply that is too long. It is dropped."""


@dataclass(frozen=True)
class Server:
    """A server, and the limits of requests to it. It builds the errors of failed requests.

    An error has the redacted message of its cause, but not the cause itself, which may contain request headers.
    """

    base_url: str
    redact: Callable[[str], str] = field(repr=False)
    connect_timeout: float
    """Seconds for a connection."""
    read_timeout: float
    """Seconds for a completion. Pauses between attempts do not count."""
    max_retries: int

    def make_error(self, error: Exception, timeout_text: str = "") -> PolicyError:
        """Return the error for a request without a usable reply.

        Args:
            error: a `MalformedReplyError`, `TimeoutError` or `aiohttp.ClientError`.
            timeout_text: the time-out for the reply, to be appended to the message.
        """
        if isinstance(error, MalformedReplyError):
            return self._make_malformed_error(error)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._make_unreachable_error(f"none within {self.connect_timeout:g} s")
        if isinstance(error, TimeoutError):
            return PolicyUnreachableError(
                f"{self.base_url} did not answer in time{timeout_text}",
                hint="Is it overloaded? Raise --timeout, or lower --concurrency.",
            )
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        is_refused = isinstance(cause, ConnectionRefusedError)  # its message depends on the system
        return self._make_unreachable_error("All connection attempts failed" if is_refused else str(cause))

    def _make_unreachable_error(self, reason: str) -> PolicyUnreachableError:
        return PolicyUnreachableError(
            f"no connection to {self.base_url}: {self.redact(reason)}",
            hint="Is the server running? Check --base-url.",
        )

    def make_redirect_error(self, target: str, url: str) -> PolicyResponseError:
        """Return the error for a redirect of `url` to another server.

        The user did not name that server, so it must not get the prompt. The hint has the target as base URL.
        """
        address = self.redact(re.split(r"[?#]", re.sub("//.*@", "//", target))[0])
        base = address.removesuffix(url.removeprefix(self.base_url.rstrip("/")))
        return PolicyResponseError(
            f"{self.base_url} redirects to another server, {address}; the request was not sent there",
            hint=f"If that is the server you mean, name it: --base-url {base}",
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
                hint="Set OPENAI_API_KEY, or --api-key. A server that wants a user name and a password has them in its "
                "address: http://USER:PASSWORD@HOST:PORT/v1.",
            )
        if is_retriable(status, message):
            outcome = f"answered {status}"
            if self.max_retries:
                outcome = f"still answered {status}{self._after_retries}"
            if retry_after is not None and retry_after > self.read_timeout:
                outcome = f"answered {status} and asks to wait for {retry_after:.0f} s"
            return PolicyOverloadedError(
                f"{address} {outcome}: {excerpt}",
                hint="Wait, or lower the number of requests in flight (--concurrency), then resume.",
            )
        if is_length_error(excerpt) or status == 413:
            hint = "Lower --chunk-tokens; `memagent doctor` shows the server's window."
        elif status == 404:
            hint = "`memagent doctor` lists what is served."
            if not address.rstrip("/").endswith("/v1"):
                hint += f" Is the address complete? Most end in /v1: --base-url {address.rstrip('/')}/v1"
        elif refused_field := find_refused_field(excerpt, OPTIONAL_FIELDS):
            hint = f"If it does not accept {refused_field}: --unsupported {refused_field}."
        else:
            hint = "`memagent doctor` sends a small request, and shows what comes back."
        error = PolicyRequestError(f"{address} refused the request ({status}): {excerpt}", hint=hint)
        error.server_message = full_message
        return error

    def _make_malformed_error(self, error: MalformedReplyError) -> PolicyResponseError:
        if isinstance(error, OverlongReplyError):
            return PolicyResponseError(
                f"{self.base_url} still sent a reply that is too long{self._after_retries}: {error.reason}",
                hint="Does it respect max_tokens?",
            )
        reason = self.redact(error.reason)
        if isinstance(error, GenerationFailedError):
            return PolicyResponseError(
                f"{self.base_url} still failed during a reply{self._after_retries}: {reason[:_MAX_SERVER_TEXT]}",
                hint="See the server's log, then resume.",
            )
        excerpt = self.redact(error.content.decode(errors="replace"))[:200]
        return PolicyResponseError(
            f"{self.base_url} answered with something that is not a completion{self._after_retries}: {excerpt!r} "
            f"({reason})",
            hint="Is this an OpenAI-compatible API? --base-url usually ends in /v1.",
        )

    @property
    def _after_retries(self) -> str:
        return f" after {format_count(self.max_retries, 'retry', 'retries')}" if self.max_retries else ""
