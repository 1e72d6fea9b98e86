"""Errors in the format of the OpenAI API: a status, a type, a code, and the parameter that caused the error."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.errors import (
    CheckpointError,
    DocumentError,
    DocumentStoreError,
    MemAgentError,
    MissingExtraError,
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyUnreachableError,
    RunHeldError,
    RunLogError,
    RunNotFoundError,
)

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_RETRY_HEADERS: Final = {"Retry-After": "5"}
_DISK_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE}
)
_PUBLIC_PAGE: Final = (
    r"https://(?:(?:platform|help)\.openai\.com|errors\.pydantic\.dev|docs\.vllm\.ai)/[\w./-]*(?![\w?#@:=&%])"
)
"""Pages that errors of model servers refer to. The address of a model server may have a public name, too."""
_BYTE: Final = r"(?:25[0-5]|2[0-4]\d|[01]?\d?\d)"
_IP_ADDRESS: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_PRIVATE_NETWORK: Final = (
    r"(?:10|100\.(?:6[4-9]|[7-9]\d|1[01]\d|12[0-7])|127|169\.254|172\.(?:1[6-9]|2\d|3[01])|192\.168)\."
)
_PRIVATE_TEXT: Final = re.compile(
    rf"\b(?!{_PUBLIC_PAGE})[A-Za-z][\w+.-]{{0,20}}://[^\s,;)'\"<>]+(?<![:.])"
    rf"|\b(?<!\d\.){_IP_ADDRESS}:\d+|(?<=['\"]){_IP_ADDRESS}(?=['\"])"
    rf"|\b(?<!\d\.)(?<!version )(?={_PRIVATE_NETWORK}){_IP_ADDRESS}\b(?!\.\w)"
    rf"|(?<=nection to ){_IP_ADDRESS}\b|(?<=connect to host |necting to host |nection to host )\S+(?<!\.)"
    r"|(?<=call failed )\([^()]*\)|(?<=not valid for )'[^']*'"
    r"|(?:(?<![\w./<])/(?!(?:v1|messages)/)|\b[A-Za-z]:\\|\\\\)"
    r"(?:(?:[^\s/\\:'\",;]+(?<!\.) ){0,3}[^\s/\\:'\",]+[/\\])+[^\s/\\:'\",<]*(?<!\.)"
)
"""Addresses, and absolute paths but those of the API and in a request. The name of a folder may have spaces.

Four numbers may also be a version or a date in a client's file name; outside a private network they are no address
without a port or quotation marks.
"""


@dataclass(eq=False)
class APIError(Exception):
    """A request that was refused or failed."""

    status: int
    """The HTTP status."""
    message: str
    """The problem and the remedy."""
    code: str | None = field(default=None, kw_only=True)
    """The API's short name for the problem."""
    param: str | None = field(default=None, kw_only=True)
    """The field of the request that caused the problem."""
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Further headers of the reply, such as Retry-After."""

    def __str__(self) -> str:
        return self.message

    def to_body(self) -> dict[str, Any]:
        """Return the error as sent by the API."""
        error_type = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def make_bad_request_error(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Return the error for a request that is invalid or not possible."""
    return APIError(400, message, param=param, code=code)


def make_not_found_error(message: str, code: str = "not_found", param: str | None = None) -> APIError:
    """Return the error for an object that does not exist, or belongs to another key."""
    return APIError(404, message, code=code, param=param)


def make_too_busy_error(message: str, seconds: int) -> APIError:
    """Return the error for a limit that is reached; the same request may be sent again after this many seconds."""
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, seconds))})


def make_stopping_error() -> APIError:
    """Return the error for a request that is interrupted because the server stops."""
    message = "the server is stopping; send the same request again later, and a read continues where it was"
    return APIError(503, message, code="server_stopping", headers=_RETRY_HEADERS)


def hide_private_text(message: str) -> str:
    """Return a message without addresses inside the network and absolute paths."""
    return _PRIVATE_TEXT.sub("[hidden]", message)


def to_api_error(error: Exception) -> APIError:
    """Convert an error to an error of the API.

    Folders and addresses of this server are hidden, and so are the messages of errors from other packages. Temporary
    errors have a status that clients retry.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        error = DocumentStoreError(str(error))
    for error_classes, status, code, template in _REPLIES_BY_ERROR:
        if isinstance(error, error_classes):
            message = template.format(hide_private_text(str(error)))
            return APIError(status, message, code=code, headers=_RETRY_HEADERS if status in {503, 507} else None)
    return APIError(500, f"the server failed ({type(error).__name__}); see its log", code="internal")


_DISK_MESSAGE: Final = (
    "the server cannot use its disk now, which may be full; see its log. Send the request again later"
)
_REPLIES_BY_ERROR: Final[tuple[tuple[type | tuple[type, ...], int, str, str], ...]] = (
    ((DocumentStoreError, CheckpointError, RunLogError), 507, "insufficient_storage", _DISK_MESSAGE),
    ((DocumentError, MissingExtraError), 400, "document_not_readable", "{}"),
    ((PolicyUnreachableError, PolicyOverloadedError), 503, "policy_server_unavailable", "{}"),
    (PolicyAuthenticationError, 502, "policy_server_failed", "the policy server refused this server's key"),
    (PolicyError, 502, "policy_server_failed", "the policy server failed: {}"),
    (RunNotFoundError, 404, "not_found", "the read has not begun"),
    (RunHeldError, 503, "read_in_use", "{}"),
    (MemAgentError, 500, "read_failed", "{}"),
)
"""Status, code and message for classes of errors. The first match is used."""
