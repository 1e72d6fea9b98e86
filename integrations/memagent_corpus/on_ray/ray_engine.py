"""The engine of `memagent corpus --ray`: the actors of a cluster read the documents, and this process stores the rows.

Documents are sent in windows of up to 4,096. The largest come first, so that no actor starts a large document at the
end of a window. Only this process writes to the ledger, so each row is written once, even if Ray repeats a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from memagent_corpus.engines import Keep, NextWork, Work
from memagent_corpus.on_ray.actor_plan import ActorPlan
from memagent_corpus.on_ray.document_actors import Outcome
from memagent_corpus.on_ray.ray_cluster import connected
from memagent_corpus.on_ray.ray_datasets import ActorPool
from memagent_corpus.on_ray.window_pipelines import read_window
from memagent_corpus.source_access import scheme_of
from memagent_graph.errors import CorpusError, MemAgentError

WINDOW: Final = 4096
"""Maximum number of documents in a window."""
_WINDOW_BYTES: Final = 64 * 2**20
"""Maximum size of the texts in a window, if the documents come from a text column."""
_STORED_AT_ONCE: Final = 16
"""Documents whose rows are stored at the same time."""
_MAX_ATTEMPTS: Final = 3
"""Attempts in a row without any outcome, after which the run fails."""


class _LimitReachedError(Exception):
    """A limit is reached. Reads in progress are stopped, and continue in the next run."""


@dataclass(frozen=True)
class RayEngine:
    """Reads documents on the cluster that this process is connected to (see `connected`).

    Args:
        plan: how documents are read.
        pool: the number of actors, and the load of each.
        window: maximum number of documents in a window.
    """

    plan: ActorPlan
    pool: ActorPool
    window: int = WINDOW

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """Implement `Engine.read`.

        Raises:
            CorpusError: a machine has no access to a shared folder, or the cluster failed repeatedly.
            MemAgentError: an error that every document would cause.
        """
        self.plan.write_markers()
        try:
            while window := await self._next_window(next_work):
                attempt = 1
                while window:
                    left = await self._read_window(window, keep, is_last_attempt=attempt >= _MAX_ATTEMPTS)
                    attempt = attempt + 1 if len(left) == len(window) else 1
                    window = left
        except _LimitReachedError:
            return
        finally:
            self.plan.remove_markers()

    async def _next_window(self, next_work: NextWork) -> list[Work]:
        """Collect the documents of the next window, the largest first."""
        window: list[Work] = []
        size = 0
        while len(window) < self.window and size < _WINDOW_BYTES and (work := await next_work()) is not None:
            window.append(_for_any_actor(work))
            size += len(work.document.text or "")
        return sorted(window, key=lambda work: work.document.size or 0, reverse=True)

    async def _read_window(self, window: list[Work], keep: Keep, *, is_last_attempt: bool) -> list[Work]:
        """Read a window. Return the documents without an outcome, if the cluster failed."""
        left = dict(enumerate(window))
        pickled = [pickle.dumps(each) for each in left.items()]
        stream = _OutcomeStream(partial(read_window, self.pool, self.plan, pickled))

        async def store() -> None:
            while (outcome := await stream.next()) is not None:
                if outcome.failure is not None:
                    raise outcome.failure
                if outcome.number not in left:  # Ray may repeat a block
                    continue
                if not await keep(left.pop(outcome.number), outcome.decoded()):
                    raise _LimitReachedError

        tasks = [asyncio.create_task(store()) for _ in range(_STORED_AT_ONCE)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        except (MemAgentError, _LimitReachedError):
            raise
        except Exception as error:  # Ray has its own exceptions
            cause = _memagent_cause(error)
            if cause is not None:
                raise cause from error
            if is_last_attempt:
                raise _cluster_error(error) from error
        finally:
            stream.stop()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return list(left.values())


@contextlib.contextmanager
def connected_engine(
    address: str, plan: ActorPlan, *, actors: tuple[int, int] | None = None, documents_in_flight: int = 64
) -> Iterator[RayEngine]:
    """Connect to a cluster and yield an engine.

    Args:
        address: the address for `connected`.
        plan: how documents are read.
        actors: minimum and maximum number of actors; one for each machine by default.
        documents_in_flight: documents that each actor reads at the same time.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the cluster cannot be reached, or refuses the connection.
    """
    with connected(address) as ray:
        machines = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        min_actors, max_actors = actors or (machines, machines)
        yield RayEngine(plan, ActorPool(min_actors, max_actors, documents_in_flight))


class _OutcomeStream:
    """Runs a blocking iterator of pickled outcomes in a daemon thread, for use in an event loop.

    A blocked iterator cannot be interrupted. After `stop`, it ends at its next item, or when the connection closes.
    """

    def __init__(self, start: Callable[[], Iterator[bytes]]) -> None:
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Outcome | BaseException | None] = asyncio.Queue()
        self._is_stopped = threading.Event()
        threading.Thread(target=self._run, name="memagent-ray", daemon=True).start()

    async def next(self) -> Outcome | None:
        """Return the next outcome; None at the end.

        Raises:
            Exception: the iterator raised an error.
        """
        item = await self._queue.get()
        if item is None or isinstance(item, BaseException):
            self._queue.put_nowait(item)  # for the other tasks that wait
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Stop the iterator at its next item."""
        self._is_stopped.set()

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            with contextlib.closing(self._start()) as items:  # type: ignore[type-var]
                for each in items:
                    if self._is_stopped.is_set():
                        return
                    self._put(pickle.loads(each))  # noqa: S301  from our own actors
        except BaseException as error:  # noqa: BLE001  `next` raises it
            end = error
        self._put(end)

    def _put(self, item: Outcome | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _for_any_actor(work: Work) -> Work:
    """Make the document's path absolute, because actors have another working directory, and say that it may be begun.

    When an actor dies, Ray hands the same block to another one, which has to look for the lost actor's checkpoints.
    """
    work, location = replace(work, begun=True), work.document.location
    if location is None or scheme_of(location):
        return work
    return replace(work, document=replace(work.document, location=str(Path(location).absolute())))


def _memagent_cause(error: BaseException) -> MemAgentError | None:
    """Return the error of this package that caused one of Ray's errors, if there is one."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, MemAgentError):
            return each
        seen.add(id(each))
        each = getattr(each, "cause", None) or each.__cause__ or each.__context__
    return None


def _cluster_error(error: BaseException) -> CorpusError:
    """Return the error for a cluster that failed repeatedly."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    hint = "Check the cluster (`ray status`), then run the same command again. Finished rows are not lost."
    if "ModuleNotFoundError" in str(error) or "No module named" in str(error):
        hint = 'Install the same version of "memagent-graph[ray]" on every machine of the cluster.'
    return CorpusError(f"the Ray cluster failed ({type(error).__name__}): {lines[-1][:300]}", hint=hint)
