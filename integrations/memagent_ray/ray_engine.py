"""The engine of `memagent corpus --ray`: documents are read by the actors of a cluster, and kept by this process.

Documents go out in windows of some thousand, the large ones first, so that the end of a window is short. What has come
back is entered in the ledger here, by one process; so whatever dies, in whatever order blocks are made again, a row is
written once.
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

from memagent_graph.corpus.engines import Keep, NextWork, Work
from memagent_graph.corpus.source_access import scheme_of
from memagent_graph.errors import CorpusError, MemAgentError
from memagent_ray.actor_plan import ActorPlan
from memagent_ray.document_actors import Outcome
from memagent_ray.ray_cluster import connected
from memagent_ray.ray_datasets import ActorPool
from memagent_ray.window_pipelines import outcomes_of

WINDOW: Final = 4096
"""Documents that are handed out at once."""
_WINDOW_BYTES: Final = 64 * 2**20
"""Of texts, if the documents are texts in a table."""
_KEEPING: Final = 16
"""Documents whose rows are entered at once."""
_TRIES: Final = 3
"""How often a window is tried in which nothing came back."""


class _EnoughError(Exception):
    """A limit is reached: what is being read is broken off, and continues next time."""


@dataclass(frozen=True)
class RayEngine:
    """Reads on the cluster that this process is connected to; see `connected`.

    Args:
        plan: how documents are read.
        pool: how many actors read, and how much each of them at a time.
        window: how many documents are handed out at once.
    """

    plan: ActorPlan
    pool: ActorPool
    window: int = WINDOW

    async def read(self, next_work: NextWork, keep: Keep) -> None:
        """As `Engine` says.

        Raises:
            CorpusError: a machine does not see a folder that it has to, or the cluster fails again and again.
            MemAgentError: what every document would meet.
        """
        self.plan.mark_folders()
        try:
            while window := await self._next_window(next_work):
                failures = 0
                while window:
                    left = await self._read_window(window, keep, is_last=failures + 1 >= _TRIES)
                    failures = failures + 1 if len(left) == len(window) else 0
                    window = left
        except _EnoughError:
            return
        finally:
            self.plan.remove_markers()

    async def _next_window(self, next_work: NextWork) -> list[Work]:
        window: list[Work] = []
        size = 0
        while len(window) < self.window and size < _WINDOW_BYTES and (work := await next_work()) is not None:
            window.append(_from_anywhere(work))
            size += len(work.document.text or "")
        return sorted(window, key=lambda work: work.document.size or 0, reverse=True)

    async def _read_window(self, window: list[Work], keep: Keep, *, is_last: bool) -> list[Work]:
        """Read these documents; those that did not come back, because the cluster failed, are returned."""
        left = dict(enumerate(window))
        pickled = [pickle.dumps(each) for each in left.items()]
        stream = _Stream(partial(outcomes_of, self.pool, self.plan, pickled))

        async def work() -> None:
            while (outcome := await stream.next()) is not None:
                if outcome.failure is not None:
                    raise outcome.failure
                if outcome.number not in left:  # a block that was made twice may come twice
                    continue
                if not await keep(left.pop(outcome.number), outcome.decoded()):
                    raise _EnoughError

        keepers = [asyncio.create_task(work()) for _ in range(_KEEPING)]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        except (MemAgentError, _EnoughError):
            raise
        except Exception as error:  # Ray's own kinds
            cause = _memagent_cause(error)
            if cause is not None:
                raise cause from error
            if is_last:
                raise _failed(error) from error
        finally:
            stream.stop()
            for each in keepers:
                each.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        return list(left.values())


@contextlib.contextmanager
def reading_on(
    address: str, plan: ActorPlan, *, actors: tuple[int, int] | None = None, documents_in_flight: int = 64
) -> Iterator[RayEngine]:
    """An engine on a cluster, connected to it.

    Args:
        address: as `connected` takes it.
        plan: how documents are read.
        actors: the least and the most of them; one for each machine if it is left out.
        documents_in_flight: of each actor.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the cluster cannot be reached, or refuses.
    """
    with connected(address) as ray:
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        least, most = actors or (max(1, machines), max(1, machines))
        yield RayEngine(plan, ActorPool(least, most, documents_in_flight))


class _Stream:
    """What a blocking iterator yields, for an event loop. It runs in a thread of its own, which dies with the process.

    An iterator that waits cannot be interrupted; after `stop` it ends at its next item, or with the connection.
    """

    def __init__(self, begin: Callable[[], Iterator[bytes]]) -> None:
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Outcome | BaseException | None] = asyncio.Queue()
        self._is_stopped = threading.Event()
        threading.Thread(target=self._run, name="memagent-ray", daemon=True).start()

    async def next(self) -> Outcome | None:
        """The next item; None at the end.

        Raises:
            Exception: what the iterator raised.
        """
        found = await self._queue.get()
        if found is None or isinstance(found, BaseException):
            self._queue.put_nowait(found)  # for the others that wait
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """No more items are wanted."""
        self._is_stopped.set()

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            with contextlib.closing(self._begin()) as items:  # type: ignore[type-var]
                for each in items:
                    if self._is_stopped.is_set():
                        return
                    self._put(pickle.loads(each))  # noqa: S301  our own actors'
        except BaseException as error:  # noqa: BLE001  it is raised where the items are wanted
            end = error
        self._put(end)

    def _put(self, item: Outcome | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _from_anywhere(work: Work) -> Work:
    """The same for a process that works in another folder, and for any try.

    When an actor dies, Ray hands the same block to another one, so the block has to say that there may be checkpoints.
    """
    work, location = replace(work, begun=True), work.document.location
    if location is None or scheme_of(location):
        return work
    return replace(work, document=replace(work.document, location=str(Path(location).absolute())))


def _memagent_cause(error: BaseException) -> MemAgentError | None:
    """The error of this package that Ray's error was raised for, if there is one."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, MemAgentError):
            return each
        seen.add(id(each))
        each = getattr(each, "cause", None) or each.__cause__ or each.__context__
    return None


def _failed(error: BaseException) -> CorpusError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    hint = "Check the cluster (`ray status`), then start the same command again: nothing that was read is lost."
    if "ModuleNotFoundError" in str(error) or "No module named" in str(error):
        hint = 'Install the same version of "memagent-graph[ray]" on every machine of the cluster.'
    return CorpusError(f"the Ray cluster failed ({type(error).__name__}): {lines[-1][:300]}", hint=hint)
