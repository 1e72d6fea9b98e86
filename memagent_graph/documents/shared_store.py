"""A document store for several machines: texts at a URL, and a folder on each machine in front of it.

    URL/texts/<sha256>.txt       as in `DocumentStore`: named by content, never changed
    URL/sections/<sha256>.json

What one machine adds, any other can read by its reference. A machine fetches a text once, compares it with its name,
and reads it from its own disk from then on, as fast as from a store that is not shared. A text appears at the URL when
it is complete: object stores show an upload only then, and on file systems it is renamed.

fsspec opens the URL: `s3://`, `gs://`, `az://`, `file://`, `sftp://` and others; some need a package of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from memagent_graph.documents.conversion import ConversionCancellation
from memagent_graph.documents.loaders import READ_BYTES
from memagent_graph.documents.sources import DocumentRef
from memagent_graph.documents.store import ABANDONED_SECONDS, DocumentStore, digest_of, publish
from memagent_graph.errors import DocumentError, DocumentStoreError
from memagent_graph.extra_modules import extra_module
from memagent_graph.storage.paths import data_folder, default_store

_RENAMING: Final = frozenset({"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp", "memory"})
"""File systems on which a file is seen while it is written; elsewhere it is seen when it is complete."""
_INCOMING: Final = ".incoming-"


class SharedDocumentStore(DocumentStore):
    """A document store at a URL, with a folder on this machine in front of it.

    Args:
        url: where the texts are; the client's own settings have its endpoint and keys.
        folder: the folder on this machine; one in the data folder if it is left out. Processes may share it.

    Raises:
        MissingExtraError: fsspec is not installed.
        DocumentStoreError: there is no such kind of URL, or its package is not installed.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        own = data_folder() / "shared-documents" / hashlib.sha256(url.encode()).hexdigest()[:24]
        super().__init__(folder or own)
        self.url = url
        self._files = _RemoteFiles(url)

    @property
    def place(self) -> str:
        """The URL, without a user's name and password."""
        return display_url(self.url)

    def add(
        self, document: Any, *, replace_undecodable: bool = False, cancellation: ConversionCancellation | None = None
    ) -> DocumentRef:
        """As in `DocumentStore`. When it returns, every machine can read the text."""
        ref = super().add(document, replace_undecodable=replace_undecodable, cancellation=cancellation)
        for name in _names(ref):
            self._files.upload(self.root / name, name)
        return ref

    async def fetch_async(self, ref: DocumentRef) -> None:
        """Fetch a text that is not on this machine, in a thread.

        Raises:
            DocumentError: it is not at the URL, is damaged, or the URL cannot be reached.
        """
        if not self._text_path(ref).exists():
            await asyncio.to_thread(self._path, ref)

    def remove(self, ref: DocumentRef) -> None:
        """Delete a document's text on this machine and at the URL. Texts that other machines fetched stay there."""
        super().remove(ref)
        for name in _names(ref):
            self._files.remove(name)

    def _fetch(self, remote: str, path: Path, sha256: str) -> None:
        """Fetch a file, if it is at the URL; it is seen here when it is complete and compared with its name.

        Raises:
            DocumentError: it is damaged, the URL cannot be reached, or this machine's disk is full.
        """
        with self._translate_disk_errors():
            self._make_folders()
            with self._new_file() as (file, temporary):
                digest, found = hashlib.sha256(), False
                for piece in self._files.pieces(remote):
                    found = True
                    digest.update(piece)
                    file.write(piece)
                if not found:
                    return
                if digest.hexdigest() != sha256:
                    raise DocumentError(
                        f"{remote} in the document store {self.place} is damaged: its content has another "
                        "sha256 than its name",
                        hint="Delete that file, and pass the document again.",
                    )
                publish(file, temporary, path)


def _names(ref: DocumentRef) -> list[str]:
    """Return the files of a document, the text first."""
    marks = [f"sections/{name}.json" for name in (ref.get("sections"), ref.get("headings")) if name]
    return [f"texts/{digest_of(ref)}.txt", *marks]


class _RemoteFiles:
    """The files at a URL. Methods block, and may be called from any thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        fsspec = extra_module("fsspec", "corpus", "a document store at a URL")
        try:
            self._filesystem, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise DocumentStoreError(
                f"the document store {display_url(url)} cannot be opened: {error}",
                hint="Install the package of this kind of URL, such as s3fs, gcsfs or adlfs, or name another URL.",
            ) from None
        self._root = root.rstrip("/")
        protocol = self._filesystem.protocol
        self._renames = bool(_RENAMING & {*((protocol,) if isinstance(protocol, str) else protocol)})
        self._is_swept = not self._renames

    def upload(self, path: Path, name: str) -> None:
        """Put a file there, unless there is one of its name and size."""
        final = f"{self._root}/{name}"
        with self._failures("written"):
            self._filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if self._filesystem.info(final)["size"] == path.stat().st_size:
                    return
            if not self._renames:
                self._filesystem.put_file(str(path), final)
                return
            self._sweep()
            incoming = f"{self._root}/{_INCOMING}{uuid.uuid4().hex}"
            self._filesystem.makedirs(final.rpartition("/")[0], exist_ok=True)
            try:
                self._filesystem.put_file(str(path), incoming)
                self._filesystem.mv(incoming, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._filesystem.rm_file(incoming)
                raise

    def _sweep(self) -> None:
        """Delete what uploads that were killed have left, once."""
        if self._is_swept:
            return
        self._is_swept = True
        now = datetime.datetime.now(datetime.UTC)
        with contextlib.suppress(Exception):  # it is tidying up: what matters fails where it is needed
            for path in self._filesystem.glob(f"{self._root}/{_INCOMING}*"):
                if (now - self._filesystem.modified(path)).total_seconds() > ABANDONED_SECONDS:
                    self._filesystem.rm_file(path)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield a file's content, a megabyte at a time; nothing if there is no such file."""
        with self._failures("read"):
            self._filesystem.invalidate_cache()
            try:
                file = self._filesystem.open(f"{self._root}/{name}", "rb")
            except FileNotFoundError:
                return
            with file:
                while piece := file.read(READ_BYTES):
                    yield piece

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self._failures("written"), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._root}/{name}")

    @contextlib.contextmanager
    def _failures(self, done: Literal["read", "written"]) -> Iterator[None]:
        try:
            yield
        except (DocumentError, GeneratorExit):
            raise
        except Exception as error:  # clients of stores raise their own kinds, whose words may repeat keys
            reason = error.strerror if isinstance(error, OSError) else None
            raise DocumentStoreError(
                f"the document store {display_url(self._url)} cannot be {done}: {reason or type(error).__name__}",
                hint="Check the URL, your rights there, and the connection; then start again. What is on this machine "
                "is kept.",
            ) from error


def open_store(place: str | None, folder: Path | None = None) -> DocumentStore:
    """Return the store at a URL that several machines share, or in a folder; the user's own if no place is given.

    Args:
        place: a URL for fsspec, as in `s3://bucket/texts`, or a folder's path.
        folder: where this machine keeps texts of a URL; one in the data folder if it is left out.

    Raises:
        MissingExtraError, DocumentError: as `SharedDocumentStore`.
    """
    if place is None:
        return DocumentStore(folder or default_store())
    return SharedDocumentStore(place, folder) if "://" in place else DocumentStore(Path(place))


def store_of(document: DocumentRef, log: Path) -> DocumentStore:
    """Return the store with a logged run's document: one next to the log (of an evaluation), otherwise the user's."""
    beside = DocumentStore(log.with_name(default_store().name))
    try:
        beside.read_bytes(document, 0, 1)
    except (DocumentError, OSError):
        return DocumentStore(default_store())
    return beside


def display_url(url: str) -> str:
    """Return the URL without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)
