"""Strategies that ask about an excerpt: they choose parts of a document that fit in the context window.

A policy that follows instructions is asked in one role, "question". Other policies can only write a memory from a
section, and answer from a memory. For them, the excerpt is a document of one chunk: an update with an empty memory and
the excerpt as the section, then the answer.

An excerpt may fill the window, even if the policy was trained on shorter sections. The embedded policy was trained on
sections of up to 288 tokens, and found 52 of 60 facts in excerpts of 827 tokens. With excerpts of 256 tokens, middle
truncation fell from 17 to 3 facts of 60 in documents of 2000 tokens.

Documents are read as a stream, so at most the text of one call is in memory.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Final, NotRequired

from langgraph.graph import END

from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.documents.chunking import Chunker, Cursor, start_cursor
from memagent_graph.errors import BudgetError
from memagent_graph.prompts import read_template
from memagent_graph.reading.state import ReaderContext, ReaderState
from memagent_graph.reading.steps import Change, StepContext, end_with_answer
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.retriever import BM25Retriever, Retriever, rank_texts
from memagent_graph.roles import ANSWER, UPDATE, Role, complete_prompts, read_answer_instructions
from memagent_graph.trace import Span, Writes

_COUNTING_CHUNK_TOKENS: Final = 1024
"""Tokens per chunk when the tokens of a document are only counted."""
DOES_NOT_FIT: Final = "does_not_fit"
"""The stop reason in the run log if the document does not fit."""
BOUNDARY_TOKENS: Final = 16
"""Margin for token boundaries: inside a prompt, a text may have a few tokens more or fewer than on its own."""
_CHUNK_TOKENS: Final = 256
_MIN_CHUNKS: Final = 8
"""Minimum number of chunks in the window. With 4 chunks in a window of 1024 tokens, the chunk with the fact was shown
for 13 of 30 questions on documents of 16,000 tokens with near misses; with chunks of half the length, for 27."""
_TAIL_PERCENT: Final = 50
"""A chunk ends with a sentence that ends in this last part of it (percent). With 15 %, chunks of 80 tokens cut 17 of
320 planted sentences in two; with 50 %, none."""


QUESTION: Final = Role(
    "question",
    Writes.ANSWER,
    frozenset({"chunk"}),
    lambda answer_format: f"{read_template('question')}\n\n{read_answer_instructions(answer_format)}",
    "answer_tokens",
    fills_window=True,
    optional=True,
)


class DoesNotFitError(BudgetError):
    """The whole document does not fit in the context window. All numbers are tokens."""

    def __init__(self, needed_tokens: int, window_tokens: int, document_tokens: int) -> None:
        super().__init__(
            f"one call with the whole document needs {needed_tokens:,} tokens "
            f"and the context window has {window_tokens:,}",
            hint="Read it in chunks, or serve the model with a larger window.",
        )
        self.needed_tokens, self.window_tokens, self.document_tokens = needed_tokens, window_tokens, document_tokens


class ExcerptState(ReaderState):
    """The state of strategies that show an excerpt."""

    excerpt: NotRequired[list[dict[str, Any]]]
    """The spans to show, as `Span.stored`, in the document's order."""


class ExcerptWindow:
    """The context window of one call, and the text that fits in it. Reads text synchronously."""

    def __init__(self, step: StepContext) -> None:
        self.context, self.document, self.question = step.context, step.state["document"], step.question
        self.asks_once = QUESTION.name in self.context.prompts.templates
        self.role = QUESTION if self.asks_once else UPDATE
        self.window_tokens = self.context.window or self.context.budget.context_window
        self.reply_tokens = self.role.count_reply_tokens(self.context.budget)
        """The maximum length of the reply."""
        self.separator = "\n\n[...]\n\n" if self.asks_once else "\n\n"
        self.available_tokens = self.window_tokens - self.count_call_tokens("")
        """The number of tokens of text that fit."""

    def count_call_tokens(self, text: str) -> int:
        """Count the tokens of a call about a text: its prompt and its maximum reply."""
        messages = self.context.prompts.messages(self.role.name, self.question, chunk=text, schema=self.context.schema)
        prompt = sum(self.context.tokenizer.count(message["content"]) for message in messages)
        return prompt + CHAT_TEMPLATE_TOKENS + self.reply_tokens

    def read_text(self, spans: Sequence[Span]) -> str:
        """Read the text of spans, in order. Adjacent spans are joined without a separator."""
        byte_ranges: list[tuple[int, int]] = []
        for span in spans:
            if byte_ranges and byte_ranges[-1][1] == span.start_byte:
                byte_ranges[-1] = byte_ranges[-1][0], span.end_byte
            else:
                byte_ranges.append((span.start_byte, span.end_byte))
        texts = [self.context.store.read(self.document, *byte_range) for byte_range in byte_ranges]
        return self.separator.join(text.strip() for text in texts) if len(texts) > 1 else "".join(texts)

    def choose_role(self, text: str) -> Role:
        """Return the role, with a shorter maximum reply if the text leaves less room in the window."""
        available_tokens = self.window_tokens - self.count_call_tokens(text) + self.reply_tokens
        return replace(self.role, max_tokens=available_tokens) if available_tokens < self.reply_tokens else self.role

    def fit_to_window(self, choose: Callable[[int], list[Span]]) -> list[Span]:
        """Return the longest excerpt with which the call fits in the window.

        A text may need more tokens in a prompt than in the document: spans are joined, and characters are escaped.

        Args:
            choose: returns the spans of an excerpt with a number of tokens.

        Raises:
            BudgetError: not even one token of text fits.
        """
        tokens = self.available_tokens
        while tokens > 0:
            spans = choose(tokens)
            excess_tokens = self.count_call_tokens(self.read_text(spans)) - self.window_tokens
            if excess_tokens <= 0:
                return spans
            tokens = min(tokens - 1, tokens * self.available_tokens // (self.available_tokens + excess_tokens))
        raise BudgetError(
            f"not one token of the document fits: there is room for {max(0, self.available_tokens):,}",
            hint="Lower the answer's tokens, shorten the question, or serve the model with a larger window.",
        )

    def make_chunker(self, tokens: int) -> Chunker:
        """Return a chunker of the document that ignores sentence boundaries."""
        return Chunker(self.context.store, self.document, self.context.tokenizer, tokens)


class Excerpt(Strategy):
    """choose_excerpt -> show_excerpt: asks the question once, about a part of the document."""

    roles: ClassVar[tuple[Role, ...]] = (QUESTION, UPDATE, ANSWER)
    state: ClassVar[type] = ExcerptState
    reads_all: ClassVar[bool] = False

    def wire(self, graph: StrategyGraph) -> None:
        """Add the two steps."""
        graph.add_node("choose_excerpt", self._choose_excerpt)
        graph.add_node("show_excerpt", self._show_excerpt)
        graph.add_edge(OPEN_DOCUMENT, "choose_excerpt")
        graph.add_edge("choose_excerpt", "show_excerpt")
        graph.add_edge("show_excerpt", END)

    @abstractmethod
    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return the spans to show, in the document's order, and the document's tokens.

        Raises:
            BudgetError: no excerpt fits in the window.
            DoesNotFitError: the strategy shows the whole document, and it does not fit.
        """

    async def _choose_excerpt(self, state: ExcerptState, step: StepContext) -> Change:
        try:
            spans, tokens = await self.choose(ExcerptWindow(step))
        except DoesNotFitError:
            step.log_failure(DOES_NOT_FIT)
            raise
        step.count_document_tokens(tokens)
        return {"excerpt": [span.stored for span in spans]}

    async def _show_excerpt(self, state: ExcerptState, step: StepContext) -> Change:
        window, spans = ExcerptWindow(step), [Span(**span) for span in state.get("excerpt") or ()]
        text = window.read_text(spans)
        memory = ""
        reply = await step.ask(window.choose_role(text), memory="", chunk=text, reads=spans, parents=(), slot=-1)
        if not window.asks_once:
            memory = reply.text
            reply = await step.ask(ANSWER, memory=memory)
        return end_with_answer(reply, memory, step)


@dataclass(frozen=True)
class FullContext(Excerpt):
    """One call with the whole document, if it fits in the window, as for a model with a long context."""

    least_answer_tokens: int = 0
    """Minimum length of the reply. If the document leaves less room than the maximum reply, the reply gets the rest,
    but at least this many tokens. With 0, the maximum reply must fit. An evaluation passes the task's answer length,
    so that a document of the window's length fits, as in RULER."""

    name: ClassVar[str] = "full_context"
    reads_all: ClassVar[bool] = True

    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return the whole document, or raise `DoesNotFitError`."""
        ends = await asyncio.to_thread(DocumentEnds, window.make_chunker)
        whole_span = ends.cut(0, ends.tokens)
        spare_tokens = max(0, window.reply_tokens - self.least_answer_tokens) if self.least_answer_tokens else 0
        needed_tokens = window.window_tokens - window.available_tokens + ends.tokens
        if ends.tokens <= window.available_tokens + spare_tokens + BOUNDARY_TOKENS:
            needed_tokens = await asyncio.to_thread(lambda: window.count_call_tokens(window.read_text([whole_span])))
        if needed_tokens - spare_tokens > window.window_tokens:
            raise DoesNotFitError(needed_tokens - spare_tokens, window.window_tokens, ends.tokens)
        return [whole_span], ends.tokens


@dataclass(frozen=True)
class MiddleTruncation(Excerpt):
    """One call with the document's beginning and end, half of the window for each, without the middle."""

    name: ClassVar[str] = "middle_truncation"
    shown_extent: ClassVar[str] = "its beginning and its end, and the middle only if all of it fits"

    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return the document's beginning and end, or the whole document if it fits."""
        ends = await asyncio.to_thread(DocumentEnds, window.make_chunker)

        def truncate(tokens: int) -> list[Span]:
            if tokens >= ends.tokens:
                return [ends.cut(0, ends.tokens)]
            tail_tokens = tokens // 2
            head = ends.cut(0, tokens - tail_tokens)
            return [head, ends.cut(ends.tokens - tail_tokens, ends.tokens, index=1)] if tail_tokens else [head]

        return await asyncio.to_thread(window.fit_to_window, truncate), ends.tokens


@dataclass(frozen=True)
class Retrieval(Excerpt):
    """Retrieval-augmented generation in one call: chunks that end with a sentence, ranked by BM25.

    Raises:
        StrategyError: a number is too small.
        MissingExtraError: the extra "recall" (a part of "eval") is not installed.
    """

    chunks: int = 0
    """The number of chunks to show. 0 means as many as fit."""
    chunk_tokens: int = 0
    """The number of tokens of a chunk. 0 means 256, or an eighth of the room in the window if that is less."""
    retriever: Retriever = field(default_factory=BM25Retriever, compare=False)
    """Ranks chunks. The default is BM25."""

    name: ClassVar[str] = "retrieval"
    shown_extent: ClassVar[str] = "only the passages that a search finds for each question, not the whole document"

    def __post_init__(self) -> None:
        self.require_at_least(0, "chunks", "chunk_tokens")

    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return the best chunks that fit (or the beginning of the best chunk), and the document's tokens."""
        context, spans = window.context, list[Span]()
        chunk_tokens = self.chunk_tokens or min(_CHUNK_TOKENS, max(1, window.available_tokens // _MIN_CHUNKS))
        chunker = Chunker(
            context.store, window.document, context.tokenizer, chunk_tokens, "sentence", tail_percent=_TAIL_PERCENT
        )

        def iter_texts() -> Iterator[str]:
            for chunk in chunker.chunks():
                spans.append(Span.of(chunk))
                yield chunk.text

        ranking = await rank_texts(self.retriever, iter_texts(), window.question)
        ranking = list(dict.fromkeys((*ranking, *range(len(spans)))))
        best_spans = [spans[index] for index in ranking[: self.chunks or None]]

        def choose_best(max_tokens: int) -> list[Span]:
            """Return the best chunks with at most `max_tokens` in total, in the document's order."""
            totals = accumulate(span.tokens for span in best_spans)
            fitting_spans = [span for span, total in zip(best_spans, totals, strict=True) if total <= max_tokens]
            if fitting_spans:
                return sorted(fitting_spans, key=lambda span: span.start_byte)
            text, best_span = context.take_first_tokens(window.read_text(best_spans[:1]), max_tokens), best_spans[0]
            end_char, end_byte = best_span.start_char + len(text), best_span.start_byte + len(text.encode())
            return [replace(best_span, end_char=end_char, end_byte=end_byte, tokens=max_tokens)]

        return await asyncio.to_thread(window.fit_to_window, choose_best), sum(span.tokens for span in spans)


def count_prompt_overhead(context: ReaderContext) -> int:
    """Count the tokens that a call needs besides text, question and reply: the templates, and a margin for boundaries.

    A document that must fit in the window has to be shorter by this number.
    """
    prompts = complete_prompts(Excerpt.roles, context.prompts, trained_prompts_only=context.trained_prompts_only)
    template = prompts.templates[QUESTION.name if QUESTION.name in prompts.templates else UPDATE.name]
    return context.tokenizer.count(template.literal) + CHAT_TEMPLATE_TOKENS + BOUNDARY_TOKENS


class DocumentEnds:
    """Counts a document's tokens and finds its beginning and its end. Counting reads the whole document once.

    Args:
        make_chunker: makes a chunker of the document for a number of tokens.
    """

    def __init__(self, make_chunker: Callable[[int], Chunker]) -> None:
        self._make_chunker = make_chunker
        self.tokens = 0
        self._cursors = [(0, start_cursor())]
        """The start of each chunk and the document's end, with the number of tokens before it."""
        for chunk in make_chunker(_COUNTING_CHUNK_TOKENS).chunks():
            self.tokens += chunk.tokens
            self._cursors.append((self.tokens, chunk.next))

    def cut(self, start: int, end: int, index: int = 0) -> Span:
        """Return the span of the tokens from `start` to `end`; a token inside a character belongs to what follows."""
        start_tokens, first = self._find_token(start) if start else self._cursors[0]  # a text may have no tokens
        end_tokens, last = self._find_token(end)
        return Span(index, first["char"], last["char"], first["byte"], last["byte"], end_tokens - start_tokens)

    def _find_token(self, tokens: int) -> tuple[int, Cursor]:
        """Return the position after `tokens` tokens, or up to 3 fewer if it would be inside a character."""
        tokens_before, cursor = next(entry for entry in reversed(self._cursors) if entry[0] <= tokens)
        if skipped_tokens := tokens - tokens_before:
            chunk = next(iter(self._make_chunker(skipped_tokens).chunks(cursor)))
            if chunk.tokens <= skipped_tokens:  # a chunk has at least one character, of any number of tokens
                return tokens_before + chunk.tokens, chunk.next
        return tokens_before, cursor
