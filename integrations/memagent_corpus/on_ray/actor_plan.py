"""The settings that the driver sends to every actor, and the actors, which create their readers from them."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import secrets
import shutil
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memagent_corpus import CorpusReader
from memagent_corpus.corpus_rows import encode_row
from memagent_corpus.corpus_run import DocumentTask
from memagent_corpus.source_access import SourceAccess, scheme_of
from memagent_graph.errors import CheckpointError, CorpusError, MemAgentError, RunHeldError
from memagent_graph.extra_modules import extra_module
from memagent_graph.reader import MemAgent
from memagent_graph.response_format import ResponseFormat
from memagent_graph.settings import ReadSettings
from memagent_graph.storage.checkpoints import is_server
from memagent_graph.storage.file_locks import lease

CPUS: Final = 0.5
"""CPUs of an actor for Ray's scheduling. An actor waits for the policy most of the time."""
_MARKER: Final = "seen-by-every-machine"


def ray_module(name: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return extra_module(name, "ray", "reading on a Ray cluster")


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """How the actors of a cluster read documents.

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
    home: str = field(default_factory=platform.node)
    """The host name of the driver's machine."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """The content of the markers, which shows that a folder with the same path is the same folder."""

    def shared_folders(self) -> list[Path]:
        """Return the folders that all machines must share with the driver."""
        files = [] if self.checkpoints is None or is_server(self.checkpoints) else [Path(self.checkpoints).parent]
        return list(dict.fromkeys([*files, *(Path(folder) for folder in (self.texts, self.logs) if folder)]))

    def write_markers(self) -> None:
        """Write a marker file to each shared folder, so that other machines can recognize the folder.

        Raises:
            CorpusError: a folder cannot be written.
        """
        for folder in self.shared_folders():
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                (folder / _MARKER).write_text(self.nonce, encoding="ascii")
            except OSError as error:
                raise CorpusError(f"{folder} cannot be written: {error}", hint="Check its permissions.") from error

    def check_folders(self) -> None:
        """Check on an actor's machine that it has access to all shared folders.

        Raises:
            CorpusError: a folder does not exist here, or is a different folder with the same path.
        """
        here = platform.node()
        for folder in self.shared_folders():
            with suppress(OSError):
                if (folder / _MARKER).read_text("ascii") == self.nonce:
                    continue
            raise CorpusError(
                f"the machine {here} has no access to the folder {folder} of {self.home}",
                hint="Use a folder on a file system that all machines of the cluster mount. Checkpoints can also be in "
                "PostgreSQL: --checkpoints postgresql://...",
            )
        root = self.access.root
        if root and not scheme_of(root) and not Path(root).exists():
            raise CorpusError(
                f"the machine {here} has no access to the documents' folder {root}",
                hint="Put the documents on a file system that all machines mount, or in an object store.",
            )

    def remove_markers(self) -> None:
        """Remove the files of `write_markers`."""
        for folder in self.shared_folders():
            with suppress(OSError):
                (folder / _MARKER).unlink()

    def local_checkpoints(self) -> str | None:
        """Return this machine's checkpoints. Machines cannot share a SQLite file, so each has its own."""
        if self.checkpoints is None or is_server(self.checkpoints) or platform.node() == self.home:
            return self.checkpoints
        return f"{self.checkpoints}-{hashlib.sha256(platform.node().encode()).hexdigest()[:12]}"

    def pickled(self) -> bytes:
        """Pickle the plan for the actors.

        The user's answer model is pickled by value, because other machines may not be able to import its module.
        """
        pickler = ray_module("ray.cloudpickle")
        model = self.response_format.model if self.response_format else None
        module = sys.modules.get(model.__module__) if model is not None else None
        if module is None:
            return bytes(pickler.dumps(self))
        pickler.register_pickle_by_value(module)
        try:
            return bytes(pickler.dumps(self))
        finally:
            pickler.unregister_pickle_by_value(module)


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
            plan.check_folders()
            folder = _temporary_folder(self._stack)
            agent = MemAgent(
                settings=plan.settings,
                store=Path(plan.texts) if plan.texts else folder / "documents",
                checkpoints=plan.local_checkpoints(),
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
        """Return when the actor runs."""

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
            await self._reader.aclose()
        self._stack.close()


def _temporary_folder(stack: ExitStack) -> Path:
    """Create and lock a folder for this process. Folders of killed processes have no lock and are removed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    parent = Path(tempfile.gettempdir()) / f"memagent-ray-{user}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.is_symlink() or (hasattr(os, "getuid") and parent.stat().st_uid != user):
        raise CorpusError(f"the folder {parent} belongs to another user", hint="Set TMPDIR to a folder of your own.")
    for other in parent.iterdir():
        if other.suffix == ".folder":
            with suppress(RunHeldError, CheckpointError), lease(parent / "locks", other.stem):
                shutil.rmtree(other, ignore_errors=True)
    name = secrets.token_hex(8)
    stack.enter_context(lease(parent / "locks", name))
    folder = parent / f"{name}.folder"
    folder.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
