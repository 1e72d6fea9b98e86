"""Strategies that ask about an excerpt: which parts of a document they show, and how much fits in the window.

A policy that follows instructions is asked in one role, "question". One that was trained on its own two prompts
understands no others: it can only write a memory from a section, and answer from a memory. So a text is treated like a
document of one chunk: an update with an empty memory and the text as its section, then the answer.

A text may fill the window, though such a policy was trained on shorter sections. The embedded policy was trained on at
most 288 tokens, and found 52 of 60 facts in texts of 827; with 256 tokens instead of as many as fit, middle truncation
fell from 17 to 3 facts of 60 in documents of 2000 tokens.

Documents are read from the store in a stream; at most the text of one call is in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NotRequired, TypeVar

from langgraph.graph import END

from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.calls import Span, Writes
from memagent_graph.documents.chunking import Chunker, Cursor, start_cursor
from memagent_graph.errors import BudgetError
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.prompts import AnswerFormat
from memagent_graph.reading.state import ReaderContext, ReaderState
from memagent_graph.reading.steps import Change, StepContext, end_with_answer
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, UPDATE, Role, answer_form, prompts_for, read_template

_STEP_TOKENS: Final = 1024
"""Tokens per chunk if a document is only counted."""
DOES_NOT_FIT: Final = "does_not_fit"
"""How the log says that a run ended because the document does not fit."""
SEAM_TOKENS: Final = 16
"""A text in its prompt may have a few tokens more or fewer than alone, because of the words around it."""
T = TypeVar("T")


def _question_words(answer_format: AnswerFormat) -> str:
    """Return the question on a text, and, as in the shipped prompt for the answer, its form."""
    return f"{read_template('question')}\n\n{answer_form(answer_format)}"


QUESTION: Final = Role(
    "question", Writes.ANSWER, frozenset({"chunk"}), _question_words, "answer_tokens", fills_window=True, optional=True
)


class DoesNotFitError(BudgetError):
    """The whole document should be shown, but does not fit in the window. All numbers are tokens."""

    def __init__(self, needed: int, window: int, document_tokens: int) -> None:
        super().__init__(
            f"one call with the whole document needs {needed:,} tokens and the context window has {window:,}",
            hint="Read it in chunks, or serve the model with a larger window.",
        )
        self.needed, self.window, self.document_tokens = needed, window, document_tokens


class ExcerptState(ReaderState):
    """The state that these strategies add."""

    excerpts: NotRequired[list[list[dict[str, Any]]]]
    """The excerpts to show, one after the other, until there is an answer; each as `Span.stored`."""
    shown: NotRequired[int]
    """How many of them were shown."""


class ExcerptWindow:
    """The context window of one call: the text that it shows, and what fits. Blocks while it reads text."""

    def __init__(self, step: StepContext) -> None:
        self.context, self.document, self.question = step.context, step.state["document"], step.question
        self.asks_once = QUESTION.name in self.context.prompts.templates
        self.role = QUESTION if self.asks_once else UPDATE
        self.window = self.context.window or self.context.budget.context_window
        self.reply_tokens = self.role.tokens(self.context.budget)
        """The maximum length of the reply."""
        self.separator = "\n\n[...]\n\n" if self.asks_once else "\n\n"
        self.room = self.window - self.needs("")
        """How many tokens of text fit."""

    def needs(self, text: str) -> int:
        """Return how many tokens of the window a question on a text takes: prompt and reply."""
        messages = self.context.prompts.messages(self.role.name, self.question, chunk=text, schema=self.context.schema)
        prompt = sum(self.context.tokenizer.count(message["content"]) for message in messages)
        return prompt + CHAT_TEMPLATE_TOKENS + self.reply_tokens

    def text(self, spans: Sequence[Span]) -> str:
        """Return the text of spans in order; those that follow each other are one part."""
        runs: list[tuple[int, int]] = []
        for span in spans:
            if runs and runs[-1][1] == span.start_byte:
                runs[-1] = runs[-1][0], span.end_byte
            else:
                runs.append((span.start_byte, span.end_byte))
        texts = [self.context.store.read(self.document, *run) for run in runs]
        return self.separator.join(text.strip() for text in texts) if len(texts) > 1 else "".join(texts)

    def role_for(self, text: str) -> Role:
        """Return the role, with a shorter reply if the text leaves less of the window."""
        left = self.window - self.needs(text) + self.reply_tokens
        bound = min(self.reply_tokens, left)
        return replace(self.role, bound=bound) if bound < self.role.tokens(self.context.budget) else self.role

    def most_that_fits(self, choose: Callable[[int], list[Span]]) -> list[Span]:
        """Return the choice of `choose` for the largest number of tokens with which the call fits in the window.

        Raises:
            BudgetError: no text fits in the window.
        """
        empty = self.window - self.room
        return longest_fitting(choose, lambda spans: self.needs(self.text(spans)) - empty, self.room)

    def chunker(self, tokens: int) -> Chunker:
        """Return what cuts the document into chunks of that many tokens, ignoring sentences."""
        return Chunker(self.context.store, self.document, self.context.tokenizer, tokens)


class Excerpt(Strategy):
    """open_document -> choose_excerpts -> show_excerpt -> ...: the question on parts of the text, until one answers."""

    roles: ClassVar[tuple[Role, ...]] = (QUESTION, UPDATE, ANSWER)
    state: ClassVar[type] = ExcerptState
    reads_all: ClassVar[bool] = False
    tries: int = 1
    """How many excerpts are shown at most."""

    def wire(self, graph: StrategyGraph) -> None:
        """Add the two steps."""
        graph.add_node("choose_excerpts", self._choose_excerpts)
        graph.add_node("show_excerpt", self._show_excerpt)
        graph.add_edge(OPEN, "choose_excerpts")
        graph.add_edge("choose_excerpts", "show_excerpt")
        graph.add_conditional_edges("show_excerpt", unless_answered, ["show_excerpt", END])

    @abstractmethod
    async def choose(self, window: ExcerptWindow) -> tuple[list[list[Span]], int]:
        """Return the excerpts to show, one or more, the best first, with spans in order; and the document's tokens.

        Raises:
            BudgetError: it does not fit in the window.
        """

    async def _choose_excerpts(self, state: ExcerptState, step: StepContext) -> Change:
        try:
            excerpts, tokens = await self.choose(ExcerptWindow(step))
        except DoesNotFitError:
            step.ends_with_error(DOES_NOT_FIT)
            raise
        step.count_document(tokens)
        return {"excerpts": [[span.stored for span in spans] for spans in excerpts], "shown": 0}

    async def _show_excerpt(self, state: ExcerptState, step: StepContext) -> Change:
        window, shown = ExcerptWindow(step), state.get("shown") or 0
        excerpts = state.get("excerpts") or []
        spans, is_last = [Span(**span) for span in excerpts[shown]], shown + 1 == len(excerpts)
        text = window.text(spans)
        memory = ""
        reply = await step.ask(window.role_for(text), memory="", chunk=text, reads=spans, parents=(), slot=-1 - shown)
        if not window.asks_once:
            memory = reply.text
            reply = await step.ask(ANSWER, memory=memory, slot=shown)
        if not is_last and gives_no_answer(reply.value) and step.limit() is None:
            return {"shown": shown + 1}
        return end_with_answer(reply, memory, step)


def unless_answered(state: ReaderState) -> str:
    """Return the route after an excerpt: to the next one, or to the end."""
    return END if state.get("stop_reason") else "show_excerpt"


def words_around(context: ReaderContext) -> int:
    """Return a call's tokens besides text, question and reply: of its template, the chat template, and the joints.

    Documents that have to fit in a window with these must be shorter by this number.
    """
    prompts = prompts_for(Excerpt.roles, context.prompts, own_words_only=context.own_words_only)
    template = prompts.templates[QUESTION.name if QUESTION.name in prompts.templates else UPDATE.name]
    return context.tokenizer.count(template.literal) + CHAT_TEMPLATE_TOKENS + SEAM_TOKENS


class DocumentEnds:
    """A document's length in tokens, and its beginning and end, of at most `most_tokens` each. Reads it once.

    Args:
        chunker: makes a chunker of the document for a number of tokens.
        most_tokens: the maximum for `tail`.
    """

    def __init__(self, chunker: Callable[[int], Chunker], most_tokens: int) -> None:
        self._chunker = chunker
        self.tokens = 0
        self._end = start_cursor()
        late: deque[tuple[int, Cursor]] = deque()
        for chunk in chunker(_STEP_TOKENS).chunks():
            late.append((self.tokens, self._end))
            self._end = chunk.next
            self.tokens += chunk.tokens
            while len(late) > 1 and late[1][0] <= self.tokens - most_tokens:
                late.popleft()
        self._late = late

    def whole(self) -> Span:
        """Return all of it."""
        return self._to_end(start_cursor(), self.tokens)

    def head(self, tokens: int) -> Span | None:
        """Return its first tokens, up to 3 fewer if the last one would end inside a character."""
        chunk = next(iter(self._chunker(tokens).chunks()), None) if tokens else None
        return None if chunk is None else Span.of(chunk)

    def tail(self, tokens: int) -> Span | None:
        """Return its last tokens, up to 3 more if the first one would begin inside a character."""
        if not tokens:
            return None
        start = max(0, self.tokens - tokens)
        before, cursor = next((place for place in reversed(self._late) if place[0] <= start), self._late[0])
        if skipped := start - before:
            chunk = next(iter(self._chunker(skipped).chunks(cursor)))
            if chunk.tokens <= skipped:  # a chunk has one character at least, of however many tokens
                before, cursor = before + chunk.tokens, chunk.next
        return replace(self._to_end(cursor, self.tokens - before), index=1)

    def _to_end(self, cursor: Cursor, tokens: int) -> Span:
        end = self._end
        return Span(0, cursor["char"], end["char"], cursor["byte"], end["byte"], tokens)


def longest_fitting(make: Callable[[int], T], taken: Callable[[T], int], room: int) -> T:
    """Return the result of `make` for the largest number of tokens with which `taken` is within the limit.

    A text may take more tokens than in its document, if parts are joined or something in it is escaped.

    Raises:
        BudgetError: not even one token fits.
    """
    tokens = room
    while tokens > 0:
        made = make(tokens)
        if (used := taken(made)) <= room:
            return made
        tokens = min(tokens - 1, tokens * room // used)
    raise BudgetError(
        f"not one token of the document fits: there is room for {max(0, room):,}",
        hint="Lower the answer's tokens, shorten the question, or serve the model with a larger window.",
    )
