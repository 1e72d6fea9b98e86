"""Engines: where the documents of a corpus are read. `corpus_run` decides what is read, and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from memagent_graph.corpus.corpus_documents import CorpusDocument
from memagent_graph.corpus.corpus_reader import CorpusReader
from memagent_graph.corpus.corpus_rows import Row


@dataclass(frozen=True, slots=True)
class Work:
    """A document and what is left to do for it. It can be pickled."""

    document: CorpusDocument
    questions: tuple[str, ...]
    """Those that have no answer yet."""
    begun: bool = True
    """Whether an earlier process has begun it, so that there may be checkpoints."""
    answered: frozenset[str] = frozenset()
    """The ids of its rows that have an answer."""

    async def read(self, reader: CorpusReader) -> list[Row]:
        """Its rows, as `CorpusReader.read_one` returns them."""
        return await reader.read_one(self.document, self.questions, may_resume=self.begun, answered=self.answered)


NextWork: TypeAlias = Callable[[], Awaitable[Work | None]]
"""The next document to read; None if none is left. Any number of tasks may call it."""
Keep: TypeAlias = Callable[[Work, Sequence[Row]], Awaitable[bool]]
"""Keeps a document's rows; they are safe when it returns. It is false when a limit is reached: an engine that has taken
more than it reads should end then. Any number of tasks may call it."""


class Engine(Protocol):
    """Reads documents somewhere."""

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """Read until no document is left, and have all rows kept. It may be cancelled.

        A document whose rows were not kept, whatever the reason, is read in the next sweep or the next run.

        Raises:
            MemAgentError: what every other document would meet as well.
        """
        ...


@dataclass(frozen=True)
class InThisProcess:
    """The engine on one machine: documents side by side in one event loop.

    Args:
        reader: reads them.
        documents_in_flight: how many are read at once.
    """

    reader: CorpusReader
    documents_in_flight: int = 64

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """As `Engine` says."""
        workers = [asyncio.create_task(self._work(next_work, keep)) for _ in range(max(1, self.documents_in_flight))]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, next_work: NextWork, keep: Keep) -> None:
        while (work := await next_work()) is not None:
            await keep(work, await work.read(self.reader))
