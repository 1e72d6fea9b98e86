"""What an actor reads with: plain data that goes to every machine, and the reader that is made from it there."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from memagent_graph.corpus import CorpusReader
from memagent_graph.corpus.source_access import SourceAccess, scheme_of
from memagent_graph.errors import CheckpointError, CorpusError, RunHeldError
from memagent_graph.response_format import ResponseFormat
from memagent_graph.settings import ReaderSettings
from memagent_graph.storage.checkpoints import is_server
from memagent_graph.storage.leases import lease

_MARKER: Final = "seen-by-every-machine"


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """How documents are read on the machines of a cluster.

    The key and the URL of a database are in it: they are seen by whoever may use the cluster.
    """

    settings: ReaderSettings = field(default_factory=ReaderSettings)
    questions: tuple[str, ...] = ()
    """Asked about every document, after a document's own."""
    access: SourceAccess = field(default_factory=SourceAccess)
    """Opens documents; its root has to be seen by every machine, if it is a folder."""
    response_format: ResponseFormat | None = None
    api_key: str | None = field(default=None, repr=False)
    checkpoints: str | None = field(default=None, repr=False)
    """A PostgreSQL URL; or a SQLite file in a folder that every machine sees, of which each writes one of its own.
    Without it a document that was interrupted is read from its beginning."""
    texts: str | None = None
    """A folder that every machine sees, in which documents' texts stay; without it, they are removed when read."""
    logs: str | None = None
    """A folder that every machine sees, in which every actor logs in a file of its own."""
    home: str = field(default_factory=platform.node)
    """The driver's machine."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """What shows that a folder of the same name is the same folder."""

    def shared_folders(self) -> list[Path]:
        """The folders that this machine writes and every machine has to see."""
        files = [] if self.checkpoints is None or is_server(self.checkpoints) else [Path(self.checkpoints).parent]
        return list(dict.fromkeys([*files, *(Path(each) for each in (self.texts, self.logs) if each)]))

    def mark_folders(self) -> None:
        """Leave in every shared folder what machines recognise it by.

        Raises:
            CorpusError: a folder cannot be written.
        """
        for folder in self.shared_folders():
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                (folder / _MARKER).write_text(self.nonce, encoding="ascii")
            except OSError as error:
                raise CorpusError(f"{folder} cannot be written: {error}", hint="Check your rights there.") from error

    def require_folders(self) -> None:
        """Check on another machine that it sees what it has to.

        Raises:
            CorpusError: a folder is not there, or another one has its name.
        """
        here = platform.node()
        for folder in self.shared_folders():
            with suppress(OSError):
                if (folder / _MARKER).read_text("ascii") == self.nonce:
                    continue
            raise CorpusError(
                f"the machine {here} does not see the folder {folder} of {self.home}",
                hint="Put it on a file system that all machines of the cluster mount. Checkpoints can be in PostgreSQL "
                "instead: --checkpoints postgresql://...",
            )
        root = self.access.root
        if root and not scheme_of(root) and not Path(root).exists():
            raise CorpusError(
                f"the machine {here} does not see the documents' folder {root}",
                hint="Put it on a file system that all machines of the cluster mount, or in an object store.",
            )

    def remove_markers(self) -> None:
        """Remove what `mark_folders` left."""
        for folder in self.shared_folders():
            with suppress(OSError):
                (folder / _MARKER).unlink()

    def checkpoints_here(self) -> str | None:
        """The checkpoints of this machine: SQLite files are not to be shared between machines."""
        if self.checkpoints is None or is_server(self.checkpoints) or platform.node() == self.home:
            return self.checkpoints
        return f"{self.checkpoints}-{hashlib.sha256(platform.node().encode()).hexdigest()[:12]}"

    def shared_by(self, actors: int) -> ActorPlan:
        """The same for each of so many actors: together they keep the bounds of requests and tokens a minute."""
        requests, tokens = self.settings.requests_per_minute, self.settings.tokens_per_minute
        share = replace(
            self.settings,
            requests_per_minute=None if requests is None else requests / actors,
            tokens_per_minute=None if tokens is None else tokens / actors,
        )
        return replace(self, settings=share)


class ActorReader:
    """An actor's reader, with its folder on this machine's disk.

    Args:
        plan: how it reads.

    Raises:
        CorpusError: this machine does not see what it has to.
        MemAgentError: the settings cannot be used here.
    """

    def __init__(self, plan: ActorPlan) -> None:
        plan.require_folders()
        self._stack = ExitStack()
        self._folder = _own_folder(self._stack)
        name = f"{platform.node()}-{self._folder.name}"
        agent = plan.settings.make_reader(
            api_key=plan.api_key,
            store=Path(plan.texts) if plan.texts else self._folder / "documents",
            checkpoints=plan.checkpoints_here(),
            run_log=Path(plan.logs) / f"{name}.sqlite" if plan.logs else False,
        )
        self.reader = CorpusReader(
            agent,
            plan.questions,
            plan.access,
            keep_texts=plan.texts is not None,
            response_format=plan.response_format,
        )

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._stack.close()


def _own_folder(stack: ExitStack) -> Path:
    """A folder of this process's own. Those of processes that were killed are removed."""
    above = Path(tempfile.gettempdir()) / f"memagent-ray-{os.getuid() if hasattr(os, 'getuid') else 0}"
    above.mkdir(mode=0o700, exist_ok=True)
    for other in above.iterdir():
        if other.suffix == ".folder":
            with suppress(RunHeldError, CheckpointError), lease(above / "locks", other.stem):
                shutil.rmtree(other, ignore_errors=True)
    name = secrets.token_hex(8)
    stack.enter_context(lease(above / "locks", name))
    folder = above / f"{name}.folder"
    folder.mkdir(mode=0o700)
    return folder
