"""Errors in the form of the OpenAI API: a status, a type, a code, and the parameter that caused it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memagent_graph.errors import (
    DocumentError,
    MemAgentError,
    MissingExtraError,
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyUnreachableError,
)

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_WAIT_SECONDS: Final = "5"


class ApiError(Exception):
    """A request that was refused or failed.

    Args:
        status: the HTTP status.
        message: what happened, and what to do.
        code: the API's short name for it.
        param: the field of the request that caused it.
        headers: further headers of the reply, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error as sent by the API."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a request that is invalid or not possible."""
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, code: str = "not_found", param: str | None = None) -> ApiError:
    """Return the error for an object that does not exist, or belongs to another key."""
    return ApiError(404, message, code=code, param=param)


def too_busy(message: str, seconds: int) -> ApiError:
    """Return the error for a limit that is reached; the same request may be sent again after this many seconds."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, seconds))})


def api_error(error: Exception) -> ApiError:
    """Return a reader's failure as an error of the API, without the message of an error from outside the package."""
    match error:
        case ApiError():
            return error
        case DocumentError() | MissingExtraError():
            return ApiError(400, str(error), code="document_not_readable")
        case PolicyUnreachableError() | PolicyOverloadedError():
            return ApiError(503, str(error), code="policy_server_unavailable", headers={"Retry-After": _WAIT_SECONDS})
        case PolicyError():
            words = "refused this server's key" if isinstance(error, PolicyAuthenticationError) else f"failed: {error}"
            return ApiError(502, f"the policy server {words}", code="policy_server_failed")
        case MemAgentError():
            return ApiError(500, str(error), code="read_failed")
        case _:
            return ApiError(500, f"the server failed ({type(error).__name__}); its log says more", code="internal")
