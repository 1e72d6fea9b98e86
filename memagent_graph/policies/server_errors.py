"""Turns failed requests to a server into errors with a message and a remedy, without secrets."""

from __future__ import annotations

import re
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
from memagent_graph.policies.api_variants import OPTIONAL_FIELDS, find_refused_field, speaks_of_length
from memagent_graph.policies.redaction import SecretRedaction
from memagent_graph.policies.sending import (
    BrokenOffError,
    MalformedReplyError,
    OverlongReplyError,
    RedirectError,
    StatusError,
    Timeouts,
)

_MAX_SERVER_TEXT: Final = 500
"""Maximum characters of the server's text in an error message."""


@dataclass
class ServerErrors:
    """Builds the errors for failed requests to one server."""

    base_url: str
    redact: SecretRedaction = field(repr=False)
    timeouts: Timeouts
    max_retries: int

    def to_policy_error(
        self, error: Exception, url: str, seconds: str = "", *, model: str | None, unlisted: PolicyError | None
    ) -> PolicyError:
        """Return the error for a failed request.

        It has the redacted message of its cause, but not the cause, which may contain headers of the request.

        Args:
            error: the error of `Sender`.
            url: the URL of the request.
            seconds: the time-out for the reply, in words.
            model: the model's name on the server, if it is known.
            unlisted: the error of the server's list of models, if there is one.
        """
        match error:
            case StatusError():
                return self._refusal(error, self.redact(error.message), model, unlisted)
            case MalformedReplyError():
                return self._malformed(error)
            case RedirectError():
                return self._redirect_error(error.target, url)
            case TimeoutError():
                return self._timeout_error(error, seconds)
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        refused = isinstance(cause, ConnectionRefusedError)  # the message depends on the system
        return self._unreachable("All connection attempts failed" if refused else str(cause))

    def _unreachable(self, reason: str) -> PolicyUnreachableError:
        return PolicyUnreachableError(
            f"no connection to {self.base_url}: {self.redact(reason)}",
            hint="Is the server running? Check --base-url.",
        )

    def _timeout_error(self, error: Exception, allowed: str) -> PolicyUnreachableError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._unreachable(f"none within {self.timeouts.connect:g} s")
        return PolicyUnreachableError(
            f"{self.base_url} did not answer in time{allowed}",
            hint="Is it overloaded? Raise --timeout, or lower --concurrency.",
        )

    def _redirect_error(self, target: str, url: str) -> PolicyResponseError:
        """Return the error for a redirect. Its hint is the target as base URL."""
        address = self.redact(re.split(r"[?#]", re.sub("//.*@", "//", target))[0])
        base = address.removesuffix(url.removeprefix(self.base_url.rstrip("/")))
        return PolicyResponseError(
            f"{self.base_url} redirects to another server, {address}; the request was not sent there",
            hint=f"If that is the server you mean, name it: --base-url {base}",
        )

    def _refusal(
        self, error: StatusError, all_words: str, model: str | None, unlisted: PolicyError | None
    ) -> PolicyError:
        where, status, wait, words = self.base_url, error.status, error.wait, all_words[:_MAX_SERVER_TEXT]
        if status in {401, 403}:
            return PolicyAuthenticationError(
                f"{where} refused the key ({status}): {words}",
                hint="Set OPENAI_API_KEY, or --api-key. A server that wants a user name and a password has them in its "
                "address: http://USER:PASSWORD@HOST:PORT/v1.",
            )
        if error.is_retriable:
            tried = f"answered {status}"
            if self.max_retries:
                tried = f"still answered {status} after {_retries(self.max_retries)}"
            if wait is not None and wait > self.timeouts.read:
                tried = f"answered {status} and asks to wait for {wait:.0f} s"
            return PolicyOverloadedError(
                f"{where} {tried}: {words}",
                hint="Wait, or lower the number of requests in flight (--concurrency), then resume.",
            )
        served = ""
        if speaks_of_length(words) or status == 413:
            hint = "Lower --chunk-tokens; `memagent doctor` shows the server's window."
        elif unlisted and model and model in words:
            hint, served = f"{unlisted.message}.", getattr(unlisted, "served", "")
        elif status == 404 and model and model in words:
            hint = "`memagent doctor` lists what is served."
        elif status == 404 and not where.rstrip("/").endswith("/v1"):
            hint = f"Is the address complete? Most end in /v1: --base-url {where.rstrip('/')}/v1"
        elif field := find_refused_field(words, OPTIONAL_FIELDS):
            hint = f"If it does not take {field}: --unsupported {field}."
        else:
            hint = "`memagent doctor` sends a small request, and shows what comes back."
        refusal = PolicyRequestError(f"{where} refused the request ({status}): {words}", hint=hint)
        refusal.server_message, refusal.served = all_words, served
        return refusal

    def _malformed(self, error: MalformedReplyError) -> PolicyResponseError:
        retried = f" after {_retries(self.max_retries)}" if self.max_retries else ""
        if isinstance(error, OverlongReplyError):
            return PolicyResponseError(
                f"{self.base_url} still sent a reply that is too long{retried}: {error.reason}",
                hint="Does it respect max_tokens?",
            )
        if isinstance(error, BrokenOffError):
            return PolicyResponseError(
                f"{self.base_url} still broke its reply off{retried}: {self.redact(error.reason)[:_MAX_SERVER_TEXT]}",
                hint="Look into the server's log, then resume.",
            )
        excerpt = self.redact(error.content.decode(errors="replace"))[:200]
        return PolicyResponseError(
            f"{self.base_url} answered with something that is not a completion{retried}: {excerpt!r} "
            f"({self.redact(error.reason)})",
            hint="Is this an OpenAI-compatible API? --base-url usually ends in /v1.",
        )


def _retries(count: int) -> str:
    return f"{count} {'retry' if count == 1 else 'retries'}"
