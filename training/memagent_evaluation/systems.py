"""Systems to evaluate: each answers a question about a stored document, and reports the costs of the answer.

    memagent            the reader with its own strategy
    full_context        one call with the whole document
    no_document         one call with the question alone: shows what the policy knows without reading
    overwrite, refine, retrieval:chunks=4, "file.py:Name", ...: any strategy that `load_strategy` knows

All systems but the first are the reader with another strategy; policy, tokenizer, prompts, sampling, rules, run log and
checkpoints stay the same.

>>> system = load_system("retrieval", reader)  # doctest: +SKIP
>>> attempt = await system.attempt(document, question, answer_tokens=128, run_id=new_run_id())  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from memagent_evaluation.result_table import QuestionOutcome
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import EvaluationError, RunMismatchError, RunNotFoundError
from memagent_graph.events import count_events
from memagent_graph.plain_text import did_you_mean, format_count
from memagent_graph.reader import MemAgent
from memagent_graph.results import ReadResult, Usage
from memagent_graph.strategies import Strategy, is_strategy, list_strategy_names, load_strategy
from memagent_graph.strategies.excerpts import DoesNotFitError, Excerpt, ExcerptWindow, FullContext
from memagent_graph.trace import Span, Trace

READER: Final = "memagent"
NO_DOCUMENT: Final = "no_document"
_SEED_STEP: Final = 1_000
"""The distance between the seeds of two repeats of a question. Retries within a read use the seeds in between."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one question on one document."""

    outcome: QuestionOutcome
    """Never FAILED: a system that fails raises a `MemAgentError`."""
    answer: str | None
    """The answer in the requested form, or the completion if it has another form; None if there is no answer."""
    raw_answer: str | None
    """The completion with the answer."""
    usage: Usage
    """Tokens, calls (`turns`), wall seconds, and estimated operations if the model's size is known."""
    run_id: str | None = None
    """The run in the log; None if the run is not logged."""
    chunks: int = 0
    """The number of chunks that the policy read; 0 for systems that ask about an excerpt."""
    trace: Trace = field(default_factory=Trace, repr=False)
    """The graph of policy calls; empty if unknown."""
    detail: str = ""
    """A note for people who read the results, such as "4,096 of 131,072 tokens shown"."""


class ReaderSystem:
    """A reader with a strategy. With checkpoints, an attempt that was killed continues where it stopped.

    Args:
        name: its name.
        reader: the reader. The caller closes its policy, log and checkpoints.
        strategy: the strategy; by default the reader's own.
    """

    def __init__(self, name: str, reader: MemAgent, strategy: Strategy | None = None) -> None:
        self.name = name
        self.strategy = strategy or reader.strategy
        self._reader = reader
        self._readers: dict[tuple[int, int], MemAgent] = {}
        """The readers, by the task's tokens for an answer and the index of the sample."""

    async def compute_identity(self) -> str:
        """Return the strategy's name, and hashes of the strategy and of its prompts.

        Raises:
            StrategyError, PromptError, BudgetError: like its first read.
        """
        context = (await self._reader.copy(strategy=self.strategy).agraph()).reader_context
        return f"{context.strategy} {context.strategy_fingerprint} {context.prompts.fingerprint}"

    async def attempt(
        self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str, repeat: int = 0
    ) -> Attempt:
        """Read the document, or continue from the checkpoints of an earlier attempt with this id.

        Attempts can run in parallel.

        Args:
            document: a document in the reader's store.
            question: the question.
            answer_tokens: the tokens that the task needs for an answer. The completion may have more (see
                `Task.answer_tokens`), unless the system shows the whole document and the window has no room for more.
            run_id: the attempt's id, unique to sample and system.
            repeat: the index, from 0, of the repeat of the same question; each repeat has its own seed.

        Raises:
            MemAgentError: like `MemAgent.aread` and `MemAgent.aresume`; also if `run_id` belongs to another document or
                question.
        """
        reader = await self._get_reader(answer_tokens, repeat)
        try:
            if (result := await self._resume(reader, document, question, run_id)) is None:
                result = await reader.aread(document, question, run_id=run_id)
        except DoesNotFitError as error:
            return await self._make_misfit_attempt(reader, error)
        return _make_attempt(result, is_logged=reader.run_log is not None)

    async def _get_reader(self, answer_tokens: int, repeat: int) -> MemAgent:
        checkpointer = await self._reader.acheckpointer()
        key = (answer_tokens, repeat)
        if key not in self._readers:
            context = await self._reader.aprepare()
            overrides: dict[str, Any] = {"answer_tokens": max(answer_tokens, context.budget.answer_tokens)}
            if self.name != READER:
                overrides["strategy"] = self._choose_strategy(answer_tokens)
            if repeat and context.sampling.seed is not None:
                overrides["seed"] = context.sampling.seed + repeat * _SEED_STEP
            self._readers[key] = self._reader.copy(checkpoints=checkpointer, **overrides)
        return self._readers[key]

    def _choose_strategy(self, answer_tokens: int) -> Strategy | str:
        """Return the strategy, if possible by name, so that `memagent resume` makes the same reader."""
        if not is_strategy(self.name) or load_strategy(self.name) != self.strategy:
            return self.strategy
        if isinstance(self.strategy, FullContext) and not self.strategy.least_answer_tokens:
            return f"{self.name}:least_answer_tokens={answer_tokens}"
        return self.name

    async def _resume(self, reader: MemAgent, document: DocumentRef, question: str, run_id: str) -> ReadResult | None:
        """Return the result of an earlier attempt, continued; None if there was no earlier attempt."""
        if not reader.keeps_checkpoints:
            return None
        try:
            result = await reader.aresume(run_id)
        except RunNotFoundError:
            return None
        if result.question != question or result.document["key"] != document["key"]:
            raise RunMismatchError(
                "the checkpoints with this run id belong to another question or document",
                hint="Use a separate run id for every attempt, or choose another file for checkpoints.",
                run_id=run_id,
            )
        return result

    async def _make_misfit_attempt(self, reader: MemAgent, error: DoesNotFitError) -> Attempt:
        context = await reader.aprepare()
        usage = Usage(document_tokens=error.document_tokens)
        if context.shape is not None:
            tokens = error.document_tokens + context.budget.question_tokens
            full_context = context.shape.forward_flops(tokens, context.budget.answer_tokens)
            usage = replace(usage, flops=0.0, full_context_flops=full_context)
        detail = f"does not fit: {error.needed_tokens:,} of {error.window_tokens:,} tokens"
        return Attempt(QuestionOutcome.DOES_NOT_FIT, None, None, usage, detail=detail)


@dataclass(frozen=True)
class NoDocument(Excerpt):
    """The question without the document."""

    name: ClassVar[str] = NO_DOCUMENT

    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return an empty excerpt."""
        return [], 0


def _make_attempt(result: ReadResult, *, is_logged: bool) -> Attempt:
    outcome = QuestionOutcome.from_stop_reason(result.stop_reason)
    details = [f"{kind.value}: {count}" for kind, count in count_events(result.events).items()]
    if outcome is QuestionOutcome.UNFINISHED:
        details.insert(0, f"stopped at {result.stop_reason.value} after {format_count(result.chunks_read, 'chunk')}")
    if not result.chunks_read and (shown_tokens := result.trace.tokens_shown):
        details.insert(0, f"{shown_tokens:,} of {result.usage.document_tokens:,} tokens shown")
    return Attempt(
        outcome=outcome,
        answer=result.answer if outcome is QuestionOutcome.ANSWERED else None,
        raw_answer=result.raw_answer,
        usage=result.usage,
        run_id=result.run_id if is_logged else None,
        chunks=result.chunks_read,
        trace=result.trace,
        detail=", ".join(details),
    )


def list_systems() -> tuple[str, ...]:
    """Return the names that `load_system` takes."""
    return (READER, NO_DOCUMENT, *list_strategy_names())


def load_system(name: str, reader: MemAgent) -> ReaderSystem:
    """Return the system of that name.

    Args:
        name: one of `list_systems`, or "file.py:Name" or "module:Name" for a strategy of your own.
        reader: the reader.

    Raises:
        EvaluationError: there is no system of that name.
        StrategyError: a strategy of that name cannot be loaded, or is not a strategy.
        MissingExtraError: the system needs the extra "eval".
    """
    if name == READER:
        return ReaderSystem(name, reader)
    if name == NO_DOCUMENT:
        return ReaderSystem(name, reader, NoDocument())
    if is_strategy(name):
        return ReaderSystem(name, reader, load_strategy(name))
    names = list_systems()
    hint = f'Available systems: {", ".join(names)}. Give your own strategy as "file.py:Name".'
    raise EvaluationError(f"there is no system {name!r}", hint=did_you_mean(name, names, hint))
