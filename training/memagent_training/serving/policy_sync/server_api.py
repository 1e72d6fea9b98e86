"""Sends the requests that swap and probe a vLLM server's weights, and explains its errors.

Measured with vLLM 0.31. The endpoints exist only if the server was started for them: adapters need
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, all others VLLM_SERVER_DEV_MODE=1, which opens them to everyone who reaches the
port, with or without a key.
"""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import aiohttp
import msgspec

from memagent_training.training_errors import SyncError

_ADAPTER_REMEDY: Final = (
    "Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and the options `--enable-lora`, and"
    " `--max-lora-rank` where the rank exceeds 16 (VLLMServer: max_lora_rank=...)."
)
_DEV_REMEDY: Final = (
    "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment (VLLMServer: dev_mode=True), on a port that only"
    " you can reach."
)
REQUEST_SECONDS: Final = 300.0
"""The maximum time of one request; a request to pause ends when the requests in flight have ended."""
_CACHE_RETRY_SECONDS: Final = 0.1
"""The pause between two attempts to drop a prefix cache that requests use."""
_CACHE_TIMEOUT_SECONDS: Final = 10.0
"""The time after which such attempts end with an error."""


class UnreachableError(SyncError):
    """The server cannot be reached, or does not answer."""


class ServerTimeoutError(UnreachableError):
    """The server did not answer in time."""


class NotServedError(SyncError):
    """The server has no model of that name."""


@dataclass
class ServerAPI:
    """The administration endpoints of one server."""

    root_url: str
    """The server's address, without /v1."""
    api_key: str | None
    """The server's bearer token, if it needs one."""
    _: KW_ONLY
    trust_env: bool
    """Whether to use the environment's proxies."""

    async def request_context_window(self, model: str) -> int | None:
        """Return the context window of a served model, in tokens, if the server reports it.

        Raises:
            NotServedError: the server has no such model; the message lists the served ones.
        """
        entries = await self._list_models()
        for entry in entries:
            if entry.get("id") == model:
                window = entry.get("max_model_len")
                return window if isinstance(window, int) else None
        names = ", ".join(str(entry.get("id")) for entry in entries) or "nothing"
        raise NotServedError(
            f"{self.root_url} does not serve {model!r}; it serves {names}", hint="Choose one of these."
        )

    async def list_adapters(self, model: str) -> list[str]:
        """Return the names of a model's loaded adapters, oldest first."""
        return [str(entry.get("id")) for entry in await self._list_models() if entry.get("parent") == model]

    async def _list_models(self) -> list[dict[str, Any]]:
        reply = await self._request("GET", "/v1/models", remedy="Does the address end in /v1, and is it vLLM's?")
        return [entry for entry in reply.get("data") or () if isinstance(entry, dict)]

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a completion request."""
        return await self._request("POST", "/v1/completions", body, remedy="Check the server's log.")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. If one of that name is loaded, nothing happens, so a name must always mean one adapter."""
        try:
            body = {"lora_name": name, "lora_path": path}
            await self._request("POST", "/v1/load_lora_adapter", body, remedy=_ADAPTER_REMEDY)
        except SyncError as error:
            if "has already been loaded" in error.message:
                return
            if "No adapter found" in error.message:
                error.hint = f"The server must be able to read {path}, under the same path as this machine."
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests in flight that use it end."""
        await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, remedy=_ADAPTER_REMEDY)

    async def pause(self) -> None:
        """Wait until the requests in flight have ended, and make new ones wait."""
        await self._request("POST", "/pause?mode=wait", remedy=_DEV_REMEDY)

    async def resume(self) -> None:
        """End a pause."""
        await self._request("POST", "/resume", remedy=_DEV_REMEDY)

    async def reload_weights(self, path: str) -> None:
        """Replace the served weights by those from a folder. A failure leaves the server unusable."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._request("POST", "/collective_rpc", body, remedy=_DEV_REMEDY)

    async def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values, which older weights computed.

        Raises:
            SyncError: running requests still use the cache.
        """
        deadline = asyncio.get_running_loop().time() + _CACHE_TIMEOUT_SECONDS
        while True:
            reply = await self._request("POST", "/reset_prefix_cache", remedy=_DEV_REMEDY)
            if reply.get("success", True):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise SyncError(
                    "the server cannot drop its prefix cache while requests run", hint="Let the readers finish first."
                )
            await asyncio.sleep(_CACHE_RETRY_SECONDS)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, remedy: str
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=5.0)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=self.trust_env) as session,
                session.request(method, f"{self.root_url}{path}", json=body) as reply,
            ):
                content, status = await reply.read(), reply.status
        except (aiohttp.ClientError, ValueError) as error:  # includes a timeout of the connection
            raise UnreachableError(
                f"no connection to {self.root_url}: {error or type(error).__name__}",
                hint="Is the server running, and is this its address?",
            ) from error
        except TimeoutError as error:
            raise ServerTimeoutError(
                f"{self.root_url}{path} did not answer within {REQUEST_SECONDS:g} s",
                hint="Is the server overloaded? Let its readers finish.",
            ) from error
        if status < 300:
            return _decode(content)
        raise self._make_refusal(path.partition("?")[0], status, _extract_error_text(content), remedy)

    def _make_refusal(self, path: str, status: int, text: str | None, remedy: str) -> SyncError:
        if status in {401, 403}:
            return SyncError(f"{self.root_url} refused the key ({status})", hint="Pass the server's key (api_key).")
        if status in {404, 405} and text is None:  # from the router: a server's own 404 has a message
            return SyncError(f"{self.root_url} has no {path}", hint=remedy)
        text = text or "no message"
        error_class = NotServedError if status == 404 and "does not exist" in text else SyncError
        if "max_lora_rank" in text:
            remedy = "Start the server with a larger `--max-lora-rank` (VLLMServer: max_lora_rank=...)."
        return error_class(f"{self.root_url}{path} failed ({status}): {text}", hint=remedy)


def _decode(content: bytes) -> dict[str, Any]:
    try:
        reply = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # some error replies are plain text or empty
        return {}
    return reply if isinstance(reply, dict) else {}


def _extract_error_text(content: bytes) -> str | None:
    """Return the server's own message; None if only its router answered."""
    reply = _decode(content)
    error = reply.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or "")
    if error is not None:
        return str(error)
    if reply.get("detail") in {"Not Found", "Method Not Allowed"} or not content:
        return None
    return str(reply.get("detail") or content[:300].decode(errors="replace"))
