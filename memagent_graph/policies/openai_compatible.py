"""A policy behind an OpenAI-compatible server: vLLM, and whatever else speaks that API. The fast default.

The `openai` client gives address, key and headers, and asks what is served. Completions, which are nearly all of the
traffic, are sent and decoded here: see `sending` and `replies`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import msgspec
import openai

from memagent_graph.concurrency.background import PerLoop
from memagent_graph.errors import (
    MemAgentError,
    MissingExtraError,
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyResponseError,
    PolicyUnreachableError,
)
from memagent_graph.policies.flops import ModelShape
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policies.profile import load_profile
from memagent_graph.policies.replies import decode_completion
from memagent_graph.policies.sending import Sender, StatusError, Timeouts
from memagent_graph.policies.server_url import checked_url
from memagent_graph.policy import Completion, Message, Messages, SamplingParams, TokenIds
from memagent_graph.tokenizers import Tokenizer, load_tokenizer


class OpenAICompatiblePolicy:
    """Completions from `{base_url}/chat/completions`, or `/completions` for prompts that are token ids.

    Requests that a repetition can help (connection errors, 408, 409, 429 and 5xx) are repeated `max_retries` times
    with growing pauses, or after the time that a `Retry-After` header asks for; all others fail at once.

    Args:
        model: the model's name on the server; None takes the one that the server serves, if it is only one.
        base_url: the API's root, as in http://localhost:8000/v1; by default OPENAI_BASE_URL, or OpenAI's own.
        api_key: by default OPENAI_API_KEY. A server without keys takes any.
        max_concurrency: requests in flight at once, over all reads that share this policy.
        connect_timeout: seconds for the connection; also for the answer to "what do you serve?".
        read_timeout: seconds that one completion may take, and the longest that a `Retry-After` is waited for.
        max_retries: how often a failed request is sent again.
        extra_body: further fields of every request, such as a server's own sampling options.
        policy_version: which weights the server runs, for the run log; servers do not tell. It may be changed while
            the policy is in use, as when weights are swapped.

    Raises:
        PolicyRequestError: `base_url` is not an address.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 128,
        connect_timeout: float = 5.0,
        read_timeout: float = 300.0,
        max_retries: int = 4,
        extra_body: Mapping[str, Any] | None = None,
        policy_version: str = "",
    ) -> None:
        self.base_url = checked_url(base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1")
        self.max_concurrency = max_concurrency
        self.policy_version = policy_version
        self._model = model
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._timeouts = Timeouts(connect=connect_timeout, read=read_timeout)
        self._max_retries = max_retries
        self._extra_body = dict(extra_body or {})
        self._served: dict[str, Any] | None = None
        self._connections = PerLoop(self._connect)

    @property
    def name(self) -> str:
        """The model's name on the server."""
        return self._model or "the served model"

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Write one completion.

        Raises:
            PolicyUnreachableError: no connection, or none in time.
            PolicyAuthenticationError: 401 or 403.
            PolicyRequestError: any other 4xx; the server's words are in the message.
            PolicyOverloadedError: 429 or 5xx after all retries.
            PolicyResponseError: an answer that is not a completion.
        """
        as_messages = bool(prompt) and not isinstance(prompt[0], int)
        connection = self._connections.get()
        async with connection.slots:
            gives_ids = bool(sampling.logprobs) and _is_vllm(await self.served_model())
            if self._model is None:
                await self.served_model()
            # From here to the request nothing waits, so that name and version belong together; see `serve`.
            name, version = self.name, self.policy_version
            body = {**self._body(sampling, gives_ids), ("messages" if as_messages else "prompt"): list(prompt)}
            if sampling.logprobs:
                body["logprobs"] = True if as_messages else 0
            url = f"{self.base_url.rstrip('/')}/{'chat/completions' if as_messages else 'completions'}"
            content, retries = await self._post(connection, url, body)
        try:
            return decode_completion(content, model=name, retries=retries, policy_version=version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._garbage(f"{content[:200]!r} ({error})") from error

    def serve(self, model: str, policy_version: str) -> None:
        """From the next request on, ask for another model of the server, which has other weights: a new adapter, say.

        Requests that were sent keep the name and version that they were sent with.
        """
        self._model, self.policy_version, self._served = model, policy_version, None

    async def describe(self) -> ModelInfo:
        """What the server's model list says: window, and, where it names a folder or a hub id, tokenizer and size."""
        served = await self.served_model()
        name, root = str(served.get("id", "")), str(served.get("root") or "")
        window = served.get("max_model_len")
        info = await asyncio.to_thread(_told_by_origin, name, root, window if isinstance(window, int) else None)
        return replace(info, gives_token_ids=_is_vllm(served))

    async def served_model(self) -> dict[str, Any]:
        """The server's own entry for the model (asked once).

        Raises:
            PolicyRequestError: the model is not among those served; the message names them.
            PolicyError: as for `complete`.
        """
        if self._served is None:
            client = self._connections.get().client.with_options(timeout=self._timeouts.connect)
            try:
                reply = await client.get("/models", cast_to=httpx2.Response)
            except openai.OpenAIError as error:
                raise self._error(error) from error
            self._served = self._choose_model(reply.content)
            self._model = str(self._served["id"])
        return self._served

    async def tokenize(self, messages: Sequence[Message]) -> list[int] | None:
        """The server's own token ids of a chat prompt, or None where it has no `/tokenize` (only vLLM has).

        Raises:
            PolicyError: as for `complete`.
        """
        root = self.base_url.rstrip("/").removesuffix("/v1")
        body = {"model": (await self.served_model())["id"], "messages": list(messages)}
        try:
            reply = await self._connections.get().client.post(f"{root}/tokenize", body=body, cast_to=httpx2.Response)
            tokens = msgspec.json.decode(reply.content).get("tokens")
        except (openai.NotFoundError, openai.BadRequestError, msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            return None
        except openai.OpenAIError as error:
            raise self._error(error) from error
        return tokens if isinstance(tokens, list) else None

    def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send somebody else's request to the server, once and as it is; its reply is read from what this gives.

        Args:
            method: the request's method.
            path: below `base_url`, without a slash at its beginning.
            body: sent byte by byte.
            headers: in the place of this policy's own of these names; its key is always its own.

        Raises:
            PolicyUnreachableError: no connection, or none in time; also while the reply is read.
        """
        return self._relayed(method, f"{self.base_url.rstrip('/')}/{path}", body, headers or {})

    @asynccontextmanager
    async def _relayed(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._connections.get().sender.relay(method, url, body, headers) as reply:
                yield reply
        except TimeoutError as error:
            raise self._silence(error, f" ({self._timeouts.read:g} s without a byte)") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def with_fields(self, fields: Mapping[str, Any]) -> OpenAICompatiblePolicy:
        """The same policy, on the same connections, with further fields in every completion request."""
        other = copy(self)
        other._extra_body = {**self._extra_body, **fields}
        return other

    async def aclose(self) -> None:
        """Close the connections that belong to the running event loop."""
        if connection := self._connections.pop():
            await connection.close()

    def _body(self, sampling: SamplingParams, gives_ids: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if gives_ids:
            body["return_token_ids"] = True
        return {**body, **self._extra_body}

    async def _post(self, connection: _Connection, url: str, body: dict[str, Any]) -> tuple[bytes, int]:
        """The reply's body, and how many times the request was sent again."""
        try:
            return await connection.sender.post(url, msgspec.json.encode(body))
        except StatusError as error:
            raise self._refusal(error.status, _words(error.content), error.wait) from error
        except TimeoutError as error:
            raise self._silence(error, f" ({self._timeouts.read:g} s for a completion)") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def _choose_model(self, content: bytes) -> dict[str, Any]:
        try:
            models: list[dict[str, Any]] = [
                {**model, "id": model["id"]} for model in msgspec.json.decode(content)["data"]
            ]
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise self._garbage(f"{content[:200]!r}") from error
        names = [model["id"] for model in models]
        bases = [model for model in models if not model.get("parent")]
        if self._model is None and len(bases) == 1:
            return bases[0]
        for model in models:
            if model["id"] == self._model:  # an adapter has its base's window and tokenizer, and states neither
                base = next((each for each in bases if each["id"] == model.get("parent")), {})
                return {**model, **{name: base[name] for name in ("root", "max_model_len") if name in base}}
        shown = ", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else "")
        if self._model is None:
            raise PolicyRequestError(f"{self.base_url} serves {shown or 'no model'}", hint="Name one with --model.")
        raise PolicyRequestError(
            f"{self.base_url} does not serve {self._model!r}; it serves {shown or 'nothing'}",
            hint="Name one of these with --model.",
        )

    def _error(self, error: openai.OpenAIError) -> PolicyError:
        """A failure of the `openai` client in this package's words."""
        if isinstance(error, openai.APITimeoutError):
            return self._silence(error)
        if isinstance(error, openai.APIConnectionError):
            return self._unreachable(error)
        if isinstance(error, openai.APIStatusError):
            return self._refusal(error.status_code, _words(error.response.content))
        return PolicyError(f"{self.base_url}: {error}")

    def _unreachable(self, error: Exception) -> PolicyUnreachableError:
        return PolicyUnreachableError(
            f"no connection to {self.base_url}: {_root_cause(error)}",
            hint="Is the server running? Check --base-url with `memagent doctor`.",
        )

    def _silence(self, error: Exception, allowed: str = "") -> PolicyUnreachableError:
        if isinstance(_root_cause(error), aiohttp.ConnectionTimeoutError | httpx2.ConnectTimeout):
            return self._unreachable(TimeoutError(f"none within {self._timeouts.connect:g} s"))
        return PolicyUnreachableError(
            f"{self.base_url} did not answer in time{allowed}",
            hint="Is it overloaded? Raise --timeout, or lower --concurrency.",
        )

    def _refusal(self, status: int, words: str, wait: float | None = None) -> PolicyError:
        where = self.base_url
        if status in {401, 403}:
            return PolicyAuthenticationError(
                f"{where} refused the key ({status}): {words}", hint="Set OPENAI_API_KEY, or --api-key."
            )
        if status == 429 or status >= 500:
            tried = f"still answered {status} after {self._max_retries} retries"
            if wait is not None and wait > self._timeouts.read:
                tried = f"answered {status} and asks to be left alone for {wait:.0f} s"
            return PolicyOverloadedError(
                f"{where} {tried}: {words}",
                hint="Wait, or lower the number of requests in flight (--concurrency), then resume.",
            )
        if status == 404 and self._model and self._model in words:
            hint = "`memagent doctor` lists what is served."
        else:
            hint = "If it speaks of length, lower --chunk-tokens; `memagent doctor` shows the server's window."
        return PolicyRequestError(f"{where} refused the request ({status}): {words}", hint=hint)

    def _garbage(self, excerpt: str) -> PolicyResponseError:
        return PolicyResponseError(
            f"{self.base_url} answered with something that is no completion: {excerpt}",
            hint="Is this an OpenAI-compatible API? --base-url usually ends in /v1.",
        )

    def _connect(self) -> _Connection:
        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._api_key,
            timeout=httpx2.Timeout(self._timeouts.read, connect=self._timeouts.connect),
            max_retries=self._max_retries,
        )
        sender = Sender(
            self.base_url,
            # The client marks headers that it leaves out by objects that are no text.
            {k: v for k, v in (*client.auth_headers.items(), *client.default_headers.items()) if isinstance(v, str)},
            connections=self.max_concurrency,
            timeouts=self._timeouts,
            max_retries=self._max_retries,
        )
        return _Connection(client, sender, asyncio.Semaphore(self.max_concurrency))


@dataclass(frozen=True)
class _Connection:
    """One event loop's clients and its bound on requests in flight."""

    client: openai.AsyncOpenAI
    sender: Sender
    slots: asyncio.Semaphore

    async def close(self) -> None:
        await self.client.close()
        await self.sender.close()


def _is_vllm(served: Mapping[str, Any]) -> bool:
    return served.get("owned_by") == "vllm"


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _words(content: bytes) -> str:
    """What the server said, without the wrapping of its JSON."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        body = msgspec.json.decode(content)
        if isinstance(body, dict):
            inner = body.get("error", body)
            if message := inner.get("message") if isinstance(inner, dict) else inner:
                return str(message)
    return content[:500].decode(errors="replace") or "no words"


def _told_by_origin(name: str, root: str, window: int | None) -> ModelInfo:
    """What the model's name and its origin (a folder on this machine, or a hub id) lead to."""
    folder = Path(root or name)
    local = folder.is_dir()
    tokenizer, missing = _tokenizer_named(name, root)
    return ModelInfo(
        context_window=window,
        tokenizer=tokenizer,
        missing=missing,
        shape=ModelShape.from_config(folder) if local else None,
        profile=load_profile(folder) if local else None,
    )


def _tokenizer_named(model: str, root: str) -> tuple[Tokenizer | None, MissingExtraError | None]:
    """The tokenizer that the model's name or origin leads to, if any; or what has to be installed for it."""
    missing = None
    for spec in dict.fromkeys(filter(None, (root, model))):
        try:
            return load_tokenizer(spec), None
        except MissingExtraError as error:
            missing = missing or error
        except MemAgentError:
            continue
    return None, missing
