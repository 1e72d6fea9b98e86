"""Access to the live page: a browser signs in with the token of the start-up message or with a key, and gets a cookie.

Other pages cannot use the cookie: it is sent only to this site, and because browsers treat all ports of a host as the
same site, every change also needs a header that only this page sends.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from memagent_serve.api_errors import APIError
from memagent_serve.keys import LOCAL, Keys, Owner, hash_secret

PAGE_PREFIX: Final = "/page"
"""The prefix of all paths of the page except "/"."""
SIGN_IN_PATH: Final = f"{PAGE_PREFIX}/session"
STATIC_PREFIX: Final = f"{PAGE_PREFIX}/static/"
PAGE_HEADER: Final = "X-Memagent-Page"
"""A header of the page's requests that change something. Forms and images of other pages cannot send it."""
_SESSIONS_PER_OWNER: Final = 64
"""The maximum number of sessions of one key; a new session ends the oldest one of the key."""
_TRUSTED_SITES: Final = frozenset({"same-origin", "none"})


class PageSessions:
    """The browsers that may use the page.

    Args:
        keys: the known keys. If there are none, `token` gives access.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._sessions: dict[bytes, Owner] = {}
        self.token: str | None = None if keys else secrets.token_urlsafe(24)
        """The token in the start-up message; None if a key is needed."""

    def sign_in(self, credential: str, scope: Scope) -> Response:
        """Sign in the browser that sent a request.

        Args:
            credential: the token, or a key.
            scope: the request.

        Returns:
            A response that sets the cookie.

        Raises:
            APIError: 401; `credential` is neither the token nor a key.
        """
        if self.token is None:
            owner = self._keys.find_owner(f"Bearer {credential}")
        else:
            owner = LOCAL if hmac.compare_digest(credential.encode(errors="replace"), self.token.encode()) else None
        if owner is None:
            raise APIError(401, "this is not the token of the start-up message, nor a key", code="invalid_page_token")
        session = secrets.token_urlsafe(32)
        digests = [digest for digest, session_owner in self._sessions.items() if session_owner.name == owner.name]
        for digest in digests[: max(0, len(digests) + 1 - _SESSIONS_PER_OWNER)]:
            del self._sessions[digest]
        self._sessions[hash_secret(session)] = owner
        response = Response(status_code=204)
        response.set_cookie(_name_cookie(scope), session, path="/", httponly=True, samesite="strict")
        return response

    def sign_out(self, scope: Scope) -> None:
        """Sign out the browser that sent a request."""
        self._sessions.pop(_hash_session(scope), None)

    @staticmethod
    def is_page_path(path: str) -> bool:
        """Return whether a path belongs to the page."""
        return path == "/" or path.startswith(f"{PAGE_PREFIX}/")

    def admit(self, scope: Scope) -> Owner | None:
        """Return the owner of a request to the page; None for public paths (the page itself and the sign-in).

        Raises:
            APIError: 401 without a cookie; 403 for requests that other pages cause.
        """
        headers = Headers(scope=scope)
        path, is_safe = scope["path"], scope["method"] in {"GET", "HEAD"}
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.lower() not in {
            f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")
        }
        is_public = path == "/" or path.startswith(STATIC_PREFIX)
        if is_foreign or (not is_public and headers.get("sec-fetch-site", "none") not in _TRUSTED_SITES):
            raise APIError(403, "other web pages may not send this request", code="origin_not_allowed")
        if not is_safe and PAGE_HEADER not in headers:
            raise APIError(403, f"the header {PAGE_HEADER} is missing", code="not_from_the_page")
        if is_public or (path == SIGN_IN_PATH and scope["method"] == "POST"):
            return None
        owner = self._sessions.get(_hash_session(scope))
        if owner is None:
            raise APIError(401, "sign in with the token of the start-up message, or a key", code="not_signed_in")
        return owner


def _name_cookie(scope: Scope) -> str:
    """Return a cookie's name. It has the server's port, because all ports of a host share their cookies."""
    return f"memagent_page_{scope['server'][1] if scope.get('server') else 0}"


def _hash_session(scope: Scope) -> bytes:
    """Return the digest of the session in a request's cookie; of "" without a cookie."""
    return hash_secret(HTTPConnection(scope).cookies.get(_name_cookie(scope), ""))
