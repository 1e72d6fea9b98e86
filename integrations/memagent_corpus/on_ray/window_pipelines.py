"""Runs the Ray Data pipeline that reads a window of documents, in this process or in a relay on the cluster.

Ray Data cannot run in a process that is connected through Ray Client (ray://). Then a relay, which is an actor that
needs no CPU, runs the pipeline on the cluster, and this process fetches the outcomes from it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from memagent_corpus.on_ray.actor_plan import ActorPlan
from memagent_corpus.on_ray.document_actors import OUTCOME, WORK, ReadWork
from memagent_corpus.on_ray.ray_cluster import ray_module
from memagent_corpus.on_ray.ray_datasets import ActorPool

_FETCH_SECONDS: Final = 1.0
_FETCH_SIZE: Final = 256
"""Maximum number of outcomes that are fetched from a relay in one call."""


def read_window(pool: ActorPool, plan: ActorPlan, pickled: Sequence[bytes]) -> Iterator[bytes]:
    """Read a window of documents. The iterator blocks.

    Args:
        pool: the number of actors, and the load of each.
        plan: how documents are read.
        pickled: pickled pairs of a number and a `Work`.

    Returns:
        Pickled `Outcome`s, in any order.
    """
    run = _run_on_relay if ray_module("ray.util.client").ray.is_connected() else _run_pipeline
    return run(pool, pool.pickled(plan), pickled)


def _run_pipeline(pool: ActorPool, plan: bytes, pickled: Sequence[bytes]) -> Iterator[bytes]:
    """Run the pipeline in this process."""
    data = ray_module("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    dataset = data.from_items([{WORK: each} for each in pickled], override_num_blocks=len(pickled))
    outcomes = pool.map_blocks(dataset, ReadWork, plan)
    for block in outcomes.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        yield from block.column(OUTCOME).to_pylist()


def _run_on_relay(pool: ActorPool, plan: bytes, pickled: Sequence[bytes]) -> Iterator[bytes]:
    """Run the pipeline in a relay."""
    ray = ray_module()
    relay = ray.remote(num_cpus=0, max_concurrency=2)(Relay).remote(pool, plan)
    try:
        ray.get(relay.start.remote(list(pickled)))
        while (outcomes := ray.get(relay.fetch.remote())) is not None:
            yield from outcomes
    finally:
        ray.kill(relay)


class Relay:
    """Runs the pipeline on the cluster, and keeps the outcomes until they are fetched."""

    def __init__(self, pool: ActorPool, plan: bytes) -> None:
        self._pool, self._plan = pool, plan
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue()

    def start(self, pickled: Sequence[bytes]) -> None:
        """Start the pipeline in a thread."""
        threading.Thread(target=self._run, args=(pickled,), daemon=True).start()

    def _run(self, pickled: Sequence[bytes]) -> None:
        end: BaseException | None = None
        try:
            for each in _run_pipeline(self._pool, self._plan, pickled):
                self._queue.put(each)
        except BaseException as error:  # noqa: BLE001  `fetch` raises it
            end = error
        self._queue.put(end)

    def fetch(self) -> list[Any] | None:
        """Return the next outcomes, which may be an empty list; None at the end.

        Raises:
            Exception: the pipeline raised an error.
        """
        outcomes: list[Any] = []
        try:
            while len(outcomes) < _FETCH_SIZE:
                each = self._queue.get(timeout=0 if outcomes else _FETCH_SECONDS)
                if not isinstance(each, bytes):
                    self._queue.put(each)
                    if outcomes:
                        break
                    if each is None:
                        return None
                    raise each
                outcomes.append(each)
        except queue.Empty:
            pass
        return outcomes
