"""The policy protocol: what the reader sends to a language model, and what it gets back.

A policy turns one prompt into one completion. Anything with a `name` and an async `complete` is a policy; see
`memagent_graph.policies` for the four that come with the package.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypedDict

from memagent_graph.events import EventKind


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


Messages: TypeAlias = Sequence[Message]
"""A chat prompt; the policy applies its model's chat template."""

TokenIds: TypeAlias = Sequence[int]
"""A prompt that is already tokenised; it is sent without a chat template."""


class FinishReason(StrEnum):
    """Why the policy stopped writing."""

    STOP = "stop"
    """It ended its turn, or wrote a stop string."""
    LENGTH = "length"
    """It was cut off at `max_tokens` or at the end of its window."""
    REFUSED = "refused"
    """It, or a filter in front of it, refused."""
    FAILED = "failed"
    """Its server failed while it wrote; policies ask again, so that no completion has this."""
    OTHER = "other"
    """Any other reason that the server gives."""

    @classmethod
    def _missing_(cls, value: object) -> FinishReason:
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion. The default, temperature 0, is greedy: the same document gives the same answer."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool | None = None
    """Ask for token ids and for the log-probabilities of the sampled tokens (natural log, before temperature).

    With None the reader decides: it asks for them if runs are logged and the policy can return them.
    """
    json_schema: str | None = None
    """The JSON schema that the completion should be valid against, for policies that can guide decoding by one: the
    `json_schema` of an OpenAI `response_format`, as JSON. Others ignore it; the reader checks every reply."""
    session: str | None = None
    """What requests that share a prefix have in common: the reader sets the document's key (its sha256). A policy may
    pass it on to a router, which then keeps a document on one replica; others ignore it. It does not change a reply."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one completion. `cached_tokens` of the prompt came from the server's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


Note: TypeAlias = tuple[EventKind, str]
"""What a reader should report about a completion: the event's kind and its detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a completion comes from, as the policy reports it.

    Each field is in results (the calls of a trace), in the metadata that callbacks get, in the log and in exports.
    """

    policy_version: str = ""
    """Which weights wrote it, if the policy reports that."""
    request_id: str = ""
    """The server's own name for the request, to find it in the server's log; empty if it gives none."""

    @property
    def origin(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(Origin)}


_NUMBERS: Final = {"prompt_token_ids": "I", "token_ids": "I", "logprobs": "f"}
"""The fields of a completion that are arrays of numbers, with the arrays' types."""


@dataclass(frozen=True, slots=True)
class Completion(Origin):
    """What a policy wrote, exactly as it wrote it.

    `token_ids` and `logprobs` (natural log, 32-bit precision) have one entry per completion token, `prompt_token_ids`
    one per prompt token; each is None if the policy does not return it, and may be given as a list. `usage` is None if
    the server does not count tokens.
    """

    text: str
    finish_reason: FinishReason
    model: str
    usage: TokenUsage | None = None
    prompt_token_ids: Sequence[int] | None = field(default=None, repr=False)
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    logprobs: Sequence[float] | None = field(default=None, repr=False)
    retries: int = 0
    """How many times the request was repeated before this reply came."""
    notes: tuple[Note, ...] = ()
    """What happened to the request that a user should know about, such as a field that the server does not take."""

    def __post_init__(self) -> None:
        if self.logprobs is self.token_ids is self.prompt_token_ids is None:
            return
        # A hundred replies have hundreds of thousands of numbers. As objects in lists, every pass of the garbage
        # collector would look at them.
        for name, kind in _NUMBERS.items():
            values = getattr(self, name)
            if values is not None and not isinstance(values, array):
                object.__setattr__(self, name, array(kind, values))

    @property
    def facts(self) -> Completion:
        """The completion without its text, token ids, log-probs and notes, for records that only describe it."""
        return replace(self, text="", prompt_token_ids=None, token_ids=None, logprobs=None, notes=())


@runtime_checkable
class Policy(Protocol):
    """A language model that updates memory and answers."""

    @property
    def name(self) -> str:
        """The model's name, for results and logs."""
        ...

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Write one completion.

        Raises:
            PolicyError: the model cannot be reached or fails, after all useful retries.
        """
        ...
