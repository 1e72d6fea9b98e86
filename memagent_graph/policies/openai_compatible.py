"""A policy behind an OpenAI-compatible server: vLLM, and whatever else speaks that API. The fast default.

This module builds the requests. `sending` sends them, `replies` decodes the replies, `server_errors` makes the errors
(`redaction` keeps keys and passwords out of them), and `served_models` chooses the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from memagent_graph.chat_markers import configured_markers
from memagent_graph.concurrency.background import PerLoop
from memagent_graph.errors import (
    PolicyError,
    PolicyRequestError,
    PolicyUnreachableError,
)
from memagent_graph.events import EventKind
from memagent_graph.policies.dialects import OPTIONAL_FIELDS, refused_field, sampling_notes
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policies.redaction import SecretRedaction
from memagent_graph.policies.replies import decode_completion
from memagent_graph.policies.sending import (
    MalformedReplyError,
    RedirectError,
    Sender,
    SharedPause,
    StatusError,
    Timeouts,
    certificates,
    proxy_for,
)
from memagent_graph.policies.served_models import choose_model, info_from_origin, is_vllm, model_entries
from memagent_graph.policies.server_errors import ServerErrors
from memagent_graph.policies.server_url import (
    NO_KEY,
    basic_authorization,
    check_url,
    checked_header,
    password,
    request_headers,
    without_password,
    without_query,
)
from memagent_graph.policy import Completion, Message, Messages, Note, SamplingParams, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_LIST_BYTES: Final = 16 * 2**20
"""In bytes: for what the server says of its models and of a tokenizer, and for the token ids of a prompt."""
_REPLY_BYTES: Final = 2**20
_BYTES_PER_TOKEN: Final = 4096
"""A token's text, bytes and log-prob take about 200; with the 20 most likely alternatives about 2,500."""
_BYTES_PER_PROMPT_BYTE: Final = 10
"""Each byte of a prompt may be a token, whose id the reply repeats."""
_MAX_REFUSED_SCHEMAS: Final = 256
"""Schemas that the server has refused and that are remembered, so that they are not sent with every request."""


class OpenAICompatiblePolicy:
    """Completions from `{base_url}/chat/completions`, or `/completions` for prompts that are token ids.

    Requests that can succeed later (connection errors, 408, 409, 429, 5xx, and replies that are damaged or too long)
    are retried `max_retries` times with growing pauses, or after the time in a `Retry-After` header, for which all
    requests wait; all others fail at once. A redirect to another server is an error that names it.

    Args:
        model: the model's name on the server; None means the only one that the server serves.
        base_url: the API's root, as in http://localhost:8000/v1; by default OPENAI_BASE_URL, or OpenAI's own. A user
            name and password in it (http://USER:PASSWORD@HOST/v1) are sent as basic authorization, in place of a key.
        api_key: by default OPENAI_API_KEY. A server without keys accepts any.
        max_concurrency: requests in flight at once, over all reads that share this policy.
        connect_timeout: seconds for the connection; also for the answer to "what do you serve?".
        read_timeout: seconds that one completion may take, and the longest that a `Retry-After` is waited for.
        max_retries: how often a failed request is sent again.
        extra_body: additional fields of every request, such as a server's own sampling options.
        policy_version: which weights the server runs, for the run log; servers do not report it. It may be changed
            while the policy is in use, for example when weights are swapped.
        max_reply_bytes: the longest reply that is accepted. By default 1 MiB, 4 KiB for each token that may be written,
            and 10 times the request, several times what any server needs.
        session_header: the header for `SamplingParams.session`, such as "X-Session-Id". A router in front of several
            replicas can use it to send all requests of a session to the same replica. By default it is not sent.
        default_headers: headers of every request, such as Azure's "api-key". They replace the policy's own headers.
        default_query: query parameters of every request, such as Azure's "api-version". They can also be part of
            `base_url`.
        ca_file: a file with the CA certificates (PEM) to check the server's certificate with, or an SSL context.
        proxy: the URL of the proxy. The default comes from HTTPS_PROXY and NO_PROXY.
        unsupported: request fields to leave out, because the server does not accept them: max_tokens
            (max_completion_tokens is sent then), temperature, top_p, seed, stop, logprobs, return_token_ids or
            response_format. Fields that the server names in a refusal are left out from then on, and the completions
            have a note about it.

    Raises:
        PolicyRequestError: `base_url` or `proxy` is not an address, a key or header cannot be sent, `session_header`
            is a header of the policy itself, the certificates cannot be read, or a field is unknown.
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
        max_reply_bytes: int | None = None,
        session_header: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, str] | None = None,
        ca_file: Path | str | ssl.SSLContext | None = None,
        proxy: str | None = None,
        unsupported: Collection[str] = (),
    ) -> None:
        url, query = without_query(base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1")
        key = (api_key or os.environ.get("OPENAI_API_KEY") or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise PolicyRequestError(
                "the API key has characters that cannot be in a request",
                hint="Does it contain a line break, or a typing error?",
            )
        self.base_url = without_password(url)
        self.max_concurrency = max_concurrency
        self.policy_version = policy_version
        self.unlisted: PolicyError | None = None
        """The error about the server's list of models, if the list cannot be read or lacks this model."""
        self._model = model
        self._headers = request_headers(basic_authorization(url), key, default_headers or {})
        self._query = urlencode({**query, **(default_query or {})})
        self._trust = None if ca_file is None else certificates(ca_file)
        self._proxy = proxy_for(self.base_url) if proxy is None else check_url(proxy)
        secrets = (
            key,
            password(url),
            password(self._proxy) if self._proxy else "",
            *self._headers.get("Authorization", "").split()[-1:],
            *(default_headers or {}).values(),
        )
        self.secrets = tuple(secret for secret in secrets if secret not in {"", NO_KEY})
        """Keys and passwords that no message may show."""
        self._redact = SecretRedaction(self.secrets)
        self._timeouts = Timeouts(connect=connect_timeout, read=read_timeout)
        self._max_retries = max_retries
        self._errors = ServerErrors(self.base_url, self._redact, self._timeouts, max_retries)
        self._extra_body = dict(extra_body or {})
        self._max_reply_bytes = max_reply_bytes
        self._pause = SharedPause()
        self._session_header = None if session_header is None else checked_header(session_header, self._headers)
        self._served: dict[str, Any] | None = None
        self._refused_schemas: set[str] = set()
        self._unsupported = set(unsupported)
        if unknown := self._unsupported.difference(OPTIONAL_FIELDS):
            names = ", ".join(OPTIONAL_FIELDS)
            raise PolicyRequestError(f"{min(unknown)!r} cannot be left out", hint=f"These fields can be: {names}.")
        self._connections = PerLoop(self._connect, Sender.close)

    @property
    def name(self) -> str:
        """The model's name on the server."""
        return self._model or "the served model"

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Write one completion, guided by `sampling.json_schema` if there is one and the server takes it.

        Raises:
            PolicyUnreachableError: no connection, or none in time.
            PolicyAuthenticationError: 401 or 403.
            PolicyRequestError: any other 4xx; the server's words are in the message.
            PolicyOverloadedError: 408, 409, 429 or 5xx after all retries.
            PolicyResponseError: a reply that is not a completion, or is too long, after all retries; or a redirect to
                another server.
        """
        as_messages = bool(prompt) and not isinstance(prompt[0], int)
        async with self._connections.get().slots:
            gives_ids = bool(sampling.logprobs) and is_vllm(await self.served_model())
            if self._model is None:
                await self.served_model()
            schema = sampling.json_schema if as_messages and self._takes_schema(sampling.json_schema) else None
            completion, retries = await self._complete_with_accepted_fields(prompt, sampling, gives_ids, schema)
        notes = completion.notes + self._notes(sampling, as_messages)
        return replace(completion, retries=retries, notes=notes) if retries or notes else completion

    async def _complete_with_accepted_fields(
        self, prompt: Messages | TokenIds, sampling: SamplingParams, gives_ids: bool, schema: str | None
    ) -> tuple[Completion, int]:
        """Return a completion and its retries. Fields that the server refuses are left out from then on."""
        learned: set[str] = set()
        refused_schema = None
        while True:
            try:
                reply = await self._complete_request(prompt, sampling, gives_ids, schema)
                break
            except PolicyRequestError as error:
                sent = {*self._body(sampling, gives_ids, schema), *(("logprobs",) if sampling.logprobs else ())}
                field = refused_field(error.server_message, sent - self._extra_body.keys())
                if field is not None and field not in self._unsupported:
                    log.info("%s does not take %s: %s", self.base_url, field, error.message)
                    learned.add(field)
                    self._unsupported.add(field)
                elif schema is not None and not learned & {"response_format"}:
                    # It may be the schema that the server does not take. If it is something else, this fails as well.
                    refused_schema, schema = schema, None
                    log.info("%s does not take the JSON schema: %s", self.base_url, error.message)
                else:
                    self._unsupported -= learned
                    raise
        if refused_schema is not None:
            if len(self._refused_schemas) >= _MAX_REFUSED_SCHEMAS:
                self._refused_schemas.clear()
            self._refused_schemas.add(refused_schema)
        return reply

    def _takes_schema(self, schema: str | None) -> bool:
        return schema not in self._refused_schemas and "response_format" not in self._unsupported

    def _notes(self, sampling: SamplingParams, as_messages: bool) -> tuple[Note, ...]:
        """Return a note for each requested option that the server does not take."""
        notes = sampling_notes(sampling, self._unsupported - {"max_tokens"})  # which has another name then
        if as_messages and sampling.json_schema is not None and not self._takes_schema(sampling.json_schema):
            detail = "the server did not accept the JSON schema; decoding was not guided"
            notes += ((EventKind.SCHEMA_REFUSED, detail),)
        return notes

    async def _complete_request(
        self, prompt: Messages | TokenIds, sampling: SamplingParams, gives_ids: bool, schema: str | None
    ) -> tuple[Completion, int]:
        """Return a completion, and the number of retries."""
        as_messages = bool(prompt) and not isinstance(prompt[0], int)
        # Nothing is awaited from here to the request, so name and version belong together; see `serve`.
        name, version = self.name, self.policy_version
        body = {**self._body(sampling, gives_ids, schema), ("messages" if as_messages else "prompt"): list(prompt)}
        if sampling.logprobs and "logprobs" not in self._unsupported:
            body["logprobs"] = True if as_messages else 0
        content = msgspec.json.encode(body)
        return await self._send(
            self._url("chat/completions" if as_messages else "completions"),
            content,
            partial(decode_completion, model=name, sampling=sampling, policy_version=version),
            max_bytes=self._max_reply_bytes
            or _REPLY_BYTES + _BYTES_PER_TOKEN * sampling.max_tokens + _BYTES_PER_PROMPT_BYTE * len(content),
            headers={self._session_header: sampling.session} if self._session_header and sampling.session else None,
        )

    def serve(self, model: str, policy_version: str) -> None:
        """From the next request on, use another model of the server, which has other weights, such as a new adapter.

        Requests that were sent keep the name and version that they were sent with.
        """
        self._model, self.policy_version, self._served = model, policy_version, None

    async def describe(self) -> ModelInfo:
        """Return what the server's model list says: the window, and for a folder or a hub id tokenizer and size."""
        served = await self.served_model()
        name, root = str(served.get("id", "")), str(served.get("root") or "")
        window = served.get("max_model_len")
        info = await asyncio.to_thread(info_from_origin, name, root, window if isinstance(window, int) else None)
        if not info.knows_control_tokens and is_vllm(served):
            with suppress(PolicyError):  # most servers do not report it; then all known families' tokens are escaped
                markers = configured_markers(await self._reply_outside_api("tokenizer_info"))
                info = replace(info, control_tokens=info.control_tokens | markers)
        return replace(info, gives_token_ids=is_vllm(served))

    async def served_model(self) -> dict[str, Any]:
        """Return the server's own entry for the model (asked once).

        Raises:
            PolicyRequestError: no model is named, and the server has none or several; the message names them.
            PolicyError: as for `complete`; with a named model, only if the server cannot be reached.
        """
        if self._served is None:
            try:
                models, _ = await self._send(
                    self._url("models"), None, model_entries, max_bytes=_MAX_LIST_BYTES, seconds=self._timeouts.connect
                )
                served = choose_model(models, self._model, self.base_url, self._redact)
            except PolicyUnreachableError:
                raise
            except PolicyError as error:
                if self._model is None:
                    raise
                # The server may take the model's name all the same: it is the judge.
                self.unlisted = error
                log.warning("%s; %s is asked for all the same", error.message, self._model)
                served = {"id": self._model}
            if not is_vllm(served):
                log.warning("%s gives no token ids with its replies, so its runs cannot be trained on", self.base_url)
            self._served = served
            self._model = self._model or str(served["id"])
        return self._served

    def _url(self, path: str) -> str:
        return f"{self.base_url.rstrip('/')}/{path}{'?' if self._query else ''}{self._query}"

    async def tokenize(self, messages: Sequence[Message]) -> list[int] | None:
        """Return the server's own token ids of a chat prompt; None if it has no `/tokenize` (only vLLM has).

        Raises:
            PolicyError: as for `complete`.
        """
        body = {"model": (await self.served_model())["id"], "messages": list(messages)}
        tokens = (await self._reply_outside_api("tokenize", body)).get("tokens")
        return tokens if isinstance(tokens, list) else None

    async def _reply_outside_api(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what vLLM returns at an address outside the API; empty if a server has no such address."""
        url = f"{self.base_url.rstrip('/').removesuffix('/v1')}/{path}"
        try:
            sent = None if body is None else msgspec.json.encode(body)
            content, _ = await self._send(url, sent, bytes, max_bytes=_MAX_LIST_BYTES)
            value = msgspec.json.decode(content)
        except (PolicyRequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @asynccontextmanager
    async def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send another client's request to the server once, unchanged; the reply can be read from the returned object.

        Args:
            method: the request's method.
            path: below `base_url`, without a slash at its beginning.
            body: sent byte by byte.
            headers: replace this policy's own headers of these names; the key is always the policy's.

        Raises:
            PolicyUnreachableError: no connection, or none in time; also while the reply is read.
            PolicyResponseError: whoever reads the reply found it malformed.
        """
        url = self._url(path)
        try:
            async with self._connections.get().relay(method, url, body, headers or {}) as reply:
                yield reply
        except (TimeoutError, aiohttp.ClientError, MalformedReplyError) as error:
            once, silence = replace(self._errors, max_retries=0), f" ({self._timeouts.read:g} s without a byte)"
            raise once.to_policy_error(error, url, silence, model=self._model, unlisted=self.unlisted) from None

    def with_fields(self, fields: Mapping[str, Any]) -> OpenAICompatiblePolicy:
        """Return the same policy, on the same connections, with further fields in every completion request."""
        other = copy(self)
        other._extra_body = {**self._extra_body, **fields}
        return other

    async def aclose(self) -> None:
        """Close the connections that belong to the running event loop."""
        await self._connections.aclose()

    def _body(self, sampling: SamplingParams, gives_ids: bool, schema: str | None) -> dict[str, Any]:
        """Return the fields of a request but its prompt, without those that the server does not take."""
        body: dict[str, Any] = {
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
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": msgspec.Raw(schema.encode())}
        if self._unsupported:
            if "max_tokens" in self._unsupported:
                body["max_completion_tokens"] = sampling.max_tokens
            body = {name: value for name, value in body.items() if name not in self._unsupported}
        return {"model": self._model, **body, **self._extra_body}

    async def _send(
        self,
        url: str,
        body: bytes | None,
        decode: Callable[[bytes], T],
        *,
        max_bytes: int,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[T, int]:
        """Return the decoded reply, and the number of retries; errors are those of `complete`."""
        try:
            return await self._connections.get().send(
                url, body, decode, max_bytes=max_bytes, seconds=seconds, headers=headers
            )
        except (StatusError, MalformedReplyError, RedirectError, TimeoutError, aiohttp.ClientError) as error:
            allowed = f" ({self._timeouts.read:g} s for a completion)" if seconds is None else ""
            raise self._errors.to_policy_error(error, url, allowed, model=self._model, unlisted=self.unlisted) from None

    def _connect(self) -> Sender:
        return Sender(
            self.base_url,
            self._headers,
            max_concurrency=self.max_concurrency,
            timeouts=self._timeouts,
            max_retries=self._max_retries,
            pause=self._pause,
            trust=self._trust,
            proxy=self._proxy,
        )
