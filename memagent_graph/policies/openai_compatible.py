"""A policy on an OpenAI-compatible server, such as vLLM.

This module builds the requests. `sending` sends them, `replies` decodes the replies, `server_errors` builds the errors,
and `redaction` removes keys and passwords from them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from memagent_graph.chat_markers import find_config_markers
from memagent_graph.concurrency.background import PerLoop
from memagent_graph.errors import PolicyError, PolicyRequestError, PolicyUnreachableError, require_minimum
from memagent_graph.events import EventKind
from memagent_graph.policies.api_variants import (
    OPTIONAL_FIELDS,
    find_reason_of_refusal,
    find_refused_field,
    is_length_error,
    list_sampling_fields,
    make_sampling_notes,
)
from memagent_graph.policies.model_info import ModelInfo, find_model_info
from memagent_graph.policies.redaction import find_credentials, find_query_credentials, make_redactor
from memagent_graph.policies.replies import decode_completion, parse_model_entries
from memagent_graph.policies.sending import Sender, find_proxy, load_certificates
from memagent_graph.policies.server_errors import MalformedReplyError, Server
from memagent_graph.policies.server_url import (
    NO_KEY,
    extract_password,
    find_environment_key,
    make_request_headers,
    remove_password,
    require_unused_header,
    split_query,
)
from memagent_graph.policy import Completion, Messages, SamplingParams

log = logging.getLogger(__name__)

_MAX_LIST_BYTES: Final = 16 * 2**20
"""Maximum bytes of a list of models or of information about a tokenizer."""
_BASE_REPLY_BYTES: Final = 2**20
"""The allowance for a reply without its tokens and its prompt. The total limit is several times what servers need."""
_BYTES_PER_TOKEN: Final = 4096
"""The allowance for each token. Text, bytes and log-prob take about 200; with 20 alternatives about 2,500."""
_BYTES_PER_PROMPT_BYTE: Final = 10
"""The allowance for each byte of the prompt, which may be a token whose id the reply repeats."""


class OpenAICompatiblePolicy:
    """Completions from `{base_url}/chat/completions`.

    Requests that can succeed later (connection errors, 408, 409, 429, 5xx, and replies that are damaged or too long)
    are retried up to `max_retries` times with growing pauses. After a `Retry-After` header, all requests wait for that
    time. Other errors are not retried. A redirect to another server is an error that names the server.

    Args:
        model: the model's name on the server. None means the only model of the server.
        base_url: the root of the API, such as http://localhost:8000/v1. The default is OPENAI_BASE_URL, or OpenAI. A
            user name and password in it (http://USER:PASSWORD@HOST/v1) are sent as basic authorization, not as a key.
        api_key: the key, by default OPENAI_API_KEY, unless `default_headers` have an api-key or authorization. A server
            without keys accepts any value.
        max_concurrency: the maximum number of requests in flight, of all reads that share this policy.
        connect_timeout: seconds for a connection, and for the list of models and other information about them.
        read_timeout: seconds for one completion, and the maximum for a `Retry-After`.
        max_retries: the maximum number of retries of a request.
        extra_body: additional fields of every request, such as a server's own sampling options.
        policy_version: a name for the server's weights in the run log, because servers do not report one. It may be
            changed while the policy is in use, for example when weights are swapped.
        session_header: the header for `SamplingParams.session`, such as "X-Session-Id". A router in front of several
            replicas can use it to send all requests of a session to the same replica. By default it is not sent.
        default_headers: headers of every request, such as Azure's "api-key". They replace the policy's own headers.
        default_query: query parameters of every request, such as Azure's "api-version". They can also be part of
            `base_url`.
        ca_file: a file with the CA certificates (PEM) that verify the server's certificate, or an SSL context.
        proxy: the URL of the proxy. The default comes from HTTPS_PROXY and NO_PROXY.
        unsupported: request fields to leave out, because the server does not accept them: max_tokens
            (max_completion_tokens is sent then), temperature, top_p, seed, stop, logprobs, return_token_ids or
            response_format. Fields that the server names in a refusal are left out from then on, and the completions
            have a note about it.

    Raises:
        MemAgentError: `max_concurrency` is below 1, or `max_retries` below 0.
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
        session_header: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, str] | None = None,
        ca_file: Path | str | ssl.SSLContext | None = None,
        proxy: str | None = None,
        unsupported: Collection[str] = (),
    ) -> None:
        require_minimum(1, max_concurrency=max_concurrency)
        require_minimum(0, max_retries=max_retries)
        url, query = split_query(base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1")
        key = (api_key or find_environment_key(default_headers or ())).strip()
        self.base_url = remove_password(url)
        self.policy_version = policy_version
        self.model_list_error: PolicyError | None = None
        """The error if the server's list of models cannot be read or lacks this model."""
        self._model = model
        headers = make_request_headers(url, key, default_headers or {})
        parameters = {**query, **(default_query or {})}
        self._query = urlencode(parameters)
        proxy = find_proxy(self.base_url) if proxy is None else proxy
        secrets = (
            key,
            extract_password(url),
            "" if proxy is None else extract_password(proxy),
            *find_credentials(headers),
            *(default_headers or {}).values(),
            *find_query_credentials(parameters),
        )
        self.secrets = tuple(secret for secret in secrets if secret not in {"", NO_KEY})
        """Keys and passwords, which must not appear in any message."""
        self._server = Server(
            self.base_url,
            make_redactor(self.secrets),
            connect_timeout,
            read_timeout,
            max_retries,
            max_concurrency,
            headers,
            proxy,
            None if ca_file is None else load_certificates(ca_file),
        )
        self._connections = PerLoop(partial(Sender, self._server), Sender.close)
        self._extra_body = dict(extra_body or {})
        self._session_header = None if session_header is None else require_unused_header(session_header, headers)
        self._model_entry: dict[str, Any] | None = None
        self._unsupported = set(unsupported)
        if unknown_fields := self._unsupported.difference(OPTIONAL_FIELDS):
            raise PolicyRequestError(
                f"{min(unknown_fields)!r} cannot be left out",
                hint=f"These fields can be: {', '.join(OPTIONAL_FIELDS)}.",
            )

    @property
    def name(self) -> str:
        """The model's name on the server."""
        return self._model or "the served model"

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return one completion, guided by `sampling.json_schema` if the server accepts it.

        Fields that the server refuses are left out from then on.

        Raises:
            PolicyUnreachableError: the server cannot be reached in time.
            PolicyAuthenticationError: the server answered 401 or 403.
            PolicyRequestError: the server answered another 4xx. Its message is included.
            PolicyOverloadedError: the server still answered 408, 409, 429 or 5xx after all retries.
            PolicyResponseError: after all retries, the reply was still not a completion or too long; or the server
                redirects to another one.
        """
        async with self._connections.get().slots:
            is_vllm = (sampling.logprobs or self._model is None) and _is_vllm(await self.find_served_model())
            refused_fields: set[str] = set()
            requested_schema = schema = sampling.json_schema
            while True:
                if "response_format" in self._unsupported:
                    schema = None
                body = self._make_body(prompt, sampling, is_vllm and bool(sampling.logprobs), schema)
                try:
                    completion, retries = await self._send(body, sampling)
                except PolicyRequestError as error:
                    if (reason := find_reason_of_refusal(error.server_message)) is not None:
                        return Completion("", reason, self.name, policy_version=self.policy_version)
                    field = find_refused_field(error.server_message, body.keys() - self._extra_body.keys())
                    if field is not None:
                        log.info("%s does not accept %s: %s", self.base_url, field, error.message)
                        refused_fields.add(field)
                        self._unsupported.add(field)
                    elif schema is not None:
                        # The server may have refused the schema. If not, the next request fails, too.
                        schema = None
                        log.info("%s does not accept the JSON schema: %s", self.base_url, error.message)
                    else:
                        self._unsupported -= refused_fields
                        message, list_error = error.server_message, self.model_list_error
                        if list_error and self.name in message and not is_length_error(message):
                            error.hint = f"{list_error.message}."
                            error.served_model = getattr(list_error, "served_model", "")
                        raise
                    continue
                options = self._unsupported - {"max_tokens"}  # max_completion_tokens was sent in its place
                notes = completion.notes + make_sampling_notes(sampling, options)
                if schema != requested_schema:
                    detail = "the server did not accept the JSON schema; decoding was not guided"
                    notes += ((EventKind.SCHEMA_REFUSED, detail),)
                return replace(completion, retries=retries, notes=notes) if retries or notes else completion

    async def _send(self, body: Mapping[str, Any], sampling: SamplingParams) -> tuple[Completion, int]:
        """Return the completion for the body of a request, and the number of retries."""
        # There is no await between making the body and this line, so the model and the version belong together.
        decode = partial(decode_completion, model=self.name, sampling=sampling, policy_version=self.policy_version)
        content = msgspec.json.encode(body)
        token_bytes = _BYTES_PER_TOKEN * sampling.max_tokens + _BYTES_PER_PROMPT_BYTE * len(content)
        return await self._connections.get().send(
            self._make_url("chat/completions"),
            content,
            decode,
            max_bytes=_BASE_REPLY_BYTES + token_bytes,
            headers={self._session_header: sampling.session} if self._session_header and sampling.session else None,
        )

    def switch_model(self, model: str, policy_version: str) -> None:
        """Use another model of the server from the next request on, such as a new adapter.

        Pending requests keep their model and version.
        """
        self._model, self.policy_version, self._model_entry = model, policy_version, None

    async def describe(self) -> ModelInfo:
        """Return information from the server's list of models: the window; with an origin, tokenizer and size."""
        entry = await self.find_served_model()
        name, root = entry["id"], str(entry.get("root") or "")
        window = entry.get("max_model_len")
        info = await asyncio.to_thread(find_model_info, name, root, window if isinstance(window, int) else None)
        if not info.knows_control_tokens and _is_vllm(entry):
            # Most servers do not report their control tokens. Then those of all known families are escaped.
            url = f"{self.base_url.rstrip('/').removesuffix('/v1')}/tokenizer_info"
            with suppress(PolicyError, ValueError, RecursionError):
                content, _ = await self._connections.get().send(url, None, bytes, max_bytes=_MAX_LIST_BYTES)
                markers = find_config_markers(msgspec.json.decode(content, type=dict[str, Any]))
                info = replace(info, control_tokens=info.control_tokens | markers)
        return replace(info, gives_token_ids=_is_vllm(entry))

    async def find_served_model(self) -> dict[str, Any]:
        """Return the entry of the model in the server's list, cached.

        Raises:
            PolicyRequestError: no model is named, and the server has none or several.
            PolicyError: as for `complete`; if the model is named, only if the server cannot be reached.
        """
        if self._model_entry is None:
            try:
                connection = self._connections.get()
                models, _ = await connection.send(
                    self._make_url("models"), None, parse_model_entries, max_bytes=_MAX_LIST_BYTES
                )
                entry = _choose_model(models, self._model, self._server)
            except PolicyError as error:
                # A gateway has no server, or the server loads its model: the window is not known yet.
                is_down = isinstance(error, PolicyUnreachableError) or getattr(error, "status", 0) in {502, 503, 504}
                if self._model is None or is_down:
                    raise
                # The server may still accept the name.
                self.model_list_error = error
                log.warning("%s; requesting %s anyway", error.message, self._model)
                entry = {"id": self._model}
            if not _is_vllm(entry):
                log.warning("%s gives no token ids with its replies, so its runs cannot be trained on", self.base_url)
            self._model_entry = entry
            self._model = self._model or entry["id"]
        return self._model_entry

    def _make_url(self, path: str) -> str:
        return f"{self.base_url.rstrip('/')}/{path}{'?' if self._query else ''}{self._query}"

    @asynccontextmanager
    async def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request of another client once, unchanged, and return the reply as a stream of bytes.

        The reply is not decompressed. The time-out applies to the next byte, not to the whole reply.

        Args:
            method: the HTTP method.
            path: the path below `base_url`, without a leading slash.
            body: the body, which is sent unchanged.
            headers: headers that replace this policy's headers, except for the key.

        Raises:
            PolicyUnreachableError: no connection in time, or it broke while the reply was read.
            PolicyResponseError: the reader of the reply found it malformed.
        """
        server = replace(self._server, max_retries=0)
        timeout = aiohttp.ClientTimeout(sock_connect=server.connect_timeout, sock_read=server.read_timeout)
        try:
            async with self._connections.get().session.request(
                method,
                self._make_url(path),
                data=body,
                headers={**(headers or {}), "Accept-Encoding": "identity"},  # the body is passed on unchanged
                timeout=timeout,
                allow_redirects=False,
                auto_decompress=False,
            ) as reply:
                yield reply
        except (TimeoutError, aiohttp.ClientError, MalformedReplyError) as error:
            raise server.make_error(error, f" ({server.read_timeout:g} s without a byte)") from None

    def with_fields(self, fields: Mapping[str, Any]) -> OpenAICompatiblePolicy:
        """Return a copy of this policy with further fields in every completion request. It shares the connections."""
        policy = copy(self)
        policy._extra_body = {**self._extra_body, **fields}
        return policy

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._connections.aclose()

    def _make_body(
        self, prompt: Messages, sampling: SamplingParams, with_token_ids: bool, schema: str | None
    ) -> dict[str, Any]:
        """Return the body of a request, without unsupported fields."""
        body = list_sampling_fields(sampling)
        if with_token_ids:
            body["return_token_ids"] = True
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": msgspec.Raw(schema.encode())}
        if "max_tokens" in self._unsupported:
            body["max_completion_tokens"] = sampling.max_tokens
        body = {name: value for name, value in body.items() if name not in self._unsupported}
        body = {"model": self._model, **body, **self._extra_body, "messages": list(prompt)}
        if sampling.logprobs and "logprobs" not in self._unsupported:
            body["logprobs"] = True
        return body


def _choose_model(models: Sequence[Mapping[str, Any]], name: str | None, server: Server) -> dict[str, Any]:
    """Return the entry of the model with this name, or of the only model.

    Raises:
        PolicyRequestError: there is no model with this name; or no name is given, and there is not exactly one model.
    """
    base_models = [model for model in models if not model.get("parent")]
    if name is None and len(base_models) == 1:
        return dict(base_models[0])
    for model in models:
        if model["id"] in {name, f"{name}:latest", f"models/{name}"}:  # as Ollama and Gemini write names
            # An adapter has the window and tokenizer of its base, but its entry lacks them.
            base = next((base for base in base_models if base["id"] == str(model.get("parent") or "")), {})
            return {**model, "id": name, **{field: base[field] for field in ("root", "max_model_len") if field in base}}
    names = [model["id"] for model in models]
    listed_names = server.redact(", ".join(names[:10]) + (", ..." if len(names) > 10 else ""))
    if name is None:
        raise PolicyRequestError(
            f"{server.base_url} serves {listed_names or 'no model'}", hint="Choose one with --model."
        )
    error = PolicyRequestError(
        f"{server.base_url} does not serve {name!r}; it serves {listed_names or 'nothing'}",
        hint="Choose one of these with --model.",
    )
    error.served_model = listed_names if len(names) == 1 else "NAME"
    raise error


def _is_vllm(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a list of models comes from vLLM."""
    return entry.get("owned_by") == "vllm"
