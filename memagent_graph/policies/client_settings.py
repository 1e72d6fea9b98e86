"""Takes over the settings of a client of the `openai` package, which need not be imported for that."""

from __future__ import annotations

from base64 import b64decode
from typing import Any, Final
from urllib.parse import quote

from memagent_graph.errors import PolicyRequestError

_CLASSES: Final = frozenset({"OpenAI", "AsyncOpenAI"})


def is_openai_client(value: object) -> bool:
    """Whether a value is a client of the `openai` package, also one for Azure."""
    return any(
        kind.__module__.partition(".")[0] == "openai" and kind.__name__ in _CLASSES for kind in type(value).__mro__
    )


def client_settings(client: Any, model: str | None) -> dict[str, Any]:
    """Return a client's settings as arguments of an `OpenAICompatiblePolicy`.

    Raises:
        PolicyRequestError: its key comes from a function, or it is Azure's and names no deployment.
    """
    if getattr(client, "_api_key_provider", None) or getattr(client, "_azure_ad_token_provider", None):
        raise PolicyRequestError(
            "the client's key comes from a function, which only the client itself calls",
            hint="Make the client with a key (api_key=... or azure_ad_token=...), or use MemAgent(ChatOpenAI(...)) or "
            "MemAgent(AzureChatOpenAI(...)).",
        )
    base_url = str(client.base_url).rstrip("/")
    names = {"OpenAI-Organization": client.organization, "OpenAI-Project": client.project}
    headers = {**{name: value for name, value in names.items() if value}, **client._custom_headers}
    settings: dict[str, Any] = {"api_key": client.api_key}
    if hasattr(client, "_azure_deployment"):
        if "/deployments/" not in base_url:
            if model is None:
                raise PolicyRequestError(
                    "the client is Azure's, and its deployment is not named",
                    hint='Name it: MemAgent(client, model="DEPLOYMENT").',
                )
            base_url = f"{base_url}/deployments/{model}"
        token = getattr(client, "_azure_ad_token", None)
        settings = {"api_key": token} if token else {"api_key": None}
        headers |= {} if token else {"api-key": client.api_key}
    settings |= {
        "base_url": base_url,
        "default_headers": {name: str(value) for name, value in headers.items() if isinstance(value, str)},
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
        secret = dict(getattr(pool, "_proxy_headers", ())).get(b"Proxy-Authorization", b"").removeprefix(b"Basic ")
        user = "".join(f"{quote(part, '')}:" for part in b64decode(secret).decode().split(":", 1))[:-1]
        host = f"{url.host.decode()}:{url.port}" if url.port else url.host.decode()
        settings["proxy"] = f"{url.scheme.decode()}://{user}{'@' if user else ''}{host}"
    if context := getattr(pool, "_ssl_context", None):
        settings["ca_file"] = context
    return settings
