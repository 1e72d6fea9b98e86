"""One attempt of a baseline: completions under the reader's rules, what they cost, and the attempt made of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import EvaluationError, MemAgentError
from memagent_graph.evaluation.result_table import Outcome
from memagent_graph.evaluation.systems import Attempt, SystemSettings
from memagent_graph.policy import Messages
from memagent_graph.reading.ask import Drafts
from memagent_graph.reading.state import NO_COST, ChunkSpan, Meter, ReaderState
from memagent_graph.results import Usage


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion that was to hold an answer."""

    text: str
    """The completion without its reasoning; empty where the policy wrote nothing, or refused."""
    answer: str | None
    """The answer in the form asked for, or the whole text where it has not that form; None where there is no text."""


class Asking:
    """Asks the policy on behalf of one attempt, and adds up the cost.

    Empty, refused and truncated completions meet the same rules as the reader's, by the same code. Nothing is entered
    in the run log, whose runs are trajectories of the reader. Calls may run side by side.

    Raises:
        EvaluationError: the question is empty.
    """

    def __init__(self, settings: SystemSettings, document: DocumentRef, question: str, answer_tokens: int) -> None:
        if not question.strip():
            raise EvaluationError("the question is empty", hint="See that the task gives every sample one.")
        context = settings.context
        self.settings = settings
        self.document = document
        self.question = question
        self.answer_tokens = answer_tokens
        self.store = context.store
        self.tokenizer = context.tokenizer
        self.prompts = context.prompts
        self.budget = replace(context.budget, answer_tokens=answer_tokens)
        self._context = replace(
            context, budget=self.budget, sampling=replace(context.sampling, logprobs=False), run_log=None
        )
        self._began = time.perf_counter()
        self._total = NO_COST
        self._events: dict[str, int] = {}

    async def answer(self, messages: Messages, chunk_index: int | None = None) -> Reply:
        """Ask for an answer; `chunk_index` says where in the document an error happened."""
        async with self._call(None, chunk_index) as drafts:
            text, answer = await drafts.answer(messages)
        return Reply(text, answer if text else None)

    async def memory(self, messages: Messages, previous: str, chunk_index: int | None = None) -> str:
        """Ask for a memory, as the reader does at a chunk."""
        async with self._call(_span(chunk_index or 0), chunk_index) as drafts:
            return await drafts.memory(messages, previous)

    def first_tokens(self, text: str, tokens: int) -> str:
        """As much of `text` as that many tokens hold."""
        ids = self.tokenizer.encode(text)
        if len(ids) <= tokens:
            return text
        lengths = (self.tokenizer.prefix_chars(text, ids, kept) for kept in range(tokens, 0, -1))
        return text[: next((length for length in lengths if length is not None), 0)].rstrip()

    def attempt(
        self, reply: Reply, document_tokens: int, *details: str, chunks: int = 0, memory: str | None = None
    ) -> Attempt:
        """The attempt that ended with this reply."""
        events = [f"{kind}: {number}" for kind, number in self._events.items()]
        return Attempt(
            outcome=Outcome.ANSWERED if reply.text else Outcome.NO_ANSWER,
            answer=reply.answer,
            raw_answer=reply.text or None,
            usage=self._usage(document_tokens),
            chunks=chunks,
            memory=memory,
            detail=", ".join([*filter(None, details), *events]),
        )

    def does_not_fit(self, document_tokens: int, needed: int) -> Attempt:
        """The attempt that was not made, because it would take `needed` tokens."""
        return Attempt(
            outcome=Outcome.DOES_NOT_FIT,
            answer=None,
            raw_answer=None,
            usage=self._usage(document_tokens),
            detail=f"does not fit: {needed:,} of {self.settings.context_window:,} tokens",
        )

    @asynccontextmanager
    async def _call(self, span: ChunkSpan | None, chunk_index: int | None) -> AsyncIterator[Drafts]:
        """One question to the policy, retries included; what it cost is added up even where it fails."""
        # A meter holds one turn on the processor, so calls that run side by side need one each.
        context = replace(self._context, meter=Meter())
        drafts = Drafts(ReaderState(question=self.question, document=self.document), context, span)
        try:
            yield drafts
        except MemAgentError as error:
            if error.chunk_index is None:
                error.chunk_index = chunk_index
            raise
        finally:
            context.meter.turn.end()
            self._total = drafts.add_to(self._total, 0.0)
            for event in drafts.events:
                self._events[event["kind"]] = self._events.get(event["kind"], 0) + 1

    def _usage(self, document_tokens: int) -> Usage:
        shape, total = self._context.shape, self._total
        everything = document_tokens + self.budget.question_tokens
        return Usage(
            prompt_tokens=total["prompt_tokens"],
            completion_tokens=total["completion_tokens"],
            cached_tokens=total["cached_tokens"],
            turns=total["turns"],
            seconds=time.perf_counter() - self._began,
            flops=None if shape is None else total["flops"],
            full_context_flops=None if shape is None else shape.forward_flops(everything, self.answer_tokens),
        )


def _span(index: int) -> ChunkSpan:
    """A chunk, without which `Drafts` writes no memory; where it lies only matters to the log."""
    return ChunkSpan(index=index, start_char=0, end_char=0, start_byte=0, end_byte=0, tokens=0, shortened=False)
