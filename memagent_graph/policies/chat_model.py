"""A policy on any LangChain chat model, so that OpenAI, Anthropic, Ollama and others work. It returns no token ids."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from memagent_graph.concurrency.background import PerLoop
from memagent_graph.errors import PolicyError, PolicyRequestError, PolicyResponseError
from memagent_graph.policies.redaction import SecretRedaction
from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams, TokenIds, TokenUsage

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage

_OUTPUT_BOUNDS = ("max_tokens", "max_output_tokens", "num_predict")
"""The names that integrations use for the maximum number of tokens in a reply."""
_FINISH_REASONS = {
    **dict.fromkeys(("stop", "end_turn", "stop_sequence", "STOP"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "MAX_TOKENS", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("content_filter", "refusal", "SAFETY"), FinishReason.REFUSED),
}


class ChatModelPolicy:
    """Completions from a LangChain `BaseChatModel`.

    The model keeps its own client, keys and retries. Temperature, maximum output and the rest are passed with each call
    as keyword arguments; the maximum output has the name of the model's own field (`max_output_tokens` for Gemini).
    ChatOllama takes no such arguments: it is copied, and the copy's fields are changed. `unsupported` names what a
    model refuses.

    Args:
        model: the chat model.
        name: the name in results and logs; by default the model's own.
        max_concurrency: calls in flight at once.
        unsupported: names among temperature, top_p, seed, stop and max_tokens that are not to be passed.
    """

    def __init__(
        self,
        model: BaseChatModel,
        *,
        name: str | None = None,
        max_concurrency: int = 32,
        unsupported: frozenset[str] = frozenset(),
    ) -> None:
        self._model = model
        self._name = name or str(
            getattr(model, "model_name", None) or getattr(model, "model", None) or model.get_name()
        )
        self._slots = PerLoop(lambda: asyncio.Semaphore(max_concurrency))
        self._unsupported = unsupported

    @property
    def name(self) -> str:
        """The model's name."""
        return self._name

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Write one completion.

        Raises:
            PolicyRequestError: the prompt is token ids, which chat models do not accept.
            PolicyError: the model raised an error; its message is included.
        """
        if prompt and isinstance(prompt[0], int):
            raise PolicyRequestError(
                "a chat model takes messages, not token ids", hint="Use OpenAICompatiblePolicy or LocalPolicy."
            )
        async with self._slots.get():
            try:
                model, options = self._with(sampling)
                messages = [(message["role"], message["content"]) for message in prompt]  # type: ignore[index]
                reply = await model.ainvoke(messages, **options)
            except Exception as error:  # noqa: BLE001  whatever the model raises
                redacted = SecretRedaction(each.get_secret_value() for each in _secrets(self._model))
                whole = "".join(traceback.format_exception(error))
                raise PolicyError(
                    redacted(f"{self._name}: {type(error).__name__}: {error}"), hint=self._hint(error, sampling)
                ) from (error if redacted(whole) == whole else None)  # tracers write down what causes say
        return self._completion(reply)

    def _with(self, sampling: SamplingParams) -> tuple[BaseChatModel, dict[str, Any]]:
        """Return the model to call, and the keyword arguments of the call."""
        options, fields = self._options(sampling), type(self._model).model_fields
        bound = next((name for name in _OUTPUT_BOUNDS if name in fields), "max_tokens")
        if "max_tokens" in options:
            options[bound] = options.pop("max_tokens")
        if bound == "num_predict":
            return self._model.model_copy(update=options), {}
        return self._model, options

    def _hint(self, error: Exception, sampling: SamplingParams) -> str | None:
        """How to leave out an option that the model does not accept, if its error is about one."""
        if not isinstance(error, (TypeError, ValueError)):
            return None
        named = next((name for name in self._options(sampling) if re.search(rf"\b{name}\b", str(error))), None)
        return named and f'If it does not take {named}: ChatModelPolicy(model, unsupported=frozenset({{"{named}"}})).'

    def _options(self, sampling: SamplingParams) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        if sampling.top_p < 1:
            options["top_p"] = sampling.top_p
        if sampling.seed is not None:
            options["seed"] = sampling.seed
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        return {name: value for name, value in options.items() if name not in self._unsupported}

    def _completion(self, reply: AIMessage) -> Completion:
        try:
            text = reply.text if isinstance(reply.text, str) else reply.text()
        except (AttributeError, TypeError) as error:
            raise PolicyResponseError(f"{self._name} answered with {type(reply).__name__}, not a message") from error
        metadata = reply.response_metadata or {}
        reason = metadata.get("finish_reason") or metadata.get("stop_reason") or metadata.get("done_reason") or "stop"
        usage = reply.usage_metadata
        refused = bool(reply.additional_kwargs.get("refusal")) and not text
        return Completion(
            text=str(text),
            finish_reason=FinishReason.REFUSED if refused else _FINISH_REASONS.get(str(reason), FinishReason.OTHER),
            model=str(metadata.get("model_name") or self._name),
            usage=TokenUsage(
                usage["input_tokens"],
                usage["output_tokens"],
                int((usage.get("input_token_details") or {}).get("cache_read") or 0),
            )
            if usage
            else None,
        )


def _secrets(model: BaseChatModel) -> Iterator[SecretStr]:
    """Yield the secrets in the model's fields: its keys."""
    return (value for value in vars(model).values() if isinstance(value, SecretStr))
