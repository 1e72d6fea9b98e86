"""Samples' documents: made and stored before they are needed, removed after their last question is done.

They are made in threads or, if there is much text, in separate processes: a million tokens of text take about a second
of processor time, and in one interpreter with the reader's event loop both would wait for each other, and the policy's
server for both.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from memagent_evaluation.samples import Needle, Sample, Task
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError, EvaluationError

MUCH: Final = 4_000_000
"""With at least this many tokens of text, processes are worth their start of some seconds."""
_MOST_PROCESSES: Final = 8

_Told: TypeAlias = tuple[str, tuple[str, ...], tuple[Needle, ...], DocumentRef, int]
"""A sample from a pool, possibly from another process: question, gold, needles, document and its characters."""


class Made(NamedTuple):
    """A sample whose document is stored, and how many characters that has."""

    sample: Sample
    document: DocumentRef
    characters: int


class SampleError(EvaluationError):
    """A task has no such sample, for example because the length is too small, or its code failed; others can be
    made.
    """


class Maker:
    """Makes samples and stores their documents, in a pool of threads or processes.

    Args:
        tasks: the tasks by name.
        pool: where they are made.
        workers: how many at once.
        make: the function that makes one there, from its task's name, its length and its index.
    """

    def __init__(
        self, tasks: Mapping[str, Task], pool: Executor, workers: int, make: Callable[[str, int, int], _Told]
    ) -> None:
        self.workers = workers
        self._tasks = tasks
        self._pool = pool
        self._make = make
        self._given_up = threading.Event()

    async def make(self, task: str, length: int, index: int) -> Made:
        """One sample of a task, with its document in the store.

        Raises:
            SampleError: the task does not have it.
            EvaluationError: its document cannot be made or stored.
        """
        loop = asyncio.get_running_loop()
        try:
            told = await loop.run_in_executor(self._pool, self._make, task, length, index)
        except BrokenProcessPool as error:
            raise EvaluationError(
                f"the process that was to make {task}/{length}/{index} died",
                hint="It may have run out of memory; --resume continues.",
            ) from error
        own, (question, gold, needles, document, characters) = self._tasks[task], told
        text: Callable[[], Iterator[str]] = lambda: own.sample(length, index).text()  # noqa: E731  made when asked for
        return Made(Sample(own, length, index, question, gold, text, needles), document, characters)

    async def close(self) -> None:
        """Cancel running work as soon as possible."""
        self._given_up.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


class ThreadMaker(Maker):
    """Makes documents in this process.

    Args:
        tasks: the tasks by name.
        store: where they are put.
        seed: the tasks' seed, for messages.
    """

    def __init__(self, tasks: Mapping[str, Task], store: DocumentStore, seed: int | None = None) -> None:
        def make(task: str, length: int, index: int) -> _Told:
            return _made(tasks[task], length, index, store, self._given_up.is_set, seed)

        super().__init__(tasks, ThreadPoolExecutor(2, "sample"), 2, make)


class ProcessMaker(Maker):
    """Makes documents in other processes, which load the tasks by themselves.

    Args:
        names: the names to load the tasks by.
        settings: the tasks' settings.
        tasks: the same tasks here, in the same order, by their own names.
        store: where documents are put.
    """

    def __init__(
        self, names: Sequence[str], settings: TaskSettings, tasks: Mapping[str, Task], store: DocumentStore
    ) -> None:
        workers = min(os.cpu_count() or 1, _MOST_PROCESSES)
        pool = ProcessPoolExecutor(
            workers,
            # A copy of this process would have its event loop, its threads and its open files.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(dict(zip(tasks, names, strict=True)), settings, store.root),
        )
        super().__init__(tasks, pool, workers, _made_in_process)


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

    def __init__(self, store: DocumentStore, maker: Maker, *, keep: bool = False) -> None:
        self._store = store
        self._maker = maker
        self._keep = keep
        self._in_use: Counter[str] = Counter()
        self._stored: dict[str, DocumentRef] = {}
        self._making: set[asyncio.Future[Made]] = set()

    async def prepare(self, task: str, length: int, index: int, readers: int) -> Prepared:
        """Make a sample and store its document, for a number of systems.

        Raises:
            EvaluationError: like `Maker.make`.
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

    async def _make(self, task: str, length: int, index: int) -> Made:
        """The maker's result. It cannot be cancelled from outside; `close` waits for running work."""
        making = asyncio.ensure_future(self._maker.make(task, length, index))
        self._making.add(making)
        making.add_done_callback(self._made)
        return await asyncio.shield(making)

    def _made(self, making: asyncio.Future[Made]) -> None:
        self._making.discard(making)
        if not making.cancelled() and making.exception() is None:
            document = making.result().document
            self._stored[document["key"]] = document

    def _remove(self, key: str) -> None:
        document = self._stored.pop(key)
        if not self._keep:
            self._store.remove(document)


def _start(names: Mapping[str, str], settings: TaskSettings, store: Path) -> None:
    """Start of a process: it leaves interrupts to its parent, and ends with it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    task = functools.cache(lambda task: load_task(names[task], settings))
    _here.update(task=task, store=DocumentStore(store), seed=settings.seed)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _made_in_process(task: str, length: int, index: int) -> _Told:
    return _made(_here["task"](task), length, index, _here["store"], lambda: False, _here["seed"])


_here: dict[str, Any] = {}
"""In a process that makes documents: its tasks and store."""


def sample_of(task: Task, length: int, index: int, seed: int | None = None) -> Sample:
    """A task's sample; `seed` is the task's seed, for the message.

    Raises:
        SampleError: the task does not have it, or the task's own code failed.
    """
    try:
        return task.sample(length, index)
    except Exception as error:
        raise _failed(error, "sample", task, length, index, seed) from error


def _failed(error: Exception, method: str, task: Task, length: int, index: int, seed: int | None) -> SampleError:
    if isinstance(error, EvaluationError):
        return SampleError(error.message, hint=error.hint)
    of = f"length {length}, index {index}" + ("" if seed is None else f", seed {seed}")
    return SampleError(
        f"{method}() of the task {task.name} failed at {of}: {type(error).__name__}: {error}",
        hint="Mend the task's code; the same call in Python shows where it failed. --resume then continues.",
    )


def _made(
    task: Task, length: int, index: int, store: DocumentStore, given_up: Callable[[], bool], seed: int | None
) -> _Told:
    sample = sample_of(task, length, index, seed)

    def text() -> Iterator[str]:
        try:
            for piece in sample.text():
                if not isinstance(piece, str):
                    raise TypeError(f"it gave {type(piece).__name__} where text was expected")
                yield piece
        except Exception as error:
            raise _failed(error, "text", task, length, index, seed) from error

    try:
        pieces = _AsFile(text(), given_up)
        document = store.add(Document.from_file(pieces, name=sample.id))  # type: ignore[arg-type]
    except OSError as error:
        raise EvaluationError(
            f"the document of {sample.id} cannot be stored in {store.root}: {error.strerror or error}",
            hint="Make room: as many documents lie there as are read at once (--concurrency).",
        ) from error
    except DocumentError as error:
        raise EvaluationError(f"the document of {sample.id} cannot be stored: {error}") from error
    return sample.question, sample.gold, sample.needles, document, pieces.characters


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
