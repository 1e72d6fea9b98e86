"""The policy protocol: prompts, sampling parameters and completions.

A policy turns one prompt into one completion. Any object with a `name` and an async `complete` is a policy. This
package's policies are in `memagent_graph.policies`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypedDict

from memagent_graph.events import EventKind


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


Messages: TypeAlias = Sequence[Message]
"""A chat prompt. The policy applies the chat template of its model."""


class FinishReason(StrEnum):
    """The reason why the policy stopped writing."""

    STOP = "stop"
    """The policy ended its turn, or wrote a stop string."""
    LENGTH = "length"
    """The text was cut off at `max_tokens` or at the end of the window."""
    REFUSED = "refused"
    """The policy, or a filter in front of it, refused."""
    FAILED = "failed"
    """The server failed during generation. Policies retry or raise an error, so no completion has this reason."""
    OTHER = "other"
    """Any other reason that the server gives."""

    @classmethod
    def _missing_(cls, value: object) -> FinishReason:
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of a completion. The default, temperature 0, is greedy: the same document gives the same answer."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    """Whether to request token ids and log-probs of the sampled tokens (natural log, before temperature).

    With None, the reader requests them if runs are logged and the policy can return them.
    """
    json_schema: str | None = None
    """The JSON schema for guided decoding: the `json_schema` of an OpenAI `response_format`, as JSON. Policies without
    guided decoding ignore it. The reader validates every reply."""
    session: str | None = None
    """A key that is equal for requests with a common prefix: the reader sets the document's key (its SHA-256). A policy
    may pass it to a router, which can send all requests about a document to one replica. It does not affect replies."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:  # NaN is not, either
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of a completion. `cached_tokens` is the part of the prompt from the server's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


Note: TypeAlias = tuple[EventKind, str]
"""An event that the reader reports about a completion: its kind and its detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a completion, as the policy reports it.

    The fields appear in results (the calls of a trace), in the metadata of callbacks, in the log and in exports.
    """

    policy_version: str = ""
    """The name of the weights; empty if the policy reports none."""
    request_id: str = ""
    """The request's id in the server's log; empty if the server reports none."""

    @property
    def origin(self) -> dict[str, Any]:
        """The fields of `Origin`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Origin)}


ARRAY_TYPES: Final = {"prompt_token_ids": "I", "token_ids": "I", "logprobs": "f"}
"""The fields of completions and logged conversations that are long lists of numbers, with the type codes of arrays."""


@dataclass(frozen=True, slots=True)
class Completion(Origin):
    """The reply of a policy, unchanged.

    `token_ids` and `logprobs` (natural log, 32-bit precision) have one entry per completion token, `prompt_token_ids`
    one per prompt token. They are None if the policy does not return them, and may be passed as lists. `usage` is None
    if the server does not count tokens.
    """

    text: str
    finish_reason: FinishReason
    model: str
    usage: TokenUsage | None = None
    prompt_token_ids: Sequence[int] | None = field(default=None, repr=False)
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    logprobs: Sequence[float] | None = field(default=None, repr=False)
    retries: int = 0
    """The number of retries before this reply."""
    notes: tuple[Note, ...] = ()
    """Events of the request for the user, such as a field that the server does not accept."""

    def __post_init__(self) -> None:
        # A hundred replies have hundreds of thousands of numbers, which the garbage collector would visit in lists.
        for name, type_code in ARRAY_TYPES.items():
            values = getattr(self, name)
            if values is not None and not isinstance(values, array):
                object.__setattr__(self, name, array(type_code, values))

    def count_tokens(self, prompt: Messages, count: Callable[[str], int]) -> TokenUsage:
        """Return the server's token counts. If it reported none, count with `count`, a tokenizer's method."""
        return self.usage or TokenUsage(sum(count(message["content"]) for message in prompt), count(self.text))


@runtime_checkable
class Policy(Protocol):
    """A language model that updates memory and answers."""

    @property
    def name(self) -> str:
        """The model's name, for results and logs."""
        ...

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return one completion.

        Raises:
            PolicyError: the model cannot be reached or fails, after all useful retries.
        """
        ...
