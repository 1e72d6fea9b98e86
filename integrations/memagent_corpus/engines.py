"""Engines read the documents of a corpus. `corpus_run` chooses the documents and stores the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from memagent_corpus.corpus_documents import CorpusDocument
from memagent_corpus.corpus_reader import CorpusReader
from memagent_corpus.corpus_rows import Row


@dataclass(frozen=True, slots=True)
class Work:
    """A document and the questions that still have to be answered. It can be pickled."""

    document: CorpusDocument
    questions: tuple[str, ...]
    """Questions without an answer."""
    begun: bool = True
    """Whether an earlier process began to read the document, so that checkpoints may exist."""
    answered: frozenset[str] = frozenset()
    """The ids of the document's rows that have an answer."""

    async def read(self, reader: CorpusReader) -> list[Row]:
        """Read the document and return its rows (`CorpusReader.read_one`)."""
        return await reader.read_one(self.document, self.questions, may_resume=self.begun, answered=self.answered)


NextWork: TypeAlias = Callable[[], Awaitable[Work | None]]
"""Returns the next document to read; None if there are no more. Several tasks may call it at the same time."""
Keep: TypeAlias = Callable[[Work, Sequence[Row]], Awaitable[bool]]
"""Stores a document's rows, which are safe when it returns. It returns False when a limit is reached: an engine that
has taken documents in advance should then stop. Several tasks may call it at the same time."""


class Engine(Protocol):
    """Reads documents, in this process or elsewhere."""

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """Read all documents from `next_work` and pass their rows to `keep`. It may be cancelled.

        A document whose rows are not kept, for any reason, is read again in the next pass or run.

        Raises:
            MemAgentError: an error that every other document would cause too.
        """
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Reads documents in this process, concurrently in one event loop.

    Args:
        reader: reads the documents.
        documents_in_flight: the number of documents that are read at the same time.
    """

    reader: CorpusReader
    documents_in_flight: int = 64

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """Implement `Engine.read`."""
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
