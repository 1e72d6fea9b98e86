"""Makes the documents of samples in a thread, stores them before they are needed, and removes them after use."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memagent_evaluation.samples import Sample, Task
from memagent_graph.converters import Block
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError, EvaluationError, MemAgentError


class SampleError(EvaluationError):
    """One sample cannot be made: the length is too small, or the task's code failed. Others may still be made."""


@dataclass(eq=False)
class SampleDocuments:
    """Makes samples, one after the other, and keeps their documents in a store while systems read them.

    It belongs to one event loop.
    """

    tasks: Mapping[str, Task]
    """The tasks by name."""
    store: DocumentStore
    seed: int | None = None
    """The tasks' seed, for messages."""
    keep_documents: bool = False
    """Whether documents stay in the store."""

    def __post_init__(self) -> None:
        self._is_closing = threading.Event()
        self._use_counts: Counter[str] = Counter()
        """The number of attempts that still need a document, by its key."""
        self._documents: dict[str, DocumentRef] = {}
        self._running_work: asyncio.Task[tuple[Sample, DocumentRef]] | None = None

    async def prepare(self, task: str, length: int, index: int, use_count: int) -> tuple[Sample, DocumentRef]:
        """Make a sample and store its document, for a number of attempts.

        Raises:
            SampleError: the task does not have it.
            EvaluationError: the document cannot be stored.
        """
        sample, document = await self._make(task, length, index)
        self._use_counts[document["key"]] += use_count
        try:
            self.store.read_bytes(document, 0, 1)
        except DocumentError:
            # Another sample had the same text, and its release removed it just before this sample was counted.
            await self._make(task, length, index)
        return sample, document

    def release(self, document: DocumentRef) -> None:
        """End one attempt's use of a document; after the last attempt, remove it."""
        key = document["key"]
        self._use_counts[key] -= 1
        if self._use_counts[key] == 0:
            self._remove(key)

    async def close(self) -> None:
        """Stop the running work, and remove all remaining documents."""
        self._is_closing.set()
        if self._running_work is not None:
            await asyncio.gather(self._running_work, return_exceptions=True)
        for key in list(self._documents):
            self._remove(key)

    async def _make(self, task: str, length: int, index: int) -> tuple[Sample, DocumentRef]:
        """Make and store a sample in a thread, which cannot be cancelled; `close` waits for it."""
        self._running_work = asyncio.create_task(
            asyncio.to_thread(self._make_in_thread, self.tasks[task], length, index)
        )
        return await asyncio.shield(self._running_work)

    def _remove(self, key: str) -> None:
        document = self._documents.pop(key)
        if not self.keep_documents:
            self.store.remove(document)

    def _make_in_thread(self, task: Task, length: int, index: int) -> tuple[Sample, DocumentRef]:
        sample = make_sample(task, length, index, self.seed)

        def iter_blocks() -> Iterator[Block]:
            try:
                for piece in sample.text():
                    if not isinstance(piece, str):
                        raise TypeError(f"it gave {type(piece).__name__} where text was expected")
                    if self._is_closing.is_set():
                        raise RuntimeError("the evaluation has ended")
                    yield Block(piece)
            except Exception as error:
                raise make_sample_error(error, "text", task, length, index, self.seed) from error

        try:
            document = self.store.add(Document.from_pieces(iter_blocks, sample.id))
            self._documents[document["key"]] = document
        except DocumentError as error:
            raise EvaluationError(f"the document of {sample.id} cannot be stored: {error}") from error
        return sample, document


def make_sample(task: Task, length: int, index: int, seed: int | None = None) -> Sample:
    """Return a task's sample; `seed` is the task's seed, for the message.

    Raises:
        SampleError: the task does not have it, or the task's own code failed.
    """
    try:
        sample = task.sample(length, index)
        if (sample.task.name, sample.length, sample.index) != (task.name, length, index):
            raise ValueError(f"it returned the sample {sample.id}")
        if isinstance(sample.gold, str) or not all(isinstance(text, str) for text in sample.gold):
            raise TypeError(f"its gold strings are {sample.gold!r}, not a tuple of texts")
    except Exception as error:
        raise make_sample_error(error, "sample", task, length, index, seed) from error
    return sample


def make_sample_error(
    error: Exception, method: str, task: Task, length: int, index: int, seed: int | None
) -> SampleError:
    """Return the error of a task's own method."""
    if isinstance(error, MemAgentError):
        return SampleError(error.message, hint=error.hint)
    sample = f"length {length}, index {index}" + ("" if seed is None else f", seed {seed}")
    return SampleError(
        f"{method}() of the task {task.name} failed at {sample}: {type(error).__name__}: {error}",
        hint="Fix the task's code; the same call in Python shows where it failed. --resume then continues.",
    )
