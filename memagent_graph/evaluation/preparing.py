"""Samples whose documents lie in the store: put there ahead of those who ask about them, and removed afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError, EvaluationError
from memagent_graph.evaluation.samples import Sample, Task

_Made = TypeVar("_Made")


@dataclass(slots=True)
class Prepared:
    """A sample whose document is stored."""

    sample: Sample
    document: DocumentRef
    readers: int
    """How many systems have still to be done with it."""


class Shelf:
    """The documents of an evaluation's open questions. It belongs to one event loop; texts are made in threads.

    Args:
        store: where they lie.
        tasks: what they are made by, by name.
        keep: whether they stay there.
    """

    def __init__(self, store: DocumentStore, tasks: Mapping[str, Task], *, keep: bool = False) -> None:
        self._store = store
        self._tasks = tasks
        self._keep = keep
        self._in_use: Counter[str] = Counter()
        self._stored: dict[str, DocumentRef] = {}
        self._making: set[asyncio.Future[Any]] = set()
        self._given_up = threading.Event()

    async def prepare(self, task: str, length: int, index: int, readers: int) -> Prepared:
        """Make a sample and store its document, for so many systems.

        Raises:
            EvaluationError: it cannot be made, or there is no room for it.
        """
        sample = await self._in_thread(self._sample, task, length, index)
        document = await self._in_thread(self._add, sample)
        self._in_use[document["key"]] += 1
        try:
            self._store.read_bytes(document, 0, 1)
        except DocumentError:
            # Another sample has the same text; its last reader removed it a moment ago. From now on it is counted.
            await self._in_thread(self._add, sample)
        return Prepared(sample, document, readers)

    def done_with(self, prepared: Prepared) -> None:
        """One of its systems is done with a sample; after the last one its document goes."""
        prepared.readers -= 1
        if prepared.readers == 0:
            key = prepared.document["key"]
            self._in_use[key] -= 1
            if self._in_use[key] == 0:
                self._remove(key)

    async def close(self) -> None:
        """Give up what is being made, and remove all that is still there."""
        self._given_up.set()
        await asyncio.gather(*self._making, return_exceptions=True)
        for key in list(self._stored):
            self._remove(key)

    def _remove(self, key: str) -> None:
        document = self._stored.pop(key)
        if not self._keep:
            self._store.remove(document)

    async def _in_thread(self, make: Callable[..., _Made], *arguments: Any) -> _Made:
        """What a function makes. A thread cannot be stopped from outside; `close` waits for those that go on."""
        making = asyncio.ensure_future(asyncio.to_thread(make, *arguments))
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        return await asyncio.shield(making)

    def _sample(self, task: str, length: int, index: int) -> Sample:
        return self._tasks[task].sample(length, index)

    def _add(self, sample: Sample) -> DocumentRef:
        pieces = _AsFile(sample.text(), self._given_up.is_set)
        try:
            document = self._store.add(Document.from_file(pieces, name=sample.id))  # type: ignore[arg-type]
        except OSError as error:
            raise EvaluationError(
                f"the document of {sample.id} cannot be stored in {self._store.root}: {error.strerror or error}",
                hint="Make room: as many documents lie there as are read at once (--concurrency).",
            ) from error
        except DocumentError as error:
            raise EvaluationError(f"the document of {sample.id} cannot be stored: {error}") from error
        self._stored[document["key"]] = document
        return document


class _GivenUpError(Exception):
    """Nobody waits for this text any more."""


class _AsFile:
    """Pieces of text as an open file, which is read once, from its beginning to its end."""

    def __init__(self, pieces: Iterator[str], given_up: Callable[[], bool]) -> None:
        self._pieces = pieces
        self._given_up = given_up

    def read(self, size: int) -> str:
        """At least so many characters, or fewer at the end."""
        read: list[str] = []
        length = 0
        for piece in self._pieces:
            read.append(piece)
            length += len(piece)
            if self._given_up():
                raise _GivenUpError
            if length >= size:
                break
        return "".join(read)
