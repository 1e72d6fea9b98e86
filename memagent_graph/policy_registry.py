"""Policies by name: those that come with the package, and those that other packages add by entry point.

A package adds one in its pyproject.toml::

    [project.entry-points."memagent.policies"]
    mine = "my_package:make_policy"

where `make_policy` takes the `PolicySettings`, of which it uses what it needs, and returns a `Policy`.
`memagent read --policy mine` then reads with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, TypeAlias

from memagent_graph import policies
from memagent_graph.entry_points import POLICIES, added, failure_of
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.near_names import did_you_mean
from memagent_graph.policies.added import KNOWN, added_policies
from memagent_graph.policies.rate_limiter import RateLimiter
from memagent_graph.policy import Policy
from memagent_graph.settings import PolicySettings

PolicyFactory: TypeAlias = Callable[[PolicySettings], Policy]


def make_policy(settings: PolicySettings) -> Policy:
    """Return the policy that the settings name.

    Raises:
        PolicyError: there is none of this name, or it cannot be made; the message names its package.
        MissingExtraError: a local policy without the extra "local".
    """
    name = settings.policy_name
    if name in _BUILT_IN:
        return _BUILT_IN[name](settings)
    if name in KNOWN:
        return policies.LocalPolicy(name, dtype=settings.dtype)
    entries = added(POLICIES)
    if name not in entries:
        names = policy_names()
        hint = did_you_mean(name, names, f"Policies are: {', '.join(names)}.")
        raise PolicyError(f"there is no policy {name!r}", hint=hint)
    try:
        policy = entries[name].load()(settings)
        if not isinstance(policy, Policy):
            raise TypeError(f"its factory gives a value of type {type(policy).__name__}, not a Policy")
    except Exception as error:  # another package can raise anything
        raise failure_of(entries[name], "the policy", error, PolicyError) from error
    return policy


def policy_of(given: Any) -> Policy:
    """Return what was passed in place of a policy as one: a policy itself, or a LangChain chat model.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(given, Policy):
        return given
    if all(hasattr(given, method) for method in ("ainvoke", "astream", "get_name")):
        return policies.ChatModelPolicy(given)
    raise PolicyError(
        f"a {type(given).__module__.partition('.')[0]} {type(given).__name__} is not a policy",
        hint="Pass a Policy, a LangChain chat model, a server's URL, or --model and --base-url.",
    )


def require_own_settings(settings: PolicySettings) -> None:
    """Check that nothing is chosen for a policy that is made already.

    Raises:
        MemAgentError: something is; the message names it.
    """
    chosen = [
        each.name
        for each in fields(PolicySettings)
        if each.name not in {"policy", "tokenizer"} and getattr(settings, each.name) != each.default
    ]
    if chosen:
        raise MemAgentError(
            f"{', '.join(chosen)} cannot be set: the policy is made already",
            hint="Set it where the policy is made, or give --model and --base-url in place of the policy.",
        )


def policy_names() -> tuple[str, ...]:
    """Return the names that `make_policy` knows: those that come with the package, then those that were added."""
    return tuple(dict.fromkeys((*_BUILT_IN, *added_policies(), *added(POLICIES))))


def _local(settings: PolicySettings) -> Policy:
    if settings.model is None:
        raise PolicyError("a local policy was asked for, but no model", hint="Name a folder or a hub id with --model.")
    return policies.LocalPolicy(settings.model, dtype=settings.dtype)


def _server(settings: PolicySettings) -> Policy:
    has_server = settings.base_url or os.environ.get("OPENAI_BASE_URL")
    if not (has_server or settings.api_key or os.environ.get("OPENAI_API_KEY")):
        model = f"{settings.model} is not a folder here, and " if settings.model else ""
        raise PolicyError(
            f"{model}no server is named that might have it",
            hint="Name its server (--base-url), a folder, or a hub id; with OPENAI_API_KEY, OpenAI's own is asked.",
        )
    if settings.dtype is not None:
        raise PolicyError(
            f"{settings.dtype} was asked for, but a server chooses its own number format",
            hint="Start the server with it, and leave --dtype out.",
        )
    return policies.OpenAICompatiblePolicy(
        settings.model,
        base_url=settings.base_url,
        api_key=settings.api_key,
        max_concurrency=settings.concurrency,
        read_timeout=settings.timeout,
        max_retries=settings.retries,
        limiter=RateLimiter(settings.requests_per_minute, settings.tokens_per_minute),
        session_header=settings.session_header,
    )


_BUILT_IN: Final[Mapping[str, PolicyFactory]] = {
    "embedded": lambda settings: policies.LocalPolicy.embedded(dtype=settings.dtype),
    "local": _local,
    "server": _server,
}
