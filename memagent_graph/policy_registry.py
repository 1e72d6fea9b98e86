"""Creates policies by name, from this package and from entry points of other packages.

A package adds a policy in its pyproject.toml::

    [project.entry-points."memagent.policies"]
    mine = "my_package:make_policy"

`make_policy` takes `PolicySettings` and returns a `Policy`. `memagent read --policy mine` reads with it.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, Final, TypeAlias, cast
from urllib.parse import quote

import msgspec

from memagent_graph.entry_points import POLICIES, list_entry_points, make_entry_point_error
from memagent_graph.errors import MemAgentError, PolicyError, PolicyRequestError
from memagent_graph.plain_text import did_you_mean
from memagent_graph.policies.added import ADDABLE_POLICIES, list_added_policies
from memagent_graph.policies.server_url import NO_KEY
from memagent_graph.policy import Policy
from memagent_graph.settings import PolicySettings
from memagent_graph.storage.bounded_files import parse_json

PolicyFactory: TypeAlias = Callable[[PolicySettings], Policy]
_OPENAI_CLIENTS: Final = {("openai", "OpenAI"), ("openai", "AsyncOpenAI")}
"""Client classes, by package and name, so that the package is not imported. Azure's clients are subclasses."""


def make_policy(settings: PolicySettings) -> Policy:
    """Return the policy that the settings name.

    Raises:
        PolicyError: the policy does not exist, or cannot be created.
        MissingExtraError: a local policy needs the extra "local", which is not installed.
    """
    name = settings.policy_name
    if name == "server":
        return _make_server_policy(settings)
    if name in {"embedded", "local", *ADDABLE_POLICIES}:
        if (model := settings.model if name == "local" else name) is None:
            raise PolicyError(
                "a local policy was requested, but no model", hint="Pass a folder or a hub id with --model."
            )
        arguments = parse_template_arguments(settings.chat_template_kwargs)
        from memagent_graph.policies.local import LocalPolicy  # noqa: PLC0415  slow to import

        return LocalPolicy(model, dtype=settings.dtype, chat_template_kwargs=arguments)
    entries = list_entry_points(POLICIES)
    if name not in entries:
        names = tuple(dict.fromkeys(("embedded", "local", "server", *list_added_policies(), *entries)))
        hint = did_you_mean(name, names, f"Choose one of: {', '.join(names)}. For a model on a server, use --model.")
        raise PolicyError(f"there is no policy {name!r}", hint=hint)
    try:
        policy = entries[name].load()(settings)
        if not isinstance(policy, Policy):
            raise TypeError(f"its factory gives a value of type {type(policy).__name__}, not a Policy")
    except Exception as error:  # another package can raise anything
        raise make_entry_point_error(entries[name], "the policy", error, PolicyError) from error
    return policy


def convert_to_policy(value: object, settings: PolicySettings) -> Policy:
    """Return the policy for an object: a policy, a LangChain chat model, or a client of `openai`.

    Raises:
        PolicyError: the object has another type.
        MemAgentError: a setting must be set on the object itself.
    """
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__}
    if not bases.isdisjoint(_OPENAI_CLIENTS):
        defaults = _make_connection_options(PolicySettings())
        options = _make_connection_options(settings)
        changes = {name: value for name, value in options.items() if value != defaults.get(name)}
        from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy  # noqa: PLC0415  slow to import

        arguments = {**_read_client_options(value, settings.model), "model": settings.model}
        headers = {**arguments["default_headers"], **changes.pop("default_headers", {})}
        return OpenAICompatiblePolicy(**arguments | changes | {"default_headers": headers})
    if ("langchain_core", "BaseChatModel") in bases:
        refuse_settings(settings, allowed={"unsupported"})
        from memagent_graph.policies.chat_model import ChatModelPolicy  # noqa: PLC0415  slow to import

        return ChatModelPolicy(cast(Any, value), unsupported=_split_names(settings.unsupported))
    if not isinstance(value, type) and isinstance(value, Policy):
        refuse_settings(settings)
        return value
    cls: type = value if isinstance(value, type) else type(value)
    library = cls.__module__.partition(".")[0]
    raise PolicyError(
        f"{'the class' if cls is value else 'a value of type'} {cls.__name__} ({library}) is not a policy",
        hint=_HINT_BY_LIBRARY.get(library)
        or ("Pass an instance of this class." if cls is value else None)
        or "Pass the address of a server, a policy's name, a LangChain chat model, a client of the openai package, "
        "or an object with a name and an async method complete(prompt, sampling).",
    )


def _read_client_options(client: Any, model: str | None) -> dict[str, Any]:
    """Return the settings of a client of the `openai` package as arguments of an `OpenAICompatiblePolicy`.

    Address, key, organisation, project, default headers and query, timeout, retries, certificates and proxy are used,
    also for Azure. A custom transport and event hooks are not.

    Raises:
        PolicyRequestError: the client's key comes from a function, or a client for Azure names no deployment.
    """
    if getattr(client, "_api_key_provider", None) or getattr(client, "_azure_ad_token_provider", None):
        raise PolicyRequestError(
            "the client's key comes from a function, which only the client itself calls",
            hint="Make the client with a key (api_key=... or azure_ad_token=...), or use MemAgent(ChatOpenAI(...)) or "
            "MemAgent(AzureChatOpenAI(...)).",
        )
    base_url = str(client.base_url).rstrip("/")
    account_headers = {"OpenAI-Organization": client.organization, "OpenAI-Project": client.project}
    headers = {**{name: value for name, value in account_headers.items() if value}, **client._custom_headers}
    key = client.api_key
    if hasattr(client, "_azure_deployment"):
        if "/deployments/" not in base_url:
            if model is None:
                raise PolicyRequestError(
                    "the Azure client does not name a deployment",
                    hint='Name it: MemAgent(client, model="DEPLOYMENT").',
                )
            base_url = f"{base_url}/deployments/{model}"
        key = getattr(client, "_azure_ad_token", None)
        headers |= {} if key else {"api-key": client.api_key}
    settings: dict[str, Any] = {
        "api_key": key or NO_KEY,
        "base_url": base_url,
        "default_headers": {name: value for name, value in headers.items() if isinstance(value, str)},
        "default_query": {name: str(value) for name, value in client.default_query.items()},
        "max_retries": client.max_retries,
    }
    timeout = client.timeout
    if isinstance(timeout, int | float):
        settings["read_timeout"] = float(timeout)
    elif getattr(timeout, "read", None):
        settings["read_timeout"] = float(timeout.read)
        if timeout.connect:
            settings["connect_timeout"] = float(timeout.connect)
    pool = getattr(client._client._transport_for_url(client.base_url), "_pool", None)
    if url := getattr(pool, "_proxy_url", None):
        credentials = dict(getattr(pool, "_proxy_headers", ())).get(b"Proxy-Authorization", b"").removeprefix(b"Basic ")
        user = "".join(f"{quote(part, '')}:" for part in b64decode(credentials).decode().split(":", 1))[:-1]
        host = f"{url.host.decode()}:{url.port}" if url.port else url.host.decode()
        settings["proxy"] = f"{url.scheme.decode()}://{user}{'@' if user else ''}{host}"
    if ssl_context := getattr(pool, "_ssl_context", None):
        settings["ca_file"] = ssl_context
    return settings


def refuse_settings(settings: PolicySettings, allowed: Collection[str] = ()) -> None:
    """Refuse settings for a policy that was created already, except those in `allowed`.

    Raises:
        MemAgentError: a setting is not its default.
    """
    names = [
        field.name
        for field in fields(PolicySettings)
        if field.name not in {"policy", "tokenizer", *allowed} and getattr(settings, field.name) != field.default
    ]
    if names:
        raise MemAgentError(
            f"{', '.join(names)} cannot be set for a policy that was created already",
            hint="Set it where the policy is created, or pass --model and --base-url instead of the policy.",
        )


def _make_server_policy(settings: PolicySettings) -> Policy:
    has_server = settings.base_url or os.environ.get("OPENAI_BASE_URL")
    if not (has_server or settings.api_key or os.environ.get("OPENAI_API_KEY")):
        reason = f"{settings.model} is not a folder here, and " if settings.model else ""
        raise PolicyError(
            f"{reason}no server is named",
            hint="Pass its server (--base-url), a folder, or a hub id. With OPENAI_API_KEY, OpenAI's server is used.",
        )
    if settings.dtype is not None:
        raise PolicyError(
            f"{settings.dtype} was requested, but a server chooses its own number format",
            hint="Start the server with it, and leave out --dtype.",
        )
    from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy  # noqa: PLC0415  slow to import

    return OpenAICompatiblePolicy(
        settings.model, base_url=settings.base_url, api_key=settings.api_key, **_make_connection_options(settings)
    )


def _make_connection_options(settings: PolicySettings) -> dict[str, Any]:
    """Return the options of a connection, except address and key."""
    template_arguments = parse_template_arguments(settings.chat_template_kwargs)
    options = {
        "max_concurrency": settings.concurrency,
        "read_timeout": settings.timeout,
        "max_retries": settings.retries,
        "session_header": settings.session_header,
        "unsupported": _split_names(settings.unsupported),
        "extra_body": {"chat_template_kwargs": template_arguments} if template_arguments else None,
        "default_headers": dict(map(_split_header, settings.header)) if settings.header else None,
        "ca_file": settings.ca_file,
        "proxy": settings.proxy,
    }
    return {name: value for name, value in options.items() if value is not None}


def parse_template_arguments(text: str | None) -> dict[str, Any]:
    """Return the arguments for a chat template from their JSON text.

    Raises:
        MemAgentError: the text is not a JSON object.
    """
    try:
        return msgspec.convert(parse_json(text or "{}"), dict[str, Any])
    except ValueError as error:
        raise MemAgentError(
            f"{text!r} is not a JSON object", hint="Write --chat-template-kwargs as in '{\"enable_thinking\": false}'."
        ) from error


def _split_names(names: str | Collection[str] | None) -> tuple[str, ...]:
    parts = names.split(",") if isinstance(names, str) else names or ()
    return tuple(name.strip() for name in parts if name.strip())


def _split_header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        first_word = next(iter(name.split()), "")  # the rest may be a secret
        message = f"the header that begins with {first_word!r} has no colon"
        raise MemAgentError(message, hint='Write it as "Name: value".')
    return name.strip(), value.strip()


_HINT_BY_LIBRARY: Final = {
    "anthropic": "Use MemAgent(ChatAnthropic(...)), from langchain-anthropic.",
    "ollama": 'Ollama speaks the OpenAI API: MemAgent(base_url="http://localhost:11434/v1", model=...).',
    "google": "Use MemAgent(ChatGoogleGenerativeAI(...)), from langchain-google-genai.",
    "mistralai": 'Mistral speaks the OpenAI API: MemAgent(base_url="https://api.mistral.ai/v1", model=...).',
    "litellm": "Use the address of LiteLLM's proxy, or MemAgent(ChatLiteLLM(...)), from langchain-litellm.",
    "httpx": "Use MemAgent(AsyncOpenAI(http_client=...)), from openai.",
    "httpx2": "Use MemAgent(AsyncOpenAI(http_client=...)), from openai.",
    "langchain_core": "Pass the chat model itself, without bound arguments or tools.",
}
"""The alternative for an unsupported object, by its library."""
