"""A live stream's text, read on demand and written to disk, so that earlier chunks can be read again."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from memagent_graph.documents.decoding import StreamDecoder
from memagent_graph.documents.sources import Document
from memagent_graph.errors import DocumentError, DocumentMismatchError, EmptyDocumentError, EncodingError

_END = object()


def utf8(text: str, name: str, position: int, *, replace: bool) -> bytes:
    """Encode text, whose first character is the document's `position`th, for storage.

    Raises:
        EncodingError: a lone surrogate, unless `replace` puts U+FFFD there.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        if replace:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
        raise EncodingError(
            f"{name} has half of a surrogate pair at character {position + error.start}, which no text file can hold",
            hint="Ask for replacement of undecodable bytes to put U+FFFD there.",
        ) from None


class LiveStream:
    """One source and its spool file.

    If the file is not empty, a reader was interrupted: the source must then begin with the text in the file.

    Args:
        document: the live source.
        spool: the file that its text is appended to.
        replace: put U+FFFD where bytes cannot be decoded.
    """

    def __init__(self, document: Document, spool: Path, *, replace: bool) -> None:
        self.name = document.name
        self.ended = False
        self.digest = hashlib.sha256()
        self._source = document.content
        self._replace = replace or document.errors == "replace"
        errors = "replace" if self._replace else "strict"
        self._decoder = StreamDecoder(document.name, encoding=document.encoding, errors=errors)  # type: ignore[arg-type]
        self._spool = spool.open("a+b", buffering=0)
        self._kept = spool.stat().st_size
        self._seen = 0
        self._characters = 0
        self._blank = True
        self._failure: BaseException | None = None
        self._pulling = threading.Lock()
        self._next: asyncio.Task[Any] | None = None

    @property
    def is_async(self) -> bool:
        """Whether only `pull_async` can move it."""
        return isinstance(self._source, AsyncIterator)

    @property
    def stored_bytes(self) -> int:
        """UTF-8 bytes that can be read now."""
        return max(self._kept, self._seen)

    def _wants(self, until_byte: int) -> bool:
        if self._failure is not None:
            raise DocumentError(
                f"the stream {self.name} broke off: {self._failure}", hint="Pass the document again to continue."
            ) from self._failure
        return not self.ended and self._seen < until_byte

    def pull(self, until_byte: int) -> None:
        """Take text from a source that is not async until the given number of bytes is stored, or it ends. May block.

        Raises:
            DocumentError: the source failed, is async, or is another one than the spool's text came from.
        """
        source = self._source
        if not isinstance(source, Iterator):
            raise DocumentError(
                f"the stream {self.name} is asynchronous", hint="Read it with aread, or pass an ordinary iterator."
            )
        with self._pulling:
            while self._wants(until_byte):
                try:
                    piece = next(source, _END)
                except Exception as error:  # noqa: BLE001 - the caller's source may raise anything
                    self._failure = error
                    continue
                self._take(piece)

    async def pull_async(self, until_byte: int) -> None:
        """Take text from either kind of source; one that may block is read in a thread."""
        if not self.is_async:
            await asyncio.to_thread(self.pull, until_byte)
            return
        while self._wants(until_byte):
            if self._next is None:
                self._next = asyncio.ensure_future(self._advance())
            task = self._next
            # A reader that is cancelled must not cancel the source: others, or a resumed run, still need it.
            await asyncio.wait([task])
            if self._next is not task:
                continue
            self._next = None
            error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
            if error is not None:
                self._failure = error
            else:
                self._take(task.result())

    async def _advance(self) -> Any:
        return await anext(self._source, _END)

    def _take(self, piece: Any) -> None:
        try:
            if isinstance(piece, bytes):
                self._store(self._decoder.decode(piece))
            elif isinstance(piece, str):
                self._store(piece)
            elif piece is _END:
                self._store(self._decoder.decode(b"", final=True))
                self._end()
            else:
                raise DocumentError(
                    f"the stream {self.name} gave a {type(piece).__name__}, not text or bytes",
                    hint="Pass an iterator of str or bytes; LangChain Documents go in a list.",
                )
        except Exception as error:
            self._failure = error
            raise

    def _store(self, text: str) -> None:
        data = utf8(text, self.name, self._characters, replace=self._replace)
        overlap = data[: max(0, self._kept - self._seen)]
        if overlap:
            self._spool.seek(self._seen)
            if self._spool.read(len(overlap)) != overlap:
                raise self._mismatch(f"differs from it after byte {self._seen}")
        self._append(data[len(overlap) :])
        self.digest.update(data)
        self._seen += len(data)
        self._characters += len(text)
        self._blank = self._blank and (not text or text.isspace())

    def _append(self, data: bytes) -> None:
        """If the disk is nearly full, one write may store only a part; the next one then fails."""
        left = memoryview(data)
        while left:
            left = left[self._spool.write(left) :]

    def _end(self) -> None:
        if self._seen < self._kept:
            raise self._mismatch(f"ends after {self._seen} of its {self._kept} bytes")
        if self._blank:
            raise EmptyDocumentError(f"the stream {self.name} ended without any text")
        self.ended = True

    def _mismatch(self, how: str) -> DocumentMismatchError:
        return DocumentMismatchError(
            f"{self.name} is not the text that was read before: it {how}", hint="Pass the same document again."
        )

    def close(self) -> None:
        """Close the spool file."""
        self._spool.close()
