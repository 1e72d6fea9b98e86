"""The files and texts of each key on disk, bounded in size and number."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.plain_text import make_one_line
from memagent_graph.storage.private_files import create_private_file, create_private_folder
from memagent_serve.api_errors import ApiError, bad_request, not_found
from memagent_serve.keys import Owner
from memagent_serve.ledger import Ledger

_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_MAX_NAME_LENGTH: Final = 200
_MAX_FILES: Final = 10_000
"""Files and texts of one key."""
_MAX_CONVERSIONS: Final = 2
"""Files of one key: each takes a thread, a processor and much memory."""
_BY_OWNER: Final = "WHERE coalesce(?1 = owner, 1)"


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file in the API's list."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def body(self) -> dict[str, Any]:
        """Return the file's data in the API."""
        return {"object": "file", "status": "processed", **asdict(self)}


@dataclass(eq=False)
class Uploads:
    """The uploaded files of all keys, and the texts that were stored for their requests, also for refused ones."""

    folder: Path
    """The folder for the files."""
    ledger: Ledger
    """Has the lists of files and texts."""
    store: DocumentStore
    """Has the texts."""
    quota: int = field(kw_only=True)
    """The maximum bytes of one key's files and texts together, unless the key has its own limit."""
    total_quota: int = field(kw_only=True)
    """The maximum bytes of all keys together."""
    texts_in_use: Callable[[], Collection[str]] = tuple
    """Returns the keys of the documents that are being read."""

    def __post_init__(self) -> None:
        self._conversions: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_MAX_CONVERSIONS)
        )
        listed_ids = {row["id"] for row in self.ledger.run("SELECT id FROM files")}
        for path in self.folder.glob("*/file-*.bin"):  # a killed process left the files that are not in the list
            if path.stem not in listed_ids:
                path.unlink(missing_ok=True)

    def add(self, owner: Owner, name: str | None, purpose: str, content: IO[bytes]) -> UploadedFile:
        """Store a file.

        Raises:
            ApiError: 413 if the key's files would exceed their limit, 507 if all keys' would; 400 for an empty file.
        """
        file_id = f"file-{secrets.token_hex(16)}"
        path = self._get_path(owner, file_id)
        create_private_folder(path.parent)
        create_private_file(path)
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(content, target)
                size = target.tell()
            if not size:
                raise bad_request("the file is empty", "file")
            purpose = make_one_line(purpose, _MAX_NAME_LENGTH)
            file = UploadedFile(file_id, size, int(time.time()), display_name(name), purpose)
            with self.ledger.lock:
                for scope in (owner, None):
                    if self._exceeds_quota(scope, size):
                        raise _make_quota_error(scope)
                self.ledger.run("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", (owner.name, *astuple(file)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    async def read_text(self, owner: Owner, file_id: str) -> DocumentRef:
        """Return the text of a file, which is converted if its text is not stored. Raises like `get` and `add_text`."""
        path, values = self.content(owner, file_id), (time.time(), owner.name, file_id)
        query = "UPDATE texts SET used = ? WHERE owner = ? AND file = ? RETURNING ref"
        for row in self.ledger.run(query, values):
            ref: DocumentRef = json.loads(row["ref"])
            return ref
        with path.open("rb") as content:
            document = Document.from_file(content, self.get(owner, file_id).filename)
            return await self.add_text(owner, document, file_id)

    async def add_text(self, owner: Owner, document: Document, file_id: str | None = None) -> DocumentRef:
        """Store the text of a document for a key: plain text, Markdown, HTML, PDF, DOCX.

        If the key's or all keys' texts would exceed their limit, the oldest that no read uses are removed.

        Args:
            owner: the key.
            document: the document.
            file_id: the file that it is, for `read_text`.

        Raises:
            DocumentError: the document cannot be converted to text within the limits of `documents.conversion`.
            ApiError: 413 for the key's limit, 507 for the limit of all keys; all other texts are being read.
        """
        async with self._conversions[owner.name]:
            await asyncio.to_thread(self._free_space, owner, 1)  # before a conversion takes minutes and memory
            ref = await self.store.add_async(document)
            await asyncio.to_thread(self._count_text, owner, ref, file_id)
        return ref

    def _count_text(self, owner: Owner, ref: DocumentRef, file_id: str | None) -> None:
        with self.ledger.lock:
            values = (owner.name, ref["key"], ref["size"], time.time(), json.dumps(ref), file_id)
            self.ledger.run("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", values)
            try:
                self._free_space(owner, 0, ref["key"])
            except ApiError:
                self._remove_text(owner.name, ref)
                raise

    def _free_space(self, owner: Owner, more: int, *needed_keys: str) -> None:
        """Remove the oldest texts that no read uses until `more` bytes fit."""
        with self.ledger.lock:
            in_use = {*self.texts_in_use(), *needed_keys}
            for scope in (owner, None):
                while self._exceeds_quota(scope, more):
                    if not self._remove_oldest_text(scope, in_use):
                        raise _make_quota_error(scope)

    def _remove_oldest_text(self, owner: Owner | None, in_use: Collection[str]) -> bool:
        """Remove the oldest text that is not in use; returns whether there was one."""
        name = owner and owner.name
        for row in self.ledger.run(f"SELECT owner, key, ref FROM texts {_BY_OWNER} ORDER BY used", (name,)):  # noqa: S608
            if row["key"] not in in_use:
                self._remove_text(row["owner"], json.loads(row["ref"]))
                return True
        return False

    def _remove_text(self, owner: str, ref: DocumentRef) -> None:
        self.ledger.run("DELETE FROM texts WHERE owner = ? AND key = ?", (owner, ref["key"]))
        others = self.ledger.run("SELECT 1 FROM texts WHERE key = ?", (ref["key"],))
        if not others and ref["key"] not in self.texts_in_use():
            self.store.remove(ref)

    def _exceeds_quota(self, owner: Owner | None, more: int = 0) -> bool:
        """Return whether `more` bytes would exceed the quota of a key, or of all keys for None."""
        quota, max_files = self.total_quota, 100 * _MAX_FILES
        if owner is not None:
            quota, max_files = owner.max_bytes or self.quota, _MAX_FILES
        entries = "(SELECT owner, bytes FROM files UNION ALL SELECT owner, bytes FROM texts)"
        query = f"SELECT coalesce(sum(bytes), 0), count(*) FROM {entries} {_BY_OWNER}"  # noqa: S608  no text of a client
        ((size, number),) = self.ledger.run(query, (owner and owner.name,))
        return bool(size + more > quota or number + bool(more) > max_files)

    def list_files(self, owner: Owner) -> list[UploadedFile]:
        """Return the files of a key, the newest first."""
        return self._select_files("owner = ? ORDER BY created_at DESC, id", (owner.name,))

    def get(self, owner: Owner, file_id: str) -> UploadedFile:
        """Return a file.

        Raises:
            ApiError: 404; there is none, or it belongs to another key.
        """
        for file in self._select_files("owner = ? AND id = ?", (owner.name, file_id)):
            return file
        raise _make_missing_file_error(file_id)

    def content(self, owner: Owner, file_id: str) -> Path:
        """Return the path of its bytes. Raises like `get`."""
        self.get(owner, file_id)
        return self._get_path(owner, file_id)

    def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file. What was read of it stays with its runs. Raises like `get`."""
        path = self.content(owner, file_id)
        self.ledger.run("DELETE FROM files WHERE owner = ? AND id = ?", (owner.name, file_id))
        path.unlink(missing_ok=True)

    def _select_files(self, condition: str, values: tuple[Any, ...]) -> list[UploadedFile]:
        columns = "id, bytes, created_at, filename, purpose"
        rows = self.ledger.run(f"SELECT {columns} FROM files WHERE {condition}", values)  # noqa: S608  those above
        return [UploadedFile(**row) for row in rows]

    def _get_path(self, owner: Owner, file_id: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise _make_missing_file_error(file_id)
        return self.folder / owner.name / f"{file_id}.bin"


def _make_quota_error(owner: Owner | None) -> ApiError:
    if owner is not None:
        message = "the files and texts of this key would exceed their limit; delete some files, or send less text"
        return ApiError(413, message, code="files_too_large")
    message = "the files and texts of all keys would exceed their limit; try again later"
    return ApiError(507, message, code="insufficient_storage", headers={"Retry-After": "60"})


def display_name(name: str | None) -> str:
    """Return a client's name for a file, for messages: its last part, in one line; it is never used as a path."""
    last = re.split(r"[\\/]", name or "")[-1]
    return make_one_line(last, _MAX_NAME_LENGTH).strip() or "file"


def _make_missing_file_error(file_id: str) -> ApiError:
    return not_found(f"there is no file {make_one_line(file_id, 64)!r}", param="file_id")
