"""Samples whose documents lie in the store: put there ahead of those who ask about them, and removed afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.evaluation.sample_documents import Maker
from memagent_graph.evaluation.samples import Sample


@dataclass(slots=True)
class Prepared:
    """A sample whose document is stored."""

    sample: Sample
    document: DocumentRef
    readers: int
    """How many systems have still to be done with it."""


class Shelf:
    """The documents of an evaluation's open questions. It belongs to one event loop.

    Args:
        store: where they lie.
        maker: what puts them there.
        keep: whether they stay.
    """

    def __init__(self, store: DocumentStore, maker: Maker, *, keep: bool = False) -> None:
        self._store = store
        self._maker = maker
        self._keep = keep
        self._in_use: Counter[str] = Counter()
        self._stored: dict[str, DocumentRef] = {}
        self._making: set[asyncio.Future[tuple[Sample, DocumentRef]]] = set()

    async def prepare(self, task: str, length: int, index: int, readers: int) -> Prepared:
        """Make a sample and store its document, for so many systems.

        Raises:
            EvaluationError: as `Maker.make`.
        """
        sample, document = await self._make(task, length, index)
        self._in_use[document["key"]] += 1
        try:
            self._store.read_bytes(document, 0, 1)
        except DocumentError:
            # Another sample has the same text; its last reader removed it a moment ago. From now on it is counted.
            await self._make(task, length, index)
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
        await self._maker.close()
        await asyncio.gather(*self._making, return_exceptions=True)
        for key in list(self._stored):
            self._remove(key)

    async def _make(self, task: str, length: int, index: int) -> tuple[Sample, DocumentRef]:
        """What the maker makes. It cannot be stopped from outside; `close` waits for what goes on."""
        making = asyncio.ensure_future(self._maker.make(task, length, index))
        self._making.add(making)
        making.add_done_callback(self._made)
        return await asyncio.shield(making)

    def _made(self, making: asyncio.Future[tuple[Sample, DocumentRef]]) -> None:
        self._making.discard(making)
        if not making.cancelled() and making.exception() is None:
            _, document = making.result()
            self._stored[document["key"]] = document

    def _remove(self, key: str) -> None:
        document = self._stored.pop(key)
        if not self._keep:
            self._store.remove(document)
