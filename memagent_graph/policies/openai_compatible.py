"""A policy behind an OpenAI-compatible server: vLLM, and whatever else speaks that API. The fast default.

How requests are sent stands in `sending`, how replies are decoded in `replies`. Here is what is asked, and what each
failure is called; `redaction` keeps keys and passwords out of that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from memagent_graph.chat_markers import configured_markers, folder_markers
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
from memagent_graph.events import EventKind
from memagent_graph.policies.client_settings import client_settings
from memagent_graph.policies.dialects import sampling_notes
from memagent_graph.policies.flops import ModelShape
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policies.profile import load_profile
from memagent_graph.policies.rate_limiter import RateLimiter
from memagent_graph.policies.redaction import SecretRedaction
from memagent_graph.policies.refusals import OPTIONAL_FIELDS, refused_field, speaks_of_length
from memagent_graph.policies.replies import decode_completion
from memagent_graph.policies.sending import (
    BrokenOffError,
    MalformedReplyError,
    OverlongReplyError,
    RedirectError,
    Sender,
    StatusError,
    Timeouts,
    proxy_for,
)
from memagent_graph.policies.server_url import (
    NO_KEY,
    basic_authorization,
    checked_url,
    password,
    without_password,
    without_query,
)
from memagent_graph.policy import Completion, Message, Messages, Note, SamplingParams, TokenIds
from memagent_graph.tokenizers import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
_LARGEST_LIST: Final = 16 * 2**20
"""In bytes: for what the server says of its models and of a tokenizer, and for the token ids of a prompt."""
_REPLY_BYTES: Final = 2**20
_BYTES_PER_TOKEN: Final = 4096
"""A token's text, bytes and log-prob take about 200; with the 20 most likely alternatives about 2,500."""
_BYTES_PER_PROMPT_BYTE: Final = 10
"""Each byte of a prompt may be a token, whose id the reply repeats."""
_MOST_REFUSED: Final = 256
"""Schemas that the server has refused and that are remembered, so that they are not sent with every request."""
_SHOWN: Final = 500
"""Characters of what a server said, in an error."""


_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class OpenAICompatiblePolicy:
    """Completions from `{base_url}/chat/completions`, or `/completions` for prompts that are token ids.

    Requests that can succeed later (connection errors, 408, 409, 429, 5xx, and replies that are damaged or too long)
    are retried `max_retries` times with growing pauses, or after the time in a `Retry-After` header; all others fail at
    once. A redirect to another server is an error that names it.

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
        limiter: bounds requests and tokens a minute, over all that share it. Without it there is no such bound, but a
            `Retry-After` that one request gets holds all of them.
        session_header: the header in which `SamplingParams.session` is sent, for a router in front of several replicas
            that keeps requests of one session on one of them, such as "X-Session-Id"; without it, it is not sent.
        default_headers: headers of every request, such as Azure's "api-key"; they replace the policy's own.
        default_query: what follows the question mark in every request, such as Azure's "api-version"; it may also be
            written at the end of `base_url`.
        ca_file: certificates (PEM) that the server's must be signed by, in place of the usual ones; or a context.
        proxy: the address of the proxy; by default what the environment names (HTTPS_PROXY, NO_PROXY).
        unsupported: fields that the server does not take, among max_tokens (max_completion_tokens is sent then),
            temperature, top_p, seed, stop, logprobs, return_token_ids and response_format. They are left out. Those
            that a refusal names are found out, and left out from then on; completions say so in their notes.

    Raises:
        PolicyRequestError: `base_url` or `proxy` is not an address, a key or header cannot be sent, `session_header`
            is one that the policy itself sends, the file of certificates cannot be read, or a field is unknown.
    """

    @classmethod
    def from_client(cls, client: Any, model: str | None = None, **options: Any) -> OpenAICompatiblePolicy:
        """Return a policy with the settings of an `openai` client, which sends the requests itself no longer.

        Address, key, organisation, project, default headers and query, timeout, retries, certificates and proxy are
        taken over, also those of Azure; a transport or hooks of its own are not.

        Args:
            client: an `OpenAI`, `AsyncOpenAI`, `AzureOpenAI` or `AsyncAzureOpenAI`.
            model: as for the policy.
            **options: the policy's other arguments, in place of what the client says.

        Raises:
            PolicyRequestError: the client's key comes from a function, or one of its settings cannot be used.
        """
        return cls(**{**client_settings(client, model), "model": model, **options})

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
        limiter: RateLimiter | None = None,
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
        self.model_note = ""
        """What is odd about the server's list of models; empty as long as nothing is."""
        self._model = model
        self._headers = _headers(basic_authorization(url), key, default_headers or {})
        self._query = urlencode({**query, **(default_query or {})})
        self._trust = None if ca_file is None else _trust(ca_file)
        self._proxy = proxy_for(self.base_url) if proxy is None else checked_url(proxy)
        secrets = (
            key,
            password(url),
            password(self._proxy) if self._proxy else "",
            *self._headers.get("Authorization", "").split()[-1:],
            *(default_headers or {}).values(),
        )
        self.secrets = tuple(secret for secret in secrets if secret not in {"", NO_KEY})
        """Keys and passwords that no message may show."""
        self._redacted = SecretRedaction(self.secrets)
        self._timeouts = Timeouts(connect=connect_timeout, read=read_timeout)
        self._max_retries = max_retries
        self._extra_body = dict(extra_body or {})
        self._max_reply_bytes = max_reply_bytes
        self._limiter = limiter or RateLimiter()
        self._session_header = None if session_header is None else _header_name(session_header, self._headers)
        self._served: dict[str, Any] | None = None
        self._refused_schemas: set[str] = set()
        self._unsupported = set(unsupported)
        if unknown := self._unsupported.difference(OPTIONAL_FIELDS):
            names = ", ".join(OPTIONAL_FIELDS)
            raise PolicyRequestError(f"{min(unknown)!r} cannot be left out", hint=f"These fields can be: {names}.")
        self._connections = PerLoop(self._connect, _Connection.close)

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
        connection = self._connections.get()
        async with connection.slots:
            gives_ids = bool(sampling.logprobs) and _is_vllm(await self.served_model())
            if self._model is None:
                await self.served_model()
            schema = sampling.json_schema if as_messages and self._takes_schema(sampling.json_schema) else None
            completion, retries = await self._accepted(prompt, sampling, gives_ids, schema)
        notes = completion.notes + self._notes(sampling, as_messages)
        return replace(completion, retries=retries, notes=notes) if retries or notes else completion

    async def _accepted(
        self, prompt: Messages | TokenIds, sampling: SamplingParams, gives_ids: bool, schema: str | None
    ) -> tuple[Completion, int]:
        """One completion, without the fields that the server does not take; these are learnt from its refusals."""
        learnt: set[str] = set()
        refused_schema = None
        while True:
            try:
                reply = await self._completed(prompt, sampling, gives_ids, schema)
                break
            except PolicyRequestError as error:
                sent = {*self._body(sampling, gives_ids, schema), *(("logprobs",) if sampling.logprobs else ())}
                field = refused_field(error.words, sent - self._extra_body.keys())
                if field is not None and field not in self._unsupported:
                    log.info("%s does not take %s: %s", self.base_url, field, error.message)
                    learnt.add(field)
                    self._unsupported.add(field)
                elif schema is not None and not learnt & {"response_format"}:
                    # It may be the schema that the server does not take. If it is something else, this fails as well.
                    refused_schema, schema = schema, None
                    log.info("%s does not take the JSON schema: %s", self.base_url, error.message)
                else:
                    self._unsupported -= learnt
                    raise
        if refused_schema is not None:
            if len(self._refused_schemas) >= _MOST_REFUSED:
                self._refused_schemas.clear()
            self._refused_schemas.add(refused_schema)
        return reply

    def _takes_schema(self, schema: str | None) -> bool:
        return schema not in self._refused_schemas and "response_format" not in self._unsupported

    def _notes(self, sampling: SamplingParams, as_messages: bool) -> tuple[Note, ...]:
        """Return what the server did not take of what was asked for."""
        notes = sampling_notes(sampling, self._unsupported - {"max_tokens"})  # which has another name then
        if as_messages and sampling.json_schema is not None and not self._takes_schema(sampling.json_schema):
            detail = "the server did not accept the JSON schema; decoding was not guided"
            notes += ((EventKind.SCHEMA_REFUSED, detail),)
        return notes

    async def _completed(
        self, prompt: Messages | TokenIds, sampling: SamplingParams, gives_ids: bool, schema: str | None
    ) -> tuple[Completion, int]:
        """One completion, and how many times its request was sent again."""
        as_messages = bool(prompt) and not isinstance(prompt[0], int)
        # Nothing is awaited from here to the request, so name and version belong together; see `serve`.
        name, version = self.name, self.policy_version
        body = {**self._body(sampling, gives_ids, schema), ("messages" if as_messages else "prompt"): list(prompt)}
        if sampling.logprobs and "logprobs" not in self._unsupported:
            body["logprobs"] = True if as_messages else 0
        content = msgspec.json.encode(body)
        expected = self._limiter.expected_tokens(len(content), sampling.max_tokens)
        completion, retries = await self._send(
            self._url("chat/completions" if as_messages else "completions"),
            content,
            partial(decode_completion, model=name, sampling=sampling, policy_version=version),
            largest=self._max_reply_bytes
            or _REPLY_BYTES + _BYTES_PER_TOKEN * sampling.max_tokens + _BYTES_PER_PROMPT_BYTE * len(content),
            tokens=expected,
            headers={self._session_header: sampling.session} if self._session_header and sampling.session else None,
        )
        if usage := completion.usage:
            used = usage.prompt_tokens + usage.completion_tokens
            self._limiter.settle(expected, used, usage.completion_tokens)
        return completion, retries

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
        info = await asyncio.to_thread(_info_from_origin, name, root, window if isinstance(window, int) else None)
        if not info.knows_control_tokens and _is_vllm(served):
            with suppress(PolicyError):  # most servers do not report it; then all known families' tokens are escaped
                told = configured_markers(await self._reply_beside_api("tokenizer_info"))
                info = replace(info, control_tokens=info.control_tokens | told)
        return replace(info, gives_token_ids=_is_vllm(served))

    async def served_model(self) -> dict[str, Any]:
        """Return the server's own entry for the model (asked once).

        Raises:
            PolicyRequestError: no model is named, and the server has none or several; the message names them.
            PolicyError: as for `complete`; if the model is named, only if there is no connection.
        """
        if self._served is None:
            try:
                models, _ = await self._send(
                    self._url("models"), None, _models, largest=_LARGEST_LIST, seconds=self._timeouts.connect
                )
                served = self._choose_model(models)
            except PolicyUnreachableError:
                raise
            except PolicyError as error:
                if self._model is None:
                    raise
                # The server may take the model's name all the same: it is the judge.
                self.model_note = error.message
                log.warning("%s; %s is asked for all the same", error.message, self._model)
                served = {"id": self._model}
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
        tokens = (await self._reply_beside_api("tokenize", body)).get("tokens")
        return tokens if isinstance(tokens, list) else None

    async def _reply_beside_api(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what vLLM returns at an address outside the API; empty if a server has no such address."""
        url = f"{self.base_url.rstrip('/').removesuffix('/v1')}/{path}"
        try:
            sent = None if body is None else msgspec.json.encode(body)
            content, _ = await self._send(url, sent, bytes, largest=_LARGEST_LIST)
            told = msgspec.json.decode(content)
        except (PolicyRequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return told if isinstance(told, dict) else {}

    def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send another client's request to the server once, unchanged; the reply can be read from the returned object.

        Args:
            method: the request's method.
            path: below `base_url`, without a slash at its beginning.
            body: sent byte by byte.
            headers: replace this policy's own headers of these names; the key is always the policy's.

        Raises:
            PolicyUnreachableError: no connection, or none in time; also while the reply is read.
        """
        return self._relayed(method, self._url(path), body, headers or {})

    @asynccontextmanager
    async def _relayed(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._connections.get().sender.relay(method, url, body, headers) as reply:
                yield reply
        except TimeoutError as error:
            raise self._silence(error, f" ({self._timeouts.read:g} s without a byte)") from None
        except aiohttp.ClientError as error:
            raise self._no_connection(error) from None

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
        largest: int,
        seconds: float | None = None,
        tokens: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[T, int]:
        """Return the decoded reply, and how many times the request was sent again.

        An error has the redacted message of its cause and not the cause itself, which may repeat the request's headers.
        """
        try:
            return await self._connections.get().sender.send(
                url, body, decode, largest=largest, seconds=seconds, tokens=tokens, headers=headers
            )
        except StatusError as error:
            raise self._refusal(error, self._redacted(error.words)) from None
        except MalformedReplyError as error:
            raise self._malformed(error) from None
        except RedirectError as error:
            raise self._redirected(error.target, url) from None
        except TimeoutError as error:
            allowed = f" ({self._timeouts.read:g} s for a completion)" if seconds is None else ""
            raise self._silence(error, allowed) from None
        except aiohttp.ClientError as error:
            raise self._no_connection(error) from None

    def _choose_model(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        names = [model["id"] for model in models]
        bases = [model for model in models if not model.get("parent")]
        if self._model is None and len(bases) == 1:
            return bases[0]
        for model in models:
            if model["id"] in {
                self._model,
                f"{self._model}:latest",
            }:  # an adapter has its base's window and tokenizer, but reports neither
                base = next((each for each in bases if each["id"] == model.get("parent")), {})
                return {**model, **{name: base[name] for name in ("root", "max_model_len") if name in base}}
        shown = self._redacted(", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else ""))
        if self._model is None:
            raise PolicyRequestError(f"{self.base_url} serves {shown or 'no model'}", hint="Name one with --model.")
        raise PolicyRequestError(
            f"{self.base_url} does not serve {self._model!r}; it serves {shown or 'nothing'}",
            hint="Name one of these with --model.",
        )

    def _no_connection(self, error: aiohttp.ClientError) -> PolicyUnreachableError:
        cause = _root_cause(error)
        refused = isinstance(cause, ConnectionRefusedError)  # its message differs between systems
        return self._unreachable("All connection attempts failed" if refused else str(cause))

    def _unreachable(self, reason: str) -> PolicyUnreachableError:
        return PolicyUnreachableError(
            f"no connection to {self.base_url}: {self._redacted(reason)}",
            hint="Is the server running? Check --base-url with `memagent doctor`.",
        )

    def _silence(self, error: Exception, allowed: str) -> PolicyUnreachableError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._unreachable(f"none within {self._timeouts.connect:g} s")
        return PolicyUnreachableError(
            f"{self.base_url} did not answer in time{allowed}",
            hint="Is it overloaded? Raise --timeout, or lower --concurrency.",
        )

    def _redirected(self, target: str, url: str) -> PolicyResponseError:
        """Where the redirect leads, without secrets, and the base URL that it would be."""
        shown = self._redacted(re.split(r"[?#]", re.sub("//.*@", "//", target))[0])
        base = shown.removesuffix(url.removeprefix(self.base_url.rstrip("/")))
        return PolicyResponseError(
            f"{self.base_url} redirects to another server, {shown}; the request was not sent there",
            hint=f"If that is the server you mean, name it: --base-url {base}",
        )

    def _refusal(self, error: StatusError, all_words: str) -> PolicyError:
        where, status, wait, words = self.base_url, error.status, error.wait, all_words[:_SHOWN]
        if status in {401, 403}:
            return PolicyAuthenticationError(
                f"{where} refused the key ({status}): {words}",
                hint="Set OPENAI_API_KEY, or --api-key. A server that wants a user name and a password has them in its "
                "address: http://USER:PASSWORD@HOST:PORT/v1.",
            )
        if error.worth_repeating:
            tried = f"answered {status}"
            if self._max_retries:
                tried = f"still answered {status} after {_retries(self._max_retries)}"
            if wait is not None and wait > self._timeouts.read:
                tried = f"answered {status} and asks to wait for {wait:.0f} s"
            return PolicyOverloadedError(
                f"{where} {tried}: {words}",
                hint="Wait, or lower the number of requests in flight (--concurrency), then resume.",
            )
        if speaks_of_length(words) or status == 413:
            hint = "Lower --chunk-tokens; `memagent doctor` shows the server's window."
        elif self.model_note and self._model and self._model in words:
            hint = f"{self.model_note}."
        elif status == 404 and self._model and self._model in words:
            hint = "`memagent doctor` lists what is served."
        elif field := refused_field(words, OPTIONAL_FIELDS):
            hint = f"If it does not take {field}: --unsupported {field}."
        else:
            hint = "`memagent doctor` sends a small request, and shows what comes back."
        refusal = PolicyRequestError(f"{where} refused the request ({status}): {words}", hint=hint)
        refusal.words = all_words
        return refusal

    def _malformed(self, error: MalformedReplyError) -> PolicyResponseError:
        retried = f" after {_retries(self._max_retries)}" if self._max_retries else ""
        if isinstance(error, OverlongReplyError):
            return PolicyResponseError(
                f"{self.base_url} still sent a reply that is too long{retried}: {error.reason}",
                hint="Does it respect max_tokens? OpenAICompatiblePolicy(max_reply_bytes=...) raises the bound.",
            )
        if isinstance(error, BrokenOffError):
            return PolicyResponseError(
                f"{self.base_url} still broke its reply off{retried}: {self._redacted(error.reason)[:_SHOWN]}",
                hint="Look into the server's log, then resume.",
            )
        shown = self._redacted(error.content.decode(errors="replace"))[:200]
        return PolicyResponseError(
            f"{self.base_url} answered with something that is not a completion{retried}: {shown!r} "
            f"({self._redacted(error.reason)})",
            hint="Is this an OpenAI-compatible API? --base-url usually ends in /v1.",
        )

    def _connect(self) -> _Connection:
        sender = Sender(
            self.base_url,
            self._headers,
            timeouts=self._timeouts,
            max_retries=self._max_retries,
            limiter=self._limiter,
            trust=self._trust,
            proxy=self._proxy,
        )
        return _Connection(sender, asyncio.Semaphore(self.max_concurrency))


@dataclass(frozen=True)
class _Connection:
    """One event loop's connections, and its limit on requests in flight."""

    sender: Sender
    slots: asyncio.Semaphore

    async def close(self) -> None:
        await self.sender.close()


def _headers(authorization: str | None, key: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of every request; the environment can name OpenAI's organisation and project.

    These go only where a key goes: a server that only a log names gets neither.
    """
    headers = {
        "Authorization": authorization or f"Bearer {key or NO_KEY}",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "memagent-graph",
    }
    if key not in {"", NO_KEY}:
        named = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
        headers |= {name: os.environ[variable] for name, variable in named.items() if os.environ.get(variable)}
    for name, value in own.items():
        _require_header(name, value)
        headers = {known: text for known, text in headers.items() if known.lower() != name.lower()} | {name: value}
    if key in {"", NO_KEY} and "api-key" in map(str.lower, own):  # Azure's; two keys would contradict each other
        headers.pop("Authorization", None)
    return headers


def _require_header(name: str, value: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise PolicyRequestError(f"{name!r} is not the name of a header", hint='Use one such as "X-Session-Id".')
    if not (value.isascii() and value.isprintable()):
        raise PolicyRequestError(
            f"the header {name} has characters that cannot be in a request",
            hint="Does it contain a line break, or a typing error?",
        )


def _trust(ca_file: Path | str | ssl.SSLContext) -> ssl.SSLContext:
    if isinstance(ca_file, ssl.SSLContext):
        return ca_file
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise PolicyRequestError(
            f"the certificates in {ca_file} cannot be used: {error}", hint="It has to be a file in PEM format."
        ) from error


def _header_name(name: str, taken: Mapping[str, str]) -> str:
    """Return a header's name, if it can be one and is not sent already."""
    _require_header(name, "")
    if name.lower() in {each.lower() for each in (*taken, "Content-Length", "Host", "Transfer-Encoding")}:
        raise PolicyRequestError(f"the header {name} has another meaning", hint='Use one such as "X-Session-Id".')
    return name


def _models(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of a model list, also of one that is a bare array, or has only names."""
    try:
        body = msgspec.json.decode(content)
        entries = body if isinstance(body, list) else body.get("data") or body.get("models")
        entries = [{"id": entry} if isinstance(entry, str) else entry for entry in entries]
        return [{**entry, "id": entry.get("id") or entry.get("name") or entry["model"]} for entry in entries]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MalformedReplyError(f"not a list of models: {error}", content) from error


def _is_vllm(served: Mapping[str, Any]) -> bool:
    return served.get("owned_by") == "vllm"


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _info_from_origin(name: str, root: str, window: int | None) -> ModelInfo:
    """Return what can be found out from the model's name and its origin (a folder on this machine, or a hub id)."""
    folder = Path(root or name)
    local = folder.is_dir()
    tokenizer, missing = _tokenizer_named(name, root)
    all_known = local and tokenizer is not None
    return ModelInfo(
        context_window=window,
        tokenizer=tokenizer,
        missing=missing,
        shape=ModelShape.from_config(folder) if local else None,
        profile=load_profile(folder) if local else None,
        control_tokens=(tokenizer.special_tokens if tokenizer else frozenset())
        | (folder_markers(folder) if local else frozenset()),
        knows_control_tokens=all_known,
    )


def _tokenizer_named(model: str, root: str) -> tuple[Tokenizer | None, MissingExtraError | None]:
    """Return the tokenizer found by the model's name or origin, if any; or what has to be installed for it."""
    missing = None
    for spec in dict.fromkeys(filter(None, (root, model))):
        try:
            return load_tokenizer(spec), None
        except MissingExtraError as error:
            missing = missing or error
        except MemAgentError:
            continue
    return None, missing


def _retries(count: int) -> str:
    return f"{count} {'retry' if count == 1 else 'retries'}"
