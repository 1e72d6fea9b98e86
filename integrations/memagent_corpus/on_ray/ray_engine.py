"""The engine of `memagent corpus --ray`: the actors of a cluster read the documents, and this process stores the rows.

Each actor reads many documents concurrently in one event loop. If an actor dies, Ray starts it again, perhaps on
another machine, and gives it the same documents, which it continues from their checkpoints. Only this process writes to
the ledger, so each row is written once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from memagent_corpus.corpus_rows import CorpusRow, decode_row
from memagent_corpus.corpus_run import DocumentTask, NextTask, StoreRows, read_concurrently
from memagent_corpus.on_ray.actor_plan import CPUS, ActorPlan, DocumentActor, ray_module
from memagent_graph.errors import CorpusError, MemAgentError

_CONNECT_SECONDS: Final = 5.0


@contextmanager
def connect(address: str, **options: Any) -> Iterator[Any]:
    """Connect to a cluster and yield the module `ray`. Disconnect at the end, which stops the actors.

    An existing connection of this process is used, and is not closed.

    Args:
        address: "auto" for the cluster on this machine or the one in RAY_ADDRESS, "local" for a new cluster that stops
            at the end, or HOST:PORT of a head node.
        options: additional arguments of `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError: the cluster cannot be reached, or refuses the connection.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # otherwise its log mixes with this process's output
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # otherwise late calls after the end start a new cluster
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    require_reachable(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        quiet["include_dashboard"] = False
    try:
        ray.init(address, **{**quiet, **options})
    except Exception as error:  # Ray and gRPC have their own exceptions
        raise unreachable_error(address, str(error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_reachable(address: str) -> None:
    """Check that a server listens at the address. Ray would retry for a minute.

    Raises:
        CorpusError: the server cannot be reached, or the address is not valid.
    """
    if address in {"local", "auto"}:
        return
    if address.startswith("ray://"):
        raise CorpusError(
            f"{address} is the address of Ray Client, which is not supported",
            hint="Run the command on a node of the cluster, or submit it: "
            "ray job submit --address http://HOST:8265 -- memagent corpus ... --ray auto",
        )
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit()):
        raise CorpusError(
            f"{address!r} is not the address of a Ray cluster", hint="Use auto, local, or HOST:PORT of the head node."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise unreachable_error(address, str(error)) from error


def unreachable_error(address: str, reason: str) -> CorpusError:
    """Return the error for a cluster that cannot be used."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["it does not answer"]
    first = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    if address == "auto" and os.environ.get("RAY_ADDRESS"):
        hint = "Check that the cluster in RAY_ADDRESS runs (`ray status`), or use another one, or --ray local."
    else:
        hint = "Check that the cluster runs (`ray status`). Start one with `ray start --head`, or use --ray local."
    return CorpusError(f"the Ray cluster {address} cannot be used: {first[:300]}", hint=hint)


_MAX_RETRIES: Final = 10
"""How often Ray gives a document to another actor after the actor that read it died."""


@dataclass(frozen=True)
class RayEngine:
    """Reads documents on the cluster that this process is connected to (see `connect`).

    Args:
        plan: how documents are read.
        actors: maximum number of actors. They start as the cluster has free CPUs.
        documents_in_flight: documents that each actor reads at the same time.
    """

    plan: ActorPlan
    actors: int = 1
    documents_in_flight: int = 64

    async def read(self, next_task: NextTask, store_rows: StoreRows) -> None:
        """Implement `CorpusEngine.read`.

        Raises:
            CorpusError: a machine has no access to a shared folder, or the cluster failed.
            MemAgentError: an error that every document would cause.
        """
        first = await next_task()
        if first is None:  # no actor is needed
            return
        waiting = [first]

        async def take() -> DocumentTask | None:
            return waiting.pop() if waiting else await next_task()

        self.plan.write_markers()
        try:
            await self._read_on_actors(take, store_rows)
        except ray_module().exceptions.RayError as error:
            raise _cluster_error(error) from error
        finally:
            self.plan.remove_markers()

    async def _read_on_actors(self, next_task: NextTask, store_rows: StoreRows) -> None:
        """Read until there are no more documents. Actors that have not started by then are not waited for."""
        ray = ray_module()
        remote = ray.remote(
            num_cpus=CPUS,
            scheduling_strategy="SPREAD",  # over the machines
            max_restarts=-1,
            max_task_retries=_MAX_RETRIES,
            max_concurrency=self.documents_in_flight + 1,
        )(DocumentActor)
        plan = self.plan.pickled()
        actors = [remote.remote(plan) for _ in range(self.actors)]
        started: set[int] = set()

        async def work(number: int) -> None:
            actor = actors[number]
            await actor.start.remote()
            started.add(number)
            await read_concurrently(self.documents_in_flight, lambda task: _read(actor, task), next_task, store_rows)

        workers = {asyncio.create_task(work(number)): number for number in range(self.actors)}
        unfinished = set(workers)
        try:
            while unfinished:
                done, unfinished = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    worker.result()
                unfinished = {worker for worker in unfinished if workers[worker] in started}
            with suppress(ray.exceptions.RayError):  # a lost machine has nothing to close
                await asyncio.gather(*(actors[number].close.remote() for number in started))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for actor in actors:
                ray.kill(actor)


async def _read(actor: Any, task: DocumentTask) -> list[CorpusRow]:
    """Read a document on an actor. After a loss, Ray calls another one, so there may always be checkpoints."""
    rows = await actor.read.remote(replace(task, begun=True))
    if isinstance(rows, MemAgentError):
        raise rows
    return [decode_row(row) for row in rows]


def _cluster_error(error: BaseException) -> CorpusError:
    """Return the error for a cluster that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    hint = "Check the cluster (`ray status`), then run the same command again. Finished rows are not lost."
    if "ModuleNotFoundError" in str(error) or "No module named" in str(error):
        hint = 'Install the same version of "memagent-graph[ray]" on every machine of the cluster.'
    return CorpusError(f"the Ray cluster failed ({type(error).__name__}): {lines[-1][:300]}", hint=hint)
