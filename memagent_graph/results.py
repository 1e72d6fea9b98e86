"""The result of a read: the answer, the memory updates, events and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.omissions import list_document_events
from memagent_graph.errors import EvaluationError
from memagent_graph.events import ReadEvent, StopReason
from memagent_graph.plain_text import format_count
from memagent_graph.policy import TokenUsage
from memagent_graph.trace import MemoryUpdate, Trace

if TYPE_CHECKING:
    from memagent_graph.provenance.evidence import Evidence
    from memagent_graph.timeline.view import RunView


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a read so far, over all of its conversations."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server took from its prefix cache."""
    turns: int = 0
    """The number of completions that were requested, including discarded ones."""
    seconds: float = 0.0
    """Wall time of the read, summed over all processes that took part."""
    flops: float | None = None
    """Estimated floating-point operations, if the model's size is known."""
    full_context_flops: float | None = None
    """The estimate for one call of the same model with the whole document in context."""
    document_tokens: int = 0
    """The number of tokens of the document that were processed, including tokens that the policy did not see."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per million tokens, in any currency. Cached prompt tokens count in full, so costs are upper bounds."""

    prompt: float
    completion: float

    @classmethod
    def of(cls, prompt: float | None, completion: float | None) -> Prices | None:
        """Return the prices that a user gave; None if neither is given.

        Raises:
            EvaluationError: only one price is given.
        """
        if prompt is None and completion is None:
            return None
        if prompt is None or completion is None:
            raise EvaluationError(
                "only one of the prices of prompt and completion tokens is given",
                hint="Pass both --price-in and --price-out, per million tokens; 0 is allowed.",
            )
        return cls(prompt, completion)

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of a number of prompt and completion tokens."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1_000_000


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The policy's answer from the memory of a run that may still be running."""

    answer: str
    """The answer; empty if the policy wrote nothing or refused."""
    memory: str
    """The memory from which the policy answered."""
    usage: TokenUsage


@dataclass(frozen=True)
class ReadResult:
    """The outcome of reading one document with one question."""

    run_id: str
    question: str
    document: DocumentRef
    model: str
    answer: str | None
    """The answer; None if the read stopped before it."""
    raw_answer: str | None
    """The complete text of the answer completion."""
    memory: str
    """The memory after the last chunk read."""
    stop_reason: StopReason
    usage: Usage
    chunks_read: int
    updates: tuple[MemoryUpdate, ...] = field(default=(), repr=False)
    """All memory updates, in order."""
    strategy: str = "overwrite"
    """The name of the strategy."""
    strategy_fingerprint: str = ""
    """A hash of the strategy's options, roles, state and edges."""
    trace: Trace = field(default_factory=Trace, repr=False, compare=False)
    """All calls of the policy, as a graph."""
    store_root: Path | None = field(default=None, repr=False, compare=False)
    """The folder with the document's text."""
    value: Any = None
    """A structured answer: an instance of the Pydantic model, or the JSON values for a schema. None if the answer does
    not have the form (`stop_reason` is INVALID_ANSWER), or if there is no `response_format`."""
    response_format: Mapping[str, Any] | None = field(default=None, repr=False)
    """The JSON schema of a structured answer, whose JSON is `answer`."""

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """The text that supports the answer: chunk, character span, quote, page and section.

        It is computed on first access, from the memory lines that have words of the answer, and the passages of their
        chunks that have words of these lines. It is empty if the document's text is no longer stored. Without an
        answer, it has the quotes of all memory lines, which are also in `view().provenance.evidence`.
        """
        return self.view().evidence

    def view(self) -> RunView:
        """Return the result as a `RunView`, the input of timelines; see `memagent_graph.timeline`."""
        from memagent_graph.timeline.view import RunView, load_texts  # noqa: PLC0415  rarely needed

        texts = load_texts(DocumentStore(self.store_root), self.document) if self.store_root else {}
        return RunView(
            run_id=self.run_id,
            question=self.question,
            document=self.document,
            model=self.model,
            strategy=self.strategy,
            trace=self.trace,
            answer=self.answer,
            raw_answer=self.raw_answer,
            stop_reason=self.stop_reason.value,
            **texts,
        )

    @property
    def json_value(self) -> Any:
        """`value` as JSON values. A model is dumped with the field names of its schema."""
        return self.value.model_dump(mode="json", by_alias=True) if isinstance(self.value, BaseModel) else self.value

    @property
    def events(self) -> tuple[ReadEvent, ...]:
        """All events in order, beginning with the omissions of the document."""
        return (*list_document_events(self.document), *(event for call in self.trace.calls for event in call.events))

    @property
    def is_whole(self) -> bool:
        """Whether the policy saw all of the document (or of the selected pages), and its text has no omissions."""
        return self._is_completely_read and not list_document_events(self.document)

    @property
    def _is_completely_read(self) -> bool:
        is_excerpt = self.trace.newest_excerpt_call is not None and self.trace.tokens_shown < self.usage.document_tokens
        return not (is_excerpt or self.stop_reason is StopReason.ENOUGH or self.stop_reason.resumable)

    @property
    def extent(self) -> str:
        """How much of the document the policy saw, in sentences."""
        document = f"pages {self.document['pages']} of the document" if self.document.get("pages") else "the document"
        position = f"after {format_count(self.chunks_read, 'chunk')} of {document}"
        if self._is_completely_read:
            extent = f"All of {document} was read"
        elif self.trace.newest_excerpt_call is not None:
            token_counts = f"{self.trace.tokens_shown:,} of {self.usage.document_tokens:,} tokens"
            extent = f"The policy was shown {token_counts} of {document}, chosen by {self.strategy}"
        elif self.stop_reason.resumable:
            extent = f"Reading stopped at its limit ({self.stop_reason.value}) {position}"
        else:
            extent = f"Reading ended {position}, because the answer was known"
        return ". ".join([extent, *(event.detail for event in list_document_events(self.document))]) + "."

    def findings(self) -> str:
        """Return the answer (or why there is none) and the memory, as text for a language model."""
        if self.stop_reason.resumable:
            position = f"after {format_count(self.chunks_read, 'part')}"
            answer = f"Not known: reading stopped early {position} ({self.stop_reason.value})."
        elif self.stop_reason is StopReason.NO_ANSWER or not self.answer:
            answer = "none was found."
        else:
            answer = self.answer
        return f"Answer: {answer}\n\nNoted while reading:\n{self.memory.strip() or '(nothing)'}"

    def to_dict(self, *, updates: bool = False) -> dict[str, Any]:
        """Return the result as JSON values. `updates=True` adds the memory after every chunk."""
        values: dict[str, Any] = {
            "answer": self.answer,
            "raw_answer": self.raw_answer,
            "memory": self.memory,
            "stop_reason": self.stop_reason.value,
            "run_id": self.run_id,
            "strategy": self.strategy,
            "strategy_fingerprint": self.strategy_fingerprint,
            "question": self.question,
            "model": self.model,
            "document": dict(self.document),
            "chunks_read": self.chunks_read,
            "usage": {**asdict(self.usage), "total_tokens": self.usage.total_tokens},
            "events": [asdict(event) for event in self.events],
            "evidence": [asdict(evidence) for evidence in self.evidence],
        }
        if self.response_format is not None:
            values |= {"value": self.json_value, "response_format": dict(self.response_format)}
        if updates:
            values["updates"] = [asdict(update) for update in self.updates]
        return values
