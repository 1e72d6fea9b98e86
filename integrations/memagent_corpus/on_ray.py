"""The engine of `memagent corpus --ray`: actors of a cluster read the documents, and this process stores the rows.

    RayEngine       gives documents to the actors; `connect` connects to a cluster
    ActorPlan       the settings that this process sends to every actor
    DocumentActor   reads documents, with a reader that it makes from the plan

Each actor reads many documents concurrently in one event loop. If an actor dies, Ray starts it again, perhaps on
another machine, and gives it the same documents, which it continues from their checkpoints. Only this process writes to
the ledger, so each row is written once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pickle
import platform
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from memagent_corpus import CorpusReader
from memagent_corpus.corpus_reader import DocumentTask
from memagent_corpus.corpus_rows import CorpusRow, decode_row, encode_row
from memagent_corpus.corpus_run import NextTask, StoreRows, read_concurrently
from memagent_corpus.source_access import SourceAccess, get_scheme
from memagent_graph.errors import CheckpointError, CorpusError, MemAgentError, RunHeldError, load_extra
from memagent_graph.reader import MemAgent
from memagent_graph.response_format import ResponseFormat
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.checkpoints import is_postgres_url
from memagent_graph.storage.file_locks import lease

_CPUS_PER_ACTOR: Final = 0.5
"""CPUs of an actor for Ray's scheduling. An actor waits for the policy most of the time."""
_MARKER_NAME: Final = "seen-by-every-machine"
_MAX_RETRIES: Final = 10
"""The number of times that Ray gives a document to another actor after the actor that read it died."""
_CONNECT_TIMEOUT_SECONDS: Final = 5.0


def import_ray(name: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return load_extra(name, "ray", "reading on a Ray cluster")


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """The settings with which the actors of a cluster read documents.

    The plan contains the API key and the database URL, and all users of the cluster can read it.
    """

    settings: ReadSettings = field(default_factory=ReadSettings)
    questions: tuple[str, ...] = ()
    """Questions about every document. A document's own questions come first."""
    access: SourceAccess = field(default_factory=SourceAccess)
    """Opens documents. If its root is a folder, it must be shared by all machines."""
    response_format: ResponseFormat | None = None
    checkpoints: str | None = field(default=None, repr=False)
    """A PostgreSQL URL, or a SQLite file in a shared folder. Each machine then has its own SQLite file. If it is None,
    interrupted documents are read again from the beginning."""
    texts: str | None = None
    """A shared folder in which the documents' texts are kept. If it is None, texts are removed after the read."""
    logs: str | None = None
    """A shared folder in which each actor writes its own log file."""
    driver_host: str = field(default_factory=platform.node)
    """The host name of the driver's machine."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """The content of the markers, which shows that a folder with the same path is the same folder."""

    def list_shared_folders(self) -> list[Path]:
        """Return the folders that all machines must share with the driver."""
        folders = [Path(folder) for folder in (self.texts, self.logs) if folder]
        if self.checkpoints and not is_postgres_url(self.checkpoints):
            folders.insert(0, Path(self.checkpoints).parent)
        return list(dict.fromkeys(folders))

    def write_markers(self) -> None:
        """Write a marker file to each shared folder, so that other machines can recognise the folder.

        Raises:
            CorpusError: a folder cannot be written.
        """
        for folder in self.list_shared_folders():
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                (folder / _MARKER_NAME).write_text(self.nonce, encoding="ascii")
            except OSError as error:
                raise CorpusError(f"{folder} cannot be written: {error}", hint="Check its permissions.") from error

    def require_shared_folders(self) -> None:
        """Check on an actor's machine that it has access to all shared folders.

        Raises:
            CorpusError: a folder does not exist here, or is a different folder with the same path.
        """
        host = platform.node()
        for folder in self.list_shared_folders():
            with suppress(OSError):
                if (folder / _MARKER_NAME).read_text("ascii") == self.nonce:
                    continue
            raise CorpusError(
                f"the machine {host} has no access to the folder {folder} of {self.driver_host}",
                hint="Use a folder on a file system that all machines of the cluster mount. Checkpoints can also be in "
                "PostgreSQL: --checkpoints postgresql://...",
            )
        root = self.access.root
        if root and not get_scheme(root) and not Path(root).exists():
            raise CorpusError(
                f"the machine {host} has no access to the documents' folder {root}",
                hint="Put the documents on a file system that all machines mount, or in an object store.",
            )

    def remove_markers(self) -> None:
        """Remove the files of `write_markers`."""
        for folder in self.list_shared_folders():
            with suppress(OSError):
                (folder / _MARKER_NAME).unlink()

    def get_local_checkpoints(self) -> str | None:
        """Return this machine's checkpoints. Machines cannot share a SQLite file, so each has its own."""
        if self.checkpoints is None or is_postgres_url(self.checkpoints) or platform.node() == self.driver_host:
            return self.checkpoints
        return f"{self.checkpoints}-{hashlib.sha256(platform.node().encode()).hexdigest()[:12]}"

    def to_pickle(self) -> bytes:
        """Pickle the plan for the actors.

        The user's answer model is pickled by value, because other machines may not be able to import its module.
        """
        pickler = import_ray("ray.cloudpickle")
        model = self.response_format.model if self.response_format else None
        with ExitStack() as stack:
            if model is not None and (module := sys.modules.get(model.__module__)):
                pickler.register_pickle_by_value(module)
                stack.callback(pickler.unregister_pickle_by_value, module)
            return bytes(pickler.dumps(self))


class DocumentActor:
    """Reads documents for `RayEngine`. Its reader and its temporary folder are created at its first document.

    Args:
        plan: a pickled `ActorPlan`.
    """

    def __init__(self, plan: bytes) -> None:
        self._stack = ExitStack()
        self._plan: ActorPlan = pickle.loads(plan)  # noqa: S301  from our own driver
        self._reader: CorpusReader | None = None

    @property
    def reader(self) -> CorpusReader:
        """The reader, for the event loop in which it is first used.

        Raises:
            CorpusError: this machine has no access to a shared folder.
            MemAgentError: the settings cannot be used on this machine.
        """
        if self._reader is None:
            plan = self._plan
            plan.require_shared_folders()
            folder = _create_temporary_folder(self._stack)
            agent = MemAgent(
                settings=plan.settings,
                store=Path(plan.texts) if plan.texts else folder / "documents",
                checkpoints=plan.get_local_checkpoints(),
                run_log=Path(plan.logs) / f"{platform.node()}-{folder.name}.sqlite" if plan.logs else False,
            )
            self._reader = CorpusReader(
                agent,
                plan.questions,
                plan.access,
                keep_texts=plan.texts is not None,
                response_format=plan.response_format,
            )
        return self._reader

    async def start(self) -> None:
        """Do nothing; a call returns when the actor has started."""

    async def read(self, task: DocumentTask) -> list[bytes] | MemAgentError:
        """Read a document.

        Returns:
            Its rows, encoded as in the ledger, or an error that every other document would cause too.
        """
        try:
            return [encode_row(row) for row in await task.read(self.reader)]
        except MemAgentError as error:
            return error

    async def close(self) -> None:
        """Close the reader and remove the temporary folder."""
        if self._reader is not None:
            await self._reader.agent.aclose()
        self._stack.close()


def _create_temporary_folder(stack: ExitStack) -> Path:
    """Create and lock a folder for this process. Folders of killed processes have no lock and are removed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    parent = Path(tempfile.gettempdir()) / f"memagent-ray-{user}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != user:
        raise CorpusError(f"the folder {parent} belongs to another user", hint="Set TMPDIR to a folder of your own.")
    for old_folder in parent.iterdir():
        if old_folder.suffix == ".folder":
            with suppress(RunHeldError, CheckpointError), lease(parent / "locks", old_folder.stem):
                shutil.rmtree(old_folder, ignore_errors=True)
    name = secrets.token_hex(8)
    stack.enter_context(lease(parent / "locks", name))
    folder = parent / f"{name}.folder"
    folder.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    require_reachable(address)
    if address == "local":
        options = {"include_dashboard": False, **options}
    try:
        ray.init(address, **{"log_to_driver": False, "logging_level": logging.ERROR, **options})
    except Exception as error:  # Ray and gRPC have their own exceptions
        raise make_unreachable_error(address, str(error)) from error
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
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise make_unreachable_error(address, str(error)) from error


def make_unreachable_error(address: str, reason: str) -> CorpusError:
    """Return the error for a cluster that cannot be used."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["it does not answer"]
    summary = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    if address == "auto" and os.environ.get("RAY_ADDRESS"):
        hint = "Check that the cluster in RAY_ADDRESS runs (`ray status`), or use another one, or --ray local."
    else:
        hint = "Check that the cluster runs (`ray status`). Start one with `ray start --head`, or use --ray local."
    return CorpusError(f"the Ray cluster {address} cannot be used: {summary[:300]}", hint=hint)


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

    async def __call__(self, next_task: NextTask, store_rows: StoreRows) -> None:
        """Read all documents: a `CorpusEngine`.

        Raises:
            CorpusError: a machine has no access to a shared folder, or the cluster failed.
            MemAgentError: an error that every document would cause.
        """
        first_task = await next_task()
        if first_task is None:  # no actor is needed
            return
        queue = [first_task]

        async def take_task() -> DocumentTask | None:
            return queue.pop() if queue else await next_task()

        self.plan.write_markers()
        try:
            await self._read_on_actors(take_task, store_rows)
        except import_ray().exceptions.RayError as error:
            raise _make_cluster_error(error) from error
        finally:
            self.plan.remove_markers()

    async def _read_on_actors(self, next_task: NextTask, store_rows: StoreRows) -> None:
        """Read until there are no more documents. Do not wait for actors that have not started by then."""
        ray = import_ray()
        actor_class = ray.remote(
            num_cpus=_CPUS_PER_ACTOR,
            scheduling_strategy="SPREAD",  # spread the actors over the machines
            max_restarts=-1,
            max_task_retries=_MAX_RETRIES,
            max_concurrency=self.documents_in_flight + 1,
        )(DocumentActor)
        plan = self.plan.to_pickle()
        actors = [actor_class.remote(plan) for _ in range(self.actors)]
        started_indexes: set[int] = set()

        async def run_worker(index: int) -> None:
            actor = actors[index]
            await actor.start.remote()
            started_indexes.add(index)
            await read_concurrently(
                self.documents_in_flight, lambda task: _read_on_actor(actor, task), next_task, store_rows
            )

        workers = {asyncio.create_task(run_worker(index)): index for index in range(self.actors)}
        pending = set(workers)
        try:
            while pending:
                ended_workers, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for worker in ended_workers:
                    worker.result()
                pending = {worker for worker in pending if workers[worker] in started_indexes}
            with suppress(ray.exceptions.RayError):  # a machine that is lost has nothing to close
                await asyncio.gather(*(actors[index].close.remote() for index in started_indexes))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for actor in actors:
                ray.kill(actor)


async def _read_on_actor(actor: Any, task: DocumentTask) -> list[CorpusRow]:
    """Read a document on an actor. If the actor is lost, Ray calls another one, so there may always be checkpoints."""
    rows = await actor.read.remote(replace(task, is_begun=True))
    if isinstance(rows, MemAgentError):
        raise rows
    return [decode_row(row) for row in rows]


def _make_cluster_error(error: BaseException) -> CorpusError:
    """Return the error for a cluster that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    hint = "Check the cluster (`ray status`), then run the same command again. Finished rows are not lost."
    if "ModuleNotFoundError" in str(error) or "No module named" in str(error):
        hint = 'Install the same version of "memagent-graph[ray]" on every machine of the cluster.'
    return CorpusError(f"the Ray cluster failed ({type(error).__name__}): {lines[-1][:300]}", hint=hint)
