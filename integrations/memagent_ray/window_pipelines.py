"""A window of documents through Ray Data: on the machine of this process, or, for Ray Client, on one of the cluster.

Ray Data cannot run in a process that is connected through Ray Client (ray://). For such a process a relay, an actor
that needs no CPU, runs it on the cluster, and what comes back is fetched from there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from memagent_ray.actor_plan import ActorPlan
from memagent_ray.document_actors import OUTCOME, WORK, ReadWork
from memagent_ray.ray_cluster import ray_module
from memagent_ray.ray_datasets import ActorPool

_SECONDS: Final = 1.0
_MOST: Final = 256
"""Outcomes that are fetched from a relay at once."""


def outcomes_of(pool: ActorPool, plan: ActorPlan, pickled: Sequence[bytes]) -> Iterator[bytes]:
    """Read a window: pickled pairs of number and `Work` go in, pickled `Outcome`s come out in any order. It blocks."""
    if ray_module("ray.util.client").ray.is_connected():
        return _relayed(pool, pool.packed(plan), pickled)
    return _piped(pool, pool.packed(plan), pickled)


def _piped(pool: ActorPool, plan: bytes, pickled: Sequence[bytes]) -> Iterator[bytes]:
    data = ray_module("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    dataset = data.from_items([{WORK: each} for each in pickled], override_num_blocks=len(pickled))
    mapped = pool.mapped(dataset, ReadWork, plan)
    for block in mapped.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        yield from block.column(OUTCOME).to_pylist()


def _relayed(pool: ActorPool, plan: bytes, pickled: Sequence[bytes]) -> Iterator[bytes]:
    ray = ray_module()
    relay = ray.remote(num_cpus=0, max_concurrency=2)(Relay).remote(pool, plan)
    try:
        ray.get(relay.start.remote(list(pickled)))
        while (found := ray.get(relay.fetch.remote())) is not None:
            yield from found
    finally:
        ray.kill(relay)


class Relay:
    """Runs the pipeline on the cluster, and keeps what came out until it is fetched."""

    def __init__(self, pool: ActorPool, plan: bytes) -> None:
        self._pool, self._plan = pool, plan
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue()

    def start(self, pickled: Sequence[bytes]) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, args=(pickled,), daemon=True).start()

    def _run(self, pickled: Sequence[bytes]) -> None:
        end: BaseException | None = None
        try:
            for each in _piped(self._pool, self._plan, pickled):
                self._queue.put(each)
        except BaseException as error:  # noqa: BLE001  it is raised where the outcomes are fetched
            end = error
        self._queue.put(end)

    def fetch(self) -> list[Any] | None:
        """What has come out, or nothing yet; None at the end.

        Raises:
            Exception: what the pipeline raised.
        """
        found: list[Any] = []
        try:
            while len(found) < _MOST:
                each = self._queue.get(timeout=0 if found else _SECONDS)
                if not isinstance(each, bytes):
                    self._queue.put(each)
                    if found:
                        break
                    if each is None:
                        return None
                    raise each
                found.append(each)
        except queue.Empty:
            pass
        return found
