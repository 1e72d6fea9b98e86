"""Samples' documents: made in threads and stored before they are needed, removed after their last question is done."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from memagent_evaluation.samples import Sample, Task
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError, EvaluationError

_WORKERS: Final = 2


class StoredSample(NamedTuple):
    """A sample whose document is stored, and how many characters that has."""

    sample: Sample
    document: DocumentRef
    characters: int


class SampleError(EvaluationError):
    """A task has no such sample, for example because the length is too small, or its code failed; others can be
    made.
    """


class SampleMaker:
    """Makes samples and stores their documents, in a pool of threads.

    Args:
        tasks: the tasks by name.
        store: where documents are put.
        seed: the tasks' seed, for messages.
    """

    workers = _WORKERS
    """How many are made at once."""

    def __init__(self, tasks: Mapping[str, Task], store: DocumentStore, seed: int | None = None) -> None:
        self._tasks = tasks
        self._store = store
        self._seed = seed
        self._pool = ThreadPoolExecutor(_WORKERS, "sample")
        self._given_up = threading.Event()

    async def make(self, task: str, length: int, index: int) -> StoredSample:
        """Return a sample of a task, with its document in the store.

        Raises:
            SampleError: the task does not have it.
            EvaluationError: its document cannot be made or stored.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._stored, task, length, index)

    async def close(self) -> None:
        """Cancel running work as soon as possible."""
        self._given_up.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    def _stored(self, name: str, length: int, index: int) -> StoredSample:
        task, seed = self._tasks[name], self._seed
        sample = sample_of(task, length, index, seed)

        def text() -> Iterator[str]:
            try:
                for piece in sample.text():
                    if not isinstance(piece, str):
                        raise TypeError(f"it gave {type(piece).__name__} where text was expected")
                    yield piece
            except Exception as error:
                raise _sample_error(error, "text", task, length, index, seed) from error

        try:
            pieces = _AsFile(text(), self._given_up.is_set)
            document = self._store.add(Document.from_file(pieces, name=sample.id))  # type: ignore[arg-type]
        except OSError as error:
            raise EvaluationError(
                f"the document of {sample.id} cannot be stored in {self._store.root}: {error.strerror or error}",
                hint="Make room: as many documents lie there as are read at once (--concurrency).",
            ) from error
        except DocumentError as error:
            raise EvaluationError(f"the document of {sample.id} cannot be stored: {error}") from error
        return StoredSample(sample, document, pieces.characters)


@dataclass(slots=True)
class Prepared:
    """A sample whose document is stored."""

    sample: Sample
    document: DocumentRef
    characters: int
    """The document's."""
    readers: int
    """How many systems still need it."""


class OpenDocuments:
    """The documents of an evaluation's open questions. It belongs to one event loop.

    Args:
        store: where they lie.
        maker: makes and stores them.
        keep: whether to keep them.
    """

    def __init__(self, store: DocumentStore, maker: SampleMaker, *, keep: bool = False) -> None:
        self._store = store
        self._maker = maker
        self._keep = keep
        self._in_use: Counter[str] = Counter()
        self._stored: dict[str, DocumentRef] = {}
        self._making: set[asyncio.Future[StoredSample]] = set()

    async def prepare(self, task: str, length: int, index: int, readers: int) -> Prepared:
        """Make a sample and store its document, for a number of systems.

        Raises:
            EvaluationError: like `SampleMaker.make`.
        """
        made = await self._make(task, length, index)
        document = made.document
        self._in_use[document["key"]] += 1
        try:
            self._store.read_bytes(document, 0, 1)
        except DocumentError:
            # Another sample has the same text, and its last reader has just removed it. From now on it is counted.
            await self._make(task, length, index)
        return Prepared(*made, readers)

    def done_with(self, prepared: Prepared) -> None:
        """One of its systems is done with a sample; after the last one its document is removed."""
        prepared.readers -= 1
        if prepared.readers == 0:
            key = prepared.document["key"]
            self._in_use[key] -= 1
            if self._in_use[key] == 0:
                self._remove(key)

    async def close(self) -> None:
        """Cancel running work, and remove all remaining documents."""
        await self._maker.close()
        await asyncio.gather(*self._making, return_exceptions=True)
        for key in list(self._stored):
            self._remove(key)

    async def _make(self, task: str, length: int, index: int) -> StoredSample:
        """Return the maker's result. It cannot be cancelled from outside; `close` waits for running work."""
        making = asyncio.ensure_future(self._maker.make(task, length, index))
        self._making.add(making)
        making.add_done_callback(self._made)
        return await asyncio.shield(making)

    def _made(self, making: asyncio.Future[StoredSample]) -> None:
        self._making.discard(making)
        if not making.cancelled() and making.exception() is None:
            document = making.result().document
            self._stored[document["key"]] = document

    def _remove(self, key: str) -> None:
        document = self._stored.pop(key)
        if not self._keep:
            self._store.remove(document)


def sample_of(task: Task, length: int, index: int, seed: int | None = None) -> Sample:
    """Return a task's sample; `seed` is the task's seed, for the message.

    Raises:
        SampleError: the task does not have it, or the task's own code failed.
    """
    try:
        return task.sample(length, index)
    except Exception as error:
        raise _sample_error(error, "sample", task, length, index, seed) from error


def _sample_error(error: Exception, method: str, task: Task, length: int, index: int, seed: int | None) -> SampleError:
    if isinstance(error, EvaluationError):
        return SampleError(error.message, hint=error.hint)
    of = f"length {length}, index {index}" + ("" if seed is None else f", seed {seed}")
    return SampleError(
        f"{method}() of the task {task.name} failed at {of}: {type(error).__name__}: {error}",
        hint="Mend the task's code; the same call in Python shows where it failed. --resume then continues.",
    )


class _GivenUpError(Exception):
    """The text is no longer needed."""


class _AsFile:
    """Pieces of text as an open file, which is read once, from its beginning to its end.

    Attributes:
        characters: how many have been read.
    """

    def __init__(self, pieces: Iterator[str], given_up: Callable[[], bool]) -> None:
        self.characters = 0
        self._pieces = pieces
        self._given_up = given_up

    def read(self, size: int) -> str:
        """At least this many characters, or fewer at the end."""
        read: list[str] = []
        length = 0
        for piece in self._pieces:
            read.append(piece)
            length += len(piece)
            if self._given_up():
                raise _GivenUpError
            if length >= size:
                break
        self.characters += length
        return "".join(read)
