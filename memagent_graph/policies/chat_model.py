"""A policy on any LangChain chat model, so that OpenAI, Anthropic, Ollama and others work. It returns no token ids."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from langchain_core.messages import AIMessage
from pydantic import SecretStr

from memagent_graph.concurrency.background import PerLoop
from memagent_graph.errors import PolicyAuthenticationError, PolicyError, PolicyResponseError, require_minimum
from memagent_graph.plain_text import format_count
from memagent_graph.policies.api_variants import (
    extract_text,
    find_reason_of_refusal,
    find_refused_field,
    has_refusal,
    list_sampling_fields,
    make_finish_notes,
    make_sampling_notes,
    parse_finish_reason,
    parse_token_usage,
)
from memagent_graph.policies.redaction import make_redactor
from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

log = logging.getLogger(__name__)

_MAX_TOKENS_FIELDS = ("max_tokens", "max_output_tokens", "num_predict")
"""The names that integrations use for the maximum number of tokens in a reply."""
_FIRST_PAUSE_SECONDS = 0.5
"""The pause before the first retry of a model that failed while it wrote. It doubles at each of the first retries."""


class ChatModelPolicy:
    """Completions from a LangChain `BaseChatModel`.

    The model keeps its own client, keys and retries. Temperature, maximum output and other options are keyword
    arguments of every call. The maximum output has the name of the model's field (`max_output_tokens` for Gemini).
    ChatOllama accepts no such arguments, so a copy with changed fields is called.

    Args:
        model: the chat model.
        name: the name in results and logs, by default the model's own name.
        max_concurrency: the maximum number of calls in flight.
        max_retries: the maximum number of retries after the server failed while it wrote.
        unsupported: options not to pass: temperature, top_p, seed, stop or max_tokens. An option that an error of the
            model names is left out from then on, and completions have a note about it.

    Raises:
        MemAgentError: `max_concurrency` is below 1, or `max_retries` below 0.
    """

    def __init__(
        self,
        model: BaseChatModel,
        *,
        name: str | None = None,
        max_concurrency: int = 32,
        max_retries: int = 4,
        unsupported: Collection[str] = (),
    ) -> None:
        require_minimum(1, max_concurrency=max_concurrency)
        require_minimum(0, max_retries=max_retries)
        self._model = model
        model_name = getattr(model, "model_name", None) or getattr(model, "model", None) or model.get_name()
        self.name = name or str(model_name)
        """The model's name."""
        self._slots = PerLoop(lambda: asyncio.Semaphore(max_concurrency))
        self._max_retries = max_retries
        self._unsupported = set(unsupported)
        log.warning("%s is a chat model: no token ids and no log-probs, so its runs cannot be trained on", self.name)

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Write one completion.

        Raises:
            PolicyError: the model raised an error, with its message; PolicyAuthenticationError for 401 and 403.
        """
        messages = [(message["role"], message["content"]) for message in prompt]
        retries = 0
        while True:
            async with self._slots.get():
                completion = self._decode_reply(await self._call_model(messages, sampling), sampling)
            if completion.finish_reason is not FinishReason.FAILED:
                return replace(completion, retries=retries)
            if retries >= self._max_retries:
                raise PolicyResponseError(
                    f"{self.name} still failed during a reply after {format_count(retries, 'retry', 'retries')}",
                    hint="See its server's log, then resume.",
                )
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** min(retries, 9))
            retries += 1

    async def _call_model(self, messages: list[tuple[str, str]], sampling: SamplingParams) -> AIMessage:
        """Call the model. If its error names an option, call it again without the option."""
        refused_options: set[str] = set()
        while True:
            # Some models refuse top_p together with temperature.
            omitted = self._unsupported | ({"top_p"} if sampling.top_p == 1 else set())
            options = {name: value for name, value in list_sampling_fields(sampling).items() if name not in omitted}
            try:
                fields = type(self._model).model_fields
                limit_name = next((name for name in _MAX_TOKENS_FIELDS if name in fields), "max_tokens")
                arguments = {limit_name if name == "max_tokens" else name: value for name, value in options.items()}
                if limit_name == "num_predict":
                    return await self._model.model_copy(update=arguments).ainvoke(messages)
                return await self._model.ainvoke(messages, **arguments)
            except Exception as error:  # noqa: BLE001  whatever the model raises
                if (reason := find_reason_of_refusal(str(error))) is not None:
                    return AIMessage("", response_metadata={"finish_reason": reason.value})
                option = find_refused_field(str(error), options)
                if option is not None:
                    refused_options.add(option)
                    self._unsupported.add(option)
                    continue
                self._unsupported -= refused_options
                secrets = (value for value in vars(self._model).values() if isinstance(value, SecretStr))
                redact = make_redactor(secret.get_secret_value() for secret in secrets)
                traceback_text = "".join(traceback.format_exception(error))
                hint = "It comes from the chat model: check its key, its address and its own settings."
                kind = PolicyAuthenticationError if getattr(error, "status_code", 0) in (401, 403) else PolicyError
                raise kind(redact(f"{self.name}: {type(error).__name__}: {error}"), hint=hint) from (
                    error if redact(traceback_text) == traceback_text else None
                )  # a tracer would record the message of the cause, with its secrets

    def _decode_reply(self, reply: AIMessage, sampling: SamplingParams) -> Completion:
        try:
            text = extract_text(reply.content) or ""
            metadata = reply.response_metadata or {}
        except (AttributeError, ValueError) as error:
            raise PolicyResponseError(
                f"{self.name} answered with {type(reply).__name__}, not a message",
                hint="Its `_generate` or `_agenerate` has to return an AIMessage with text.",
            ) from error
        names = ("finish_reason", "stop_reason", "done_reason", "stopReason", "incomplete_details")
        raw_reason = next(filter(None, map(metadata.get, names)), None)
        is_refusal = has_refusal({"content": reply.content, **reply.additional_kwargs}) and not text
        reason = FinishReason.REFUSED if is_refusal else parse_finish_reason(raw_reason)
        return Completion(
            text=text,
            finish_reason=reason,
            model=str(metadata.get("model_name") or self.name),
            usage=parse_token_usage(reply.usage_metadata),
            notes=make_finish_notes(reason, raw_reason, text) + make_sampling_notes(sampling, self._unsupported),
        )
