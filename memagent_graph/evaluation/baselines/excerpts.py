"""What of a document goes into a call: its two ends, chunks that fit, and how much a window has room for.

Documents are read from the store in a stream; nothing here holds more of one than a call can show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.chunking import Chunk, Chunker, Cursor, start_cursor
from memagent_graph.errors import BudgetError
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.prompts import Prompts
from memagent_graph.tokenizers import Tokenizer

_STEP_TOKENS: Final = 1024
"""Tokens per chunk where a document is only counted."""


class DocumentEnds:
    """A document's length in tokens, and its beginning and end, of at most `most_tokens` each. Reads it through once.

    Blocks; event loops call it in a thread.
    """

    def __init__(self, store: DocumentStore, document: DocumentRef, tokenizer: Tokenizer, most_tokens: int) -> None:
        self._store = store
        self._document = document
        self._tokenizer = tokenizer
        self.tokens = 0
        self._end_byte = 0
        cursor = start_cursor()
        late: deque[tuple[int, Cursor]] = deque()
        for chunk in self._chunker(_STEP_TOKENS).chunks():
            late.append((self.tokens, cursor))
            cursor = chunk.next
            self.tokens += chunk.tokens
            self._end_byte = chunk.end_byte
            while len(late) > 1 and late[1][0] <= self.tokens - most_tokens:
                late.popleft()
        self._late = late

    def whole(self) -> str:
        """All of its text."""
        return self._store.read(self._document, 0, self._end_byte)

    def head(self, tokens: int) -> str:
        """Its first tokens, up to 3 fewer where the last of them would end inside a character."""
        return next((chunk.text for chunk in self._chunker(tokens).chunks()), "") if tokens else ""

    def tail(self, tokens: int) -> str:
        """Its last tokens, up to 3 more where the first of them would begin inside a character."""
        if not tokens:
            return ""
        start = max(0, self.tokens - tokens)
        before, cursor = next((place for place in reversed(self._late) if place[0] <= start), self._late[0])
        if skipped := start - before:
            chunk = next(iter(self._chunker(skipped).chunks(cursor)))
            if chunk.tokens <= skipped:  # a chunk has one character at least, of however many tokens
                cursor = chunk.next
        return self._store.read(self._document, cursor["byte"], self._end_byte)

    def _chunker(self, tokens: int) -> Chunker:
        return Chunker(self._store, self._document, self._tokenizer, tokens)


async def fitting_chunks(asking: Asking, prompts: Prompts, chunk_tokens: int) -> AsyncIterator[Chunk]:
    """A document's chunks; where escaping makes one longer than `chunk_tokens`, a shorter one, as in the reader."""
    context = asking.settings.context
    chunkers: dict[int, Chunker] = {}

    async def cut(tokens: int, cursor: Cursor) -> Chunk | None:
        if tokens not in chunkers:
            chunkers[tokens] = Chunker(context.store, asking.document, context.tokenizer, tokens, context.boundary)
        return await chunkers[tokens].next_chunk(cursor)

    cursor = start_cursor()
    while (chunk := await cut(chunk_tokens, cursor)) is not None:
        while (guarded := prompts.neutralise(chunk.text)) != chunk.text:
            if chunk.tokens <= 1 or context.tokenizer.count(guarded) <= chunk_tokens:
                break
            chunk = await cut(max(1, chunk.tokens // 2), cursor) or chunk
        yield chunk
        cursor = chunk.next


def room(needs: Callable[[str], int], window: int) -> int:
    """The tokens of text that a call has room for; `needs` tells how much of the window a text takes.

    Raises:
        BudgetError: there is none.
    """
    empty = needs("")
    if empty >= window:
        raise BudgetError(
            f"question, wording and answer take {empty:,} tokens and the context window has {window:,}",
            hint="Lower the answer's tokens, shorten the question, or serve the model with a larger window.",
        )
    return window - empty


def longest_fitting(make: Callable[[int], str], needs: Callable[[str], int], window: int) -> str:
    """The text that `make` makes of the largest number of tokens with which the call fits the window.

    A text may take more tokens than it had in its document, where parts are joined or something in it is escaped.

    Raises:
        BudgetError: the window has no room for any text.
    """
    space = tokens = room(needs, window)
    while tokens > 0:
        text = make(tokens)
        taken = needs(text) - (window - space)
        if taken <= space:
            return text
        tokens = min(tokens - 1, tokens * space // taken)
    raise BudgetError(
        f"not one token of the document fits: there is room for {space:,}", hint="Serve the model with a larger window."
    )
