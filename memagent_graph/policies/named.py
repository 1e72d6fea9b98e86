"""Policies by name: those that come with the package, and those that other packages add by entry point.

A package adds one in its pyproject.toml::

    [project.entry-points."memagent.policies"]
    mine = "my_package:make_policy"

where `make_policy` takes a `PolicyRequest` and returns a `Policy`. `memagent read --policy mine` then reads with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from memagent_graph import policies
from memagent_graph.entry_points import POLICIES, added, failure_of
from memagent_graph.errors import PolicyError
from memagent_graph.near_names import did_you_mean
from memagent_graph.policies.added import KNOWN, added_policies
from memagent_graph.policies.rate_limiter import RateLimiter
from memagent_graph.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRequest:
    """What a policy is made from. A factory uses the fields that it needs."""

    model: str | None = None
    """A name on the server, a folder or a hub id."""
    base_url: str | None = None
    """The server's API."""
    api_key: str | None = None
    dtype: str | None = None
    """The number format of a policy in this process, if it is not to choose."""
    concurrency: int = 128
    """The maximum number of requests in flight."""
    timeout: float = 300.0
    """Seconds that one completion may take."""
    retries: int = 4
    """How often a failed request is sent again."""
    requests_per_minute: float | None = None
    """For a server: the most requests sent in a minute, over all reads."""
    tokens_per_minute: float | None = None
    """For a server: the most prompt and completion tokens in a minute, over all reads."""
    session_header: str | None = None
    """For a server: the header that has the document's key, for routers that keep a session on one replica."""


PolicyFactory: TypeAlias = Callable[[PolicyRequest], Policy]


def make_policy(name: str, request: PolicyRequest) -> Policy:
    """The policy of a name.

    Raises:
        PolicyError: there is none of this name, or it cannot be made; the message names its package.
        MissingExtraError: a local policy without the extra "local".
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name](request)
    if name in KNOWN:
        return policies.LocalPolicy(name, dtype=request.dtype)
    entries = added(POLICIES)
    if name not in entries:
        names = policy_names()
        hint = did_you_mean(name, names, f"Policies are: {', '.join(names)}.")
        raise PolicyError(f"there is no policy {name!r}", hint=hint)
    try:
        policy = entries[name].load()(request)
        if not isinstance(policy, Policy):
            raise TypeError(f"its factory gives a value of type {type(policy).__name__}, not a Policy")
    except Exception as error:  # another package can raise anything
        raise failure_of(entries[name], "the policy", error, PolicyError) from error
    return policy


def policy_names() -> tuple[str, ...]:
    """The names that `make_policy` knows: those that come with the package, then those that were added."""
    return tuple(dict.fromkeys((*_BUILT_IN, *added_policies(), *added(POLICIES))))


def _local(request: PolicyRequest) -> Policy:
    if request.model is None:
        raise PolicyError("a local policy was asked for, but no model", hint="Name a folder or a hub id with --model.")
    return policies.LocalPolicy(request.model, dtype=request.dtype)


def _server(request: PolicyRequest) -> Policy:
    has_server = request.base_url or os.environ.get("OPENAI_BASE_URL")
    if not (has_server or request.api_key or os.environ.get("OPENAI_API_KEY")):
        model = f"{request.model} is not a folder here, and " if request.model else ""
        raise PolicyError(
            f"{model}no server is named that might have it",
            hint="Name its server (--base-url), a folder, or a hub id; with OPENAI_API_KEY, OpenAI's own is asked.",
        )
    if request.dtype is not None:
        raise PolicyError(
            f"{request.dtype} was asked for, but a server chooses its own number format",
            hint="Start the server with it, and leave --dtype out.",
        )
    return policies.OpenAICompatiblePolicy(
        request.model,
        base_url=request.base_url,
        api_key=request.api_key,
        max_concurrency=request.concurrency,
        read_timeout=request.timeout,
        max_retries=request.retries,
        limiter=RateLimiter(request.requests_per_minute, request.tokens_per_minute),
        session_header=request.session_header,
    )


_BUILT_IN: Final[Mapping[str, PolicyFactory]] = {
    "embedded": lambda request: policies.LocalPolicy.embedded(dtype=request.dtype),
    "local": _local,
    "server": _server,
}
