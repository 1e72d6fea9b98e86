"""Cuts a stored document into chunks of an exact number of tokens, from the beginning or from a cursor.

The text is tokenised in pieces (`pieces.py`), which together have the ids of the whole text. A chunk is the next
`chunk_tokens` ids, across pieces. If it would end inside a character as a reader sees it (a grapheme cluster), the
character moves to the next chunk. A `Cursor` has the position of the piece and the number of its used tokens, so a
resumed read has the same chunks.
"""

from __future__ import annotations

import codecs
import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal
from weakref import WeakValueDictionary

from typing_extensions import TypedDict

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.headings import find_heading_starts
from memagent_graph.tokenizers import TextTokens, Tokenizer
from memagent_graph.tokenizers.pieces import MAX_PIECE_BYTES, PIECE_BYTES, find_safe_cut
from memagent_graph.words import (
    find_last_character_end,
    find_paragraph_ends,
    find_sentence_ends,
    find_word_ends,
    is_character_end,
    is_unspaced,
)

Boundary = Literal["token", "sentence", "paragraph", "heading"]
"""Where a chunk ends: after any token, or near its full size at the end of a sentence or paragraph, or at a heading."""

_TAIL_PERCENT = 15
_HEADING_TAIL_PERCENT = 50
_MAX_CANDIDATES = 4
_MAX_CHARACTER_TOKENS = 64
"""Maximum tokens of a character that is not split."""
_MAX_EXCESS_TOKENS = 3
"""Maximum excess tokens of a chunk, for a code point that has several tokens."""
_MAX_TOKEN_CHARACTERS = 40
_TAILS: dict[Boundary, tuple[tuple[Boundary, int], ...]] = {
    "sentence": (("sentence", _TAIL_PERCENT),),
    "paragraph": (("paragraph", _TAIL_PERCENT),),
    "heading": (("heading", _HEADING_TAIL_PERCENT), ("paragraph", _TAIL_PERCENT)),
}
"""For each boundary: the boundaries to try in order, and how much of the chunk's end to search, in percent."""


class Cursor(TypedDict):
    """The start of the next chunk, as graph state contains it.

    `index` is the chunk's index; `char` and `byte` are its position. `piece_char` and `piece_byte` are the position of
    the piece that contains the start, and `piece_tokens` is the number of tokens of the piece before the start.
    """

    index: int
    char: int
    byte: int
    piece_char: int
    piece_byte: int
    piece_tokens: int


def start_cursor() -> Cursor:
    """Return the cursor of a document's first chunk."""
    return Cursor(index=0, char=0, byte=0, piece_char=0, piece_byte=0, piece_tokens=0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a document.

    Attributes:
        index: the chunk's index, from 0.
        start_char: the position of its first character in the document.
        end_char: the position after its last character.
        start_byte: like `start_char`, in UTF-8 bytes.
        end_byte: like `end_char`, in UTF-8 bytes.
        tokens: the number of its tokens.
        text: the characters from `start_char` to `end_char`.
        next: the cursor of the next chunk.
        last: whether it is the document's last chunk.
        splits: whether it ends inside a character: one that is too long, or that does not end with a token.
    """

    index: int
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    tokens: int
    text: str
    next: Cursor
    last: bool
    splits: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Piece:
    """A tokenised part of a document, from `start_byte` to `end_byte`. `is_last` is True for the last piece."""

    start_byte: int
    end_byte: int
    text: str
    tokens: TextTokens
    is_last: bool


_pieces: Final = WeakValueDictionary[tuple[str, str, int], _Piece]()
"""The pieces in use, by document, tokenizer and position: many questions tokenise a document once."""
_newest_pieces: Final = deque[_Piece](maxlen=16)
"""Keeps pieces of the usual size for readers that come a little later."""


class Chunker:
    """Cuts one document into chunks. It keeps its current piece; all chunkers share their pieces.

    Args:
        store: the store of the document.
        ref: the document.
        tokenizer: the policy's tokenizer.
        chunk_tokens: tokens per chunk. The last chunk may have fewer. A chunk that would end inside a character has up
            to 64 fewer; a longer character is split. A chunk has up to 3 more if a code point has several tokens.
        boundary: with `sentence` or `paragraph`, a chunk ends with the last one that ends in its last 15 %, if any.
            With `heading`, it ends before the last heading or numbered clause in its second half, or else as with
            `paragraph`. In scripts without spaces, a chunk without such an end ends with a word.
        tail_percent: replaces the 15 %, for short chunks with few sentences.
    """

    def __init__(
        self,
        store: DocumentStore,
        ref: DocumentRef,
        tokenizer: Tokenizer,
        chunk_tokens: int,
        boundary: Boundary = "token",
        *,
        tail_percent: int | None = None,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self._store = store
        self._ref = ref
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._boundary_tails = [
            (end, percent if end == "heading" else tail_percent or percent) for end, percent in _TAILS.get(boundary, ())
        ]
        self._current: _Piece | None = None

    def chunks(self, cursor: Cursor | None = None) -> Iterator[Chunk]:
        """Yield all chunks from `cursor` on.

        Raises:
            DocumentError: as `next_chunk`.
        """
        chunk = self.next_chunk(cursor or start_cursor())
        while chunk is not None:
            yield chunk
            chunk = None if chunk.last else self.next_chunk(chunk.next)

    def next_chunk(self, cursor: Cursor) -> Chunk | None:
        """Return the chunk at `cursor`; None at the document's end.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        piece_char, first_token = cursor["piece_char"], cursor["piece_tokens"]
        piece = self._load_piece(cursor["piece_byte"])
        start = cursor["char"] - piece_char
        if start >= len(piece.text):
            return None
        texts: list[str] = []
        tokens = 0
        while first_token + self._chunk_tokens - tokens > len(piece.tokens) and not piece.is_last:
            texts.append(piece.text[start:])
            tokens += len(piece.tokens) - first_token
            piece_char += len(piece.text)
            piece = self._load_piece(piece.end_byte)
            first_token = start = 0
        # In the current piece, the chunk begins at `first_token` and `start`, and ends at `end_token` and `end`.
        target = first_token + self._chunk_tokens - tokens
        end_token: int | None = len(piece.tokens)
        end = len(piece.text)
        if target < len(piece.tokens) or not piece.is_last:
            chunk_end = self._find_end(piece, first_token, start, target)
            if chunk_end is None and texts:
                chunk_end = first_token, start
            end_token, end = chunk_end or self._find_end_inside_character(piece, first_token, start, target)
        text = "".join([*texts, piece.text[start:end]])
        end_char = cursor["char"] + len(text)
        end_byte = cursor["byte"] + (len(text) if text.isascii() else len(text.encode()))
        ends_piece = end == len(piece.text)
        tokens += self._tokenizer.count(piece.text[start:end]) if end_token is None else end_token - first_token
        begins_piece = end_token is None or (ends_piece and not piece.is_last)
        next_cursor = Cursor(
            index=cursor["index"] + 1,
            char=end_char,
            byte=end_byte,
            piece_char=end_char if begins_piece else piece_char,
            piece_byte=end_byte if begins_piece else piece.start_byte,
            piece_tokens=0 if begins_piece or end_token is None else end_token,
        )
        return Chunk(
            index=cursor["index"],
            start_char=cursor["char"],
            end_char=end_char,
            start_byte=cursor["byte"],
            end_byte=end_byte,
            tokens=tokens,
            text=text,
            next=next_cursor,
            last=ends_piece and piece.is_last,
            splits=not is_character_end(piece.text, end),
        )

    def _find_end(self, piece: _Piece, first_token: int, start: int, target: int) -> tuple[int, int] | None:
        """Return where a chunk ends in a piece, near `target` tokens: the numbers of tokens and characters before.

        `first_token` and `start` are these numbers for the chunk's start. None if no character ends near enough.
        """
        ends = self._iter_token_ends(piece, target, max(first_token, target - _MAX_CHARACTER_TOKENS - 1))
        character_ends = (position for position in ends if is_character_end(piece.text, position[1]))
        last_token, last_char = next(character_ends, (first_token, -1))
        if last_char <= start:
            return None
        for boundary, percent in self._boundary_tails:
            min_token = last_token - self._chunk_tokens * percent // 100
            low_token, low_char = self._find_last_token_end(piece, min_token, first_token)
            for end in self._find_boundaries(piece.text, max(start, low_char), last_char, boundary):
                is_last = end == last_char
                end_token = last_token if is_last else self._count_tokens_before(piece, low_token, last_token, end)
                if end_token is not None and is_character_end(piece.text, end):
                    return end_token, end
        return last_token, last_char

    def _find_end_inside_character(
        self, piece: _Piece, first_token: int, start: int, target: int
    ) -> tuple[int | None, int]:
        """Return the end of a chunk inside a character that is too long or does not end with a token.

        The number of tokens is None if no token ends there. The rest of the piece is then tokenised again.
        """
        below = self._iter_token_ends(piece, target, max(first_token, target - _MAX_CHARACTER_TOKENS))
        above = reversed([*self._iter_token_ends(piece, target + _MAX_EXCESS_TOKENS, target)])
        for end_token, end in itertools.chain(below, above):
            if end > start:
                return end_token, end
        max_tokens, min_end = target - first_token, start + 1
        ends = range(min(len(piece.text), min_end + max_tokens * _MAX_TOKEN_CHARACTERS) + 1)
        count = self._tokenizer.count
        return None, bisect_right(ends, max_tokens, min_end + 1, key=lambda end: count(piece.text[start:end])) - 1

    def _count_tokens_before(self, piece: _Piece, low: int, high: int, end: int) -> int | None:
        """Return the number of tokens, from `low` to `high`, that end exactly at the character `end`.

        None if a token crosses it.
        """
        count = bisect_left(range(high), end, low, key=lambda count: self._find_last_token_end(piece, count, low)[1])
        return count if self._find_last_token_end(piece, count, low) == (count, end) else None

    def _find_last_token_end(self, piece: _Piece, high: int, low: int) -> tuple[int, int]:
        """Return the first pair of `_iter_token_ends`; without one, `low` and -1."""
        return next(self._iter_token_ends(piece, high, low), (low, -1))

    def _iter_token_ends(self, piece: _Piece, high: int, low: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of tokens, from `high` to above `low`, that end with a code point, each with its end."""
        for count in range(high, low, -1):
            end = piece.tokens.prefix_chars(count)
            if end is not None:
                yield count, end

    def _load_piece(self, start_byte: int) -> _Piece:
        """Return the piece that begins at a byte, from a chunker or from the store."""
        if self._current is not None and self._current.start_byte == start_byte:
            return self._current
        key = (self._ref["key"], self._tokenizer.fingerprint, start_byte)
        self._current = _pieces.get(key)
        if self._current is not None:
            return self._current
        for max_bytes in (PIECE_BYTES, MAX_PIECE_BYTES):
            data = self._store.read_bytes(self._ref, start_byte, start_byte + max_bytes + 1)
            is_last = len(data) <= max_bytes
            # The bytes may end inside a character, which is then left out.
            text = codecs.getincrementaldecoder("utf-8")().decode(data[:max_bytes], is_last)
            cut = len(text) if is_last else find_safe_cut(text, len(text) // 2)
            if cut is not None:
                break
        else:
            cut = find_last_character_end(text, len(text) - 1, 1)
        text = text[:cut]
        end_byte = start_byte + len(text.encode())
        self._current = _pieces[key] = _Piece(start_byte, end_byte, text, self._tokenizer.tokenize(text), is_last)
        if len(text) <= PIECE_BYTES:
            _newest_pieces.append(self._current)
        return self._current

    def _find_boundaries(self, text: str, start: int, end: int, boundary: Boundary) -> list[int]:
        """Return positions between two characters where a chunk may end, best first."""
        if boundary == "heading":
            return find_heading_starts(text, start, end, self._ref["media_type"])[: -_MAX_CANDIDATES - 1 : -1]
        ends = find_paragraph_ends(text, start, end)[: -_MAX_CANDIDATES - 1 : -1] if boundary == "paragraph" else []
        positions: list[int] = []
        search_start = max(start, end - 400)  # a sentence nearly always ends after it
        sentence_ends = find_sentence_ends(text, search_start, end) or find_sentence_ends(text, start, search_start)
        for sentence_end in sentence_ends[: -_MAX_CANDIDATES - 1 : -1]:
            # Some tokenizers have one token for a full stop and the newline after it.
            positions += sentence_end, start + len(text[start:sentence_end].rstrip())
        ends += [position for position in positions if position > start][:_MAX_CANDIDATES]
        if not ends and is_unspaced(text[end - 1]):
            ends = find_word_ends(text, max(start, end - 64), end)[: -_MAX_CANDIDATES - 1 : -1]
        return ends
