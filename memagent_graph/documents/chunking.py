"""Cuts a stored document into chunks of an exact number of tokens, from the beginning or from a cursor.

The text is tokenised in pieces (`pieces.py`), which together have the ids of the whole text. A chunk is the next
`chunk_tokens` ids, across pieces. If it would end inside a character as a reader sees it (a grapheme cluster), the
character moves to the next chunk. A `Cursor` has the piece and the number of its used tokens, so a resumed read has the
same chunks.
"""

from __future__ import annotations

import codecs
import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.headings import find_heading_starts, is_markdown
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
"""The ends of chunks: after any token, or near the size at the end of a sentence or paragraph, or before a heading."""

_TAIL_PERCENT = 15
_HEADING_TAIL_PERCENT = 50
_CANDIDATES = 4
_CHARACTER_TOKENS = 64
"""Maximum tokens of a character that is not cut."""
_MAX_EXCESS_TOKENS = 3
"""Maximum excess tokens of a chunk, for a code point that has several tokens."""
_CACHED_BYTES = 8 * 1024 * 1024
_BYTES_PER_TOKEN = 136
"""The memory of a token with its place."""
_MAX_TOKEN_CHARACTERS = 40
_BYTES_PER_PIECE = 600
"""The memory of a piece besides its text and tokens. It matters in a corpus of tiny documents."""
_TAILS: dict[Boundary, tuple[tuple[Boundary, int], ...]] = {
    "sentence": (("sentence", _TAIL_PERCENT),),
    "paragraph": (("paragraph", _TAIL_PERCENT),),
    "heading": (("heading", _HEADING_TAIL_PERCENT), ("paragraph", _TAIL_PERCENT)),
}
"""By boundary: the boundaries to try in order, with the last part of the chunk (percent) to search."""


class Cursor(TypedDict):
    """The start of the next chunk, in the form that graph state contains.

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
        splits: whether it ends inside a character, which is too long or has no token at its end.
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tokenised part of a document, from `start_byte` to `end_byte`. `at_end` is True for the last piece."""

    start_byte: int
    end_byte: int
    text: str
    tokens: TextTokens
    at_end: bool


class _PieceCache:
    """The most recent pieces, shared by all chunkers of a process: many questions tokenise a document once."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._bytes = 0
        self._pieces: OrderedDict[tuple[str, str, int], _Piece] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str, int]) -> _Piece | None:
        with self._lock:
            piece = self._pieces.get(key)
            if piece is not None:
                self._pieces.move_to_end(key)
            return piece

    def put(self, key: tuple[str, str, int], piece: _Piece) -> None:
        with self._lock:
            if key in self._pieces:
                return
            self._pieces[key] = piece
            self._bytes += self._compute_cost(piece)
            while self._bytes > self._largest_bytes and len(self._pieces) > 1:
                self._bytes -= self._compute_cost(self._pieces.popitem(last=False)[1])

    @staticmethod
    def _compute_cost(piece: _Piece) -> int:
        text = len(piece.text) * (1 if piece.text.isascii() else 4)
        return _BYTES_PER_PIECE + len(piece.tokens) * _BYTES_PER_TOKEN + text


_PIECES = _PieceCache(_CACHED_BYTES)


class Chunker:
    """Cuts one document. It keeps its current piece; all chunkers share a small cache of pieces.

    Args:
        store: the store of the document.
        ref: the document.
        tokenizer: the policy's tokenizer.
        chunk_tokens: tokens per chunk. The last chunk may have fewer. A chunk that would end inside a character has up
            to 64 fewer; a longer character is split. A chunk has up to 3 more if a code point has several tokens.
        boundary: `sentence` and `paragraph` end a chunk at the last such end within its last 15 %, if there is one.
            `heading` ends it before the last heading or numbered clause within its second half, or else as `paragraph`.
            In scripts without spaces, a chunk without such an end ends with a word.
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
        self._tails = [
            (end, percent if end == "heading" else tail_percent or percent) for end, percent in _TAILS.get(boundary, ())
        ]
        self._current: _Piece | None = None

    def chunks(self, cursor: Cursor | None = None) -> Iterator[Chunk]:
        """Yield all chunks from `cursor` on.

        Raises:
            DocumentError: as `next_chunk`.
        """
        chunk = self.next_chunk(cursor if cursor is not None else start_cursor())
        while chunk is not None:
            yield chunk
            chunk = None if chunk.last else self.next_chunk(chunk.next)

    def next_chunk(self, cursor: Cursor) -> Chunk | None:
        """Return the chunk at `cursor`; None at the document's end.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        piece_char, first = cursor["piece_char"], cursor["piece_tokens"]
        piece = self._make_piece(cursor["piece_byte"])
        at_char = cursor["char"] - piece_char
        if at_char >= len(piece.text):
            return None
        texts: list[str] = []
        tokens, splits = 0, False
        taken: int | None
        while True:
            wanted = first + self._chunk_tokens - tokens
            if wanted >= len(piece.tokens) and piece.at_end:
                taken, cut = len(piece.tokens), len(piece.text)
            elif wanted <= len(piece.tokens):
                place = self._cut(piece, first, at_char, wanted) or ((first, at_char) if texts else None)
                splits = place is None
                taken, cut = place or self._find_character(piece, first, at_char, wanted)
            else:
                texts.append(piece.text[at_char:])
                tokens += len(piece.tokens) - first
                piece_char += len(piece.text)
                piece = self._make_piece(piece.end_byte)
                first = at_char = 0
                continue
            texts.append(piece.text[at_char:cut])
            break
        text = "".join(texts)
        end_char = cursor["char"] + len(text)
        end_byte = cursor["byte"] + (len(text) if text.isascii() else len(text.encode()))
        whole = cut == len(piece.text)
        tokens += self._tokenizer.count(piece.text[at_char:cut]) if taken is None else taken - first
        begins_piece = taken is None or (whole and not piece.at_end)
        following = Cursor(
            index=cursor["index"] + 1,
            char=end_char,
            byte=end_byte,
            piece_char=end_char if begins_piece else piece_char,
            piece_byte=end_byte if begins_piece else piece.start_byte,
            piece_tokens=0 if begins_piece or taken is None else taken,
        )
        return Chunk(
            index=cursor["index"],
            start_char=cursor["char"],
            end_char=end_char,
            start_byte=cursor["byte"],
            end_byte=end_byte,
            tokens=tokens,
            text=text,
            next=following,
            last=whole and piece.at_end,
            splits=splits and not is_character_end(piece.text, cut),
        )

    def _cut(self, piece: _Piece, first: int, at_char: int, wanted: int) -> tuple[int, int] | None:
        """Return the numbers of tokens and characters of a piece for a chunk that ends near `wanted` tokens.

        None if no character ends within the last tokens.
        """
        fewest = max(first, wanted - _CHARACTER_TOKENS - 1)
        ends = self._iter_token_ends(piece, wanted, fewest)
        taken, cut = next(((number, end) for number, end in ends if is_character_end(piece.text, end)), (first, -1))
        if cut <= at_char:
            return None
        for boundary, percent in self._tails:
            low, low_char = self._find_last_token_end(piece, taken - self._chunk_tokens * percent // 100, first)
            for end in self._ends(piece.text, max(at_char, low_char), cut, boundary):
                before = taken if end == cut else self._count_tokens_before(piece, low, taken, end)
                if before is not None and is_character_end(piece.text, end):
                    return before, end
        return taken, cut

    def _find_character(self, piece: _Piece, first: int, at_char: int, wanted: int) -> tuple[int | None, int]:
        """Return the end of a chunk inside a character that is too long or has no token at its end.

        The number of tokens is None if no token ends there. The rest of the piece is then tokenised again.
        """
        below = self._iter_token_ends(piece, wanted, max(first, wanted - _CHARACTER_TOKENS))
        above = reversed([*self._iter_token_ends(piece, wanted + _MAX_EXCESS_TOKENS, wanted)])
        for taken, cut in itertools.chain(below, above):
            if cut > at_char:
                return taken, cut
        room, fewest = wanted - first, at_char + 1
        ends = range(min(len(piece.text), fewest + room * _MAX_TOKEN_CHARACTERS) + 1)
        count = self._tokenizer.count
        return None, bisect_right(ends, room, fewest + 1, key=lambda end: count(piece.text[at_char:end])) - 1

    def _count_tokens_before(self, piece: _Piece, low: int, high: int, end: int) -> int | None:
        """Return the number of tokens, from `low` to `high`, that end exactly at the character `end`.

        None if a token crosses it.
        """
        taken = bisect_left(range(high), end, low, key=lambda number: self._find_last_token_end(piece, number, low)[1])
        return taken if self._find_last_token_end(piece, taken, low) == (taken, end) else None

    def _find_last_token_end(self, piece: _Piece, most: int, fewest: int) -> tuple[int, int]:
        """Return the first of `_iter_token_ends`, or `fewest` and -1."""
        return next(self._iter_token_ends(piece, most, fewest), (fewest, -1))

    def _iter_token_ends(self, piece: _Piece, most: int, fewest: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of tokens, from `most` to above `fewest`, that end with a code point, and these ends."""
        for number in range(most, fewest, -1):
            end = piece.tokens.prefix_chars(number)
            if end is not None:
                yield number, end

    def _make_piece(self, start_byte: int) -> _Piece:
        """Return the piece that begins at a byte."""
        if self._current is not None and self._current.start_byte == start_byte:
            return self._current
        key = (self._ref["key"], self._tokenizer.fingerprint, start_byte)
        self._current = _PIECES.get(key)
        if self._current is not None:
            return self._current
        for largest in (PIECE_BYTES, MAX_PIECE_BYTES):
            data = self._store.read_bytes(self._ref, start_byte, start_byte + largest + 1)
            at_end = len(data) <= largest
            # The bytes may end inside a character, which is then left out.
            text = codecs.getincrementaldecoder("utf-8")().decode(data[:largest], at_end)
            cut = len(text) if at_end else find_safe_cut(text, len(text) // 2)
            if cut is not None:
                break
        else:
            cut = find_last_character_end(text, len(text) - 1, 1)
        text = text[:cut]
        self._current = _Piece(
            start_byte, start_byte + len(text.encode()), text, self._tokenizer.tokenize(text), at_end
        )
        _PIECES.put(key, self._current)
        return self._current

    def _ends(self, text: str, start: int, end: int, boundary: Boundary) -> list[int]:
        """Return positions between two characters where a chunk may end, best first."""
        if boundary == "heading":
            markdown = is_markdown(self._ref["media_type"])
            return find_heading_starts(text, start, end, markdown=markdown)[: -_CANDIDATES - 1 : -1]
        ends = find_paragraph_ends(text, start, end)[: -_CANDIDATES - 1 : -1] if boundary == "paragraph" else []
        places: list[int] = []
        near = max(start, end - 400)  # there is nearly always one
        sentences = find_sentence_ends(text, near, end) or find_sentence_ends(text, start, near)
        for place in sentences[: -_CANDIDATES - 1 : -1]:
            # Some tokenizers keep a full stop and the newline after it in one token.
            places += place, start + len(text[start:place].rstrip())
        ends += [place for place in places if place > start][:_CANDIDATES]
        if not ends and is_unspaced(text[end - 1]):
            ends = find_word_ends(text, max(start, end - 64), end)[: -_CANDIDATES - 1 : -1]
        return ends
