"""The graph's stored state, and the context of its nodes.

The state is stored at every step, so it has no document text and no growing list. It has a reference, cursors, current
memories, counters, and records of the newest steps. The checkpoint history is the list of all memories.
Everything that cannot or should not be stored (client, tokenizer, store) lives in `ReaderContext`.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, NotRequired, cast

from langgraph.channels import Topic
from typing_extensions import TypedDict

from memagent_graph.budget import Budget
from memagent_graph.concurrency.shared_pass import Barrier
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.chunking import Boundary, Cursor
from memagent_graph.events import EventKind, UpdateRule
from memagent_graph.policies.model_info import ModelShape
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.prompts import Prompts
from memagent_graph.reading.prompt_cuts import PromptCutDetector
from memagent_graph.response_format import ResponseFormat
from memagent_graph.run_log import RunLog
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.trace import Trace
from memagent_graph.words import is_character_end

SCHEMA_PREFIX: Final = "schema="
"""Prefix of the schema's fingerprint in `ReaderContext.settings`."""


class Counters(TypedDict, total=False):
    """The cost of a read, or of a part of a read. A missing count is 0."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    turns: int
    seconds: float
    flops: float
    document_tokens: int


def add_cost(total: Counters, more: Counters) -> Counters:
    """Return the sum of two costs."""
    counts: Any = {**total}
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
    return cast("Counters", counts)


def merge_entries(entries: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge entries that branches write by name: a new entry replaces the old one, and None removes it."""
    return {name: value for name, value in {**entries, **new}.items() if value is not None}


class ReaderInput(TypedDict):
    """The graph's input. `document` may be any source that `Document.of` takes; it is stored first."""

    question: str
    document: Any
    run_id: NotRequired[str]
    settings: NotRequired[str]
    """`ReaderContext.settings` of a structured read. Without it, a run that is killed at once could be resumed with
    another schema."""


class ReaderOutput(TypedDict):
    """The graph's output."""

    run_id: str
    answer: str | None
    raw_answer: str | None
    memory: str
    stop_reason: str | None
    chunks_read: int
    usage: Counters


class ReaderState(TypedDict):
    """The channels of every strategy; a strategy's state class may add others. A few kilobytes for any document.

    The nodes' wrapper updates `usage`, `chunks_read`, `steps` and `tips`; steps need not write them.
    """

    run_id: str
    question: str
    document: DocumentRef
    settings: NotRequired[str]
    """The fingerprint of strategy, tokenizer, chunk size and prompts. A resume with other settings is refused."""
    memory: NotRequired[str]
    """The memory of the trunk. At the end, it is the memory that the answer is based on."""
    usage: NotRequired[Annotated[Counters, add_cost]]
    chunks_read: NotRequired[Annotated[int, operator.add]]
    steps: NotRequired[Annotated[list[dict[str, Any]], Topic(dict)]]
    """The policy calls of the newest superstep, as `memagent_graph.trace.pack_call` stores them."""
    tips: NotRequired[Annotated[dict[str, str], operator.or_]]
    """The id of each branch's newest call, by the branch's name: the parent of the next call."""
    answer: NotRequired[str | None]
    raw_answer: NotRequired[str | None]
    stop_reason: NotRequired[str | None]


class SequentialState(ReaderState):
    """The state of strategies that read one chunk after the other."""

    cursor: NotRequired[Cursor]
    span: NotRequired[dict[str, Any] | None]
    """The next chunk to read, as `Span.stored`; None if there is none."""


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """The rules for updates that are cut off, empty, refused, malformed or invented.

    A truncated memory is accepted by default, as in the paper, where the output bound is the memory bound.
    """

    truncated: UpdateRule = UpdateRule.ACCEPT
    """Also the rule for completions that exceed the memory budget. ACCEPT cuts them to it."""
    empty: UpdateRule = UpdateRule.KEEP_PREVIOUS
    refused: UpdateRule = UpdateRule.KEEP_PREVIOUS
    invented: UpdateRule | None = None
    """The rule for a memory with a word that is not in the prompt. `ACCEPT` does not check; None uses the policy's rule
    (`Profile.on_invented`). For policies that only copy, a new word is an error. `words.find_invented_word` defines
    what is new in every script."""
    malformed: UpdateRule = UpdateRule.RETRY
    """The rule for a reply without the form that its role needs."""
    retries: int = 2
    """Maximum number of retries by `UpdateRule.RETRY`, of requests for an empty answer, and of repairs of an answer
    without the form of `response_format`."""

    def rule_for(self, kind: EventKind) -> UpdateRule:
        """Return the rule for one kind of event."""
        rules = {
            EventKind.INVENTED: self.invented or UpdateRule.ACCEPT,
            EventKind.EMPTY: self.empty,
            EventKind.REFUSED: self.refused,
            EventKind.MALFORMED: self.malformed,
            EventKind.REPEATED: self.malformed,
        }
        return rules.get(kind, self.truncated)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits at which a read stops early, counted from the call that started or resumed it. None means no limit."""

    max_chunks: int | None = None
    max_tokens_total: int | None = None
    """Prompt and completion tokens together. It is checked before a chunk is read, so the last chunk may exceed it."""
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_chunks", "max_tokens_total", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is not, either
                raise ValueError(f"{name} must be positive, not {value}")

    def tighten(self, other: Limits) -> Limits:
        """Return limits that are the lower of the two in each field."""
        pairs = ((getattr(self, limit.name), getattr(other, limit.name)) for limit in fields(self))
        return Limits(*(min((value for value in pair if value is not None), default=None) for pair in pairs))


@dataclass(frozen=True)
class ReaderContext:
    """The policy, settings and stores of a graph. An `Execution` has what belongs to a single call."""

    policy: Policy
    tokenizer: Tokenizer
    store: DocumentStore
    prompts: Prompts
    budget: Budget = field(default_factory=Budget)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: UpdateRules = field(default_factory=UpdateRules)
    limits: Limits = field(default_factory=Limits)
    boundary: Boundary = "token"
    strategy: str = ""
    """The strategy's name; `build_graph` sets it."""
    strategy_fingerprint: str = ""
    """A hash of the strategy's options, roles, state and edges; `build_graph` sets it."""
    trained_prompts_only: bool = False
    """Whether the policy understands only the prompts that it was trained on."""
    window: int | None = None
    """The model's context window in tokens; `budget.context_window` may be smaller."""
    concurrency: int = 16
    """Maximum number of branches of one read that run in parallel."""
    shape: ModelShape | None = None
    """The model's size, if known, for estimates of floating-point operations."""
    on_incomplete: str = "report"
    """The rule for a document with content that could not be converted to text: report, or stop."""
    prompt_cut_detector: PromptCutDetector | None = field(default=None, repr=False)
    """Detects prompts that a server has cut; None for policies in this process."""
    run_log: RunLog | None = field(default=None, repr=False)
    log_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The reader's settings, for the log."""
    on_hidden_update: Callable[[dict[str, Any]], object] | None = field(default=None, repr=False)
    """Called with the updates of a `LoopNode`, which have no supersteps. It is set only if the caller does not observe
    a read before its end; see `memagent_graph.reading.nodes`."""
    uses_previous_calls: bool = False
    """Whether the strategy's steps use `StepContext.load_previous_calls`."""
    previous_trace: Trace | None = field(default=None, repr=False)
    """The run's calls before this invocation; None if they are only in its log."""
    barrier: Barrier | None = field(default=None, repr=False)
    """Keeps this read at the same chunk as others of the same document."""
    response_format: ResponseFormat | None = None
    """The form of a structured answer; `memagent_graph.reading.structured` sets it."""
    outline: str = ""
    """The answer's fields in words. Memory prompts show them after the question, because they do not show the schema.
    Empty if there is no room for them, or if the policy understands only its own prompts."""
    may_shrink_chunks: bool = False
    """Whether `chunk_tokens` is a default, so that a strategy with longer prompts may use shorter chunks."""

    @property
    def settings(self) -> str:
        """A fingerprint of everything that must not change within a run; a structured read's ends with its schema's."""
        budget = self.budget
        return ":".join(
            (
                self.strategy,
                self.strategy_fingerprint,
                self.tokenizer.fingerprint,
                self.prompts.fingerprint,
                f"{budget.chunk_tokens}/{budget.memory_tokens}/{self.boundary}",
                *((f"{SCHEMA_PREFIX}{self.response_format.fingerprint}",) if self.response_format else ()),
            )
        )

    @property
    def schema(self) -> str:
        """The schema of a structured answer, as prompts show it; empty if the answer is not structured."""
        return self.response_format.schema_json if self.response_format else ""

    def count_shown_tokens(self, text: str) -> int:
        """Return the number of a text's tokens in a prompt, where parts of it may be escaped."""
        return self.tokenizer.count(self.prompts.neutralise(text))

    def take_first_tokens(self, text: str, tokens: int) -> str:
        """Return the text of the first tokens; a few fewer if the last one would end inside a character."""
        tokenized = self.tokenizer.tokenize(text)
        if len(tokenized) <= tokens:
            return text
        lengths = (tokenized.prefix_chars(count) for count in range(tokens, 0, -1))
        ends = (length for length in lengths if length is not None and is_character_end(text, length))
        return text[: next(ends, 0)].rstrip()

    def truncate(self, text: str, tokens: int) -> str:
        """Return the beginning of a text, cut to at most this many tokens in a prompt."""
        cut = self.take_first_tokens(text, tokens)
        while cut and (excess := self.count_shown_tokens(cut) - tokens) > 0:
            cut = self.take_first_tokens(cut, max(0, self.tokenizer.count(cut) - excess))
        return cut

    def format_question(self, question: str) -> str:
        """Return the question for memory prompts. For a structured answer, the answer's fields follow it."""
        return f"{question}\n\n{self.outline}" if self.outline else question


def new_run_id() -> str:
    """Return a new run id: the time of the start (UTC), so that ids sort by age, and a random part."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
