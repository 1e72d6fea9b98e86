"""Stores the files and texts of each key on disk, with limits on their size and number."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.documents.store import compute_document_id
from memagent_graph.plain_text import make_one_line
from memagent_graph.storage.private_files import create_private_file, create_private_folder
from memagent_serve.api_errors import APIError, make_bad_request_error, make_not_found_error
from memagent_serve.keys import Owner
from memagent_serve.ledger import Ledger

_MAX_NAME_LENGTH: Final = 200
_MAX_FILES: Final = 10_000
"""Maximum number of files and texts of one key."""
_MAX_CONVERSIONS: Final = 2
"""Maximum number of files of one key that are converted at once: each takes a thread, a processor and much memory."""
_keys_of_request: ContextVar[set[str] | None] = ContextVar("_keys_of_request", default=None)
_OWNER_CONDITION: Final = "WHERE coalesce(?1 = owner, 1)"
_TEXTS_OF_ANY_OWNER: Final = (
    "WITH RECURSIVE owners(name) AS (SELECT min(owner) FROM texts UNION ALL "
    "SELECT (SELECT min(owner) FROM texts WHERE owner > name) FROM owners WHERE name NOT NULL) "
    "SELECT 1 FROM texts WHERE owner IN owners AND key = ? LIMIT 1"
)
"""Uses the primary key, which begins with the owner: one search for each owner, and no walk through all texts."""


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file in the API's list."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def to_body(self) -> dict[str, Any]:
        """Return the file's data in the API."""
        return {"object": "file", "status": "processed", **asdict(self)}


@dataclass(eq=False)
class Uploads:
    """The uploaded files of all keys, and the texts that were stored for their requests, including refused ones."""

    folder: Path
    """The folder for the files."""
    ledger: Ledger
    """Contains the lists of files and texts."""
    store: DocumentStore
    """Contains the texts, apart from those of others; no other server may use it."""
    quota: int = field(kw_only=True)
    """The maximum bytes of one key's files and texts together, unless the key has its own limit."""
    total_quota: int = field(kw_only=True)
    """The maximum bytes of all keys together."""
    texts_in_use: Callable[[], Iterable[DocumentRef]] = tuple
    """Returns the documents that are being read."""

    def __post_init__(self) -> None:
        self.store = self.store.for_temporary_documents()
        self._held_keys: dict[int, set[str]] = {}
        self._conversions: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_MAX_CONVERSIONS)
        )
        listed_ids = {row["id"] for row in self.ledger.execute("SELECT id FROM files")}
        for path in self.folder.glob("*/file-*.bin"):  # files that are not in the list were left by a killed process
            if path.stem not in listed_ids:
                path.unlink(missing_ok=True)

    def add(self, owner: Owner, name: str | None, purpose: str, content: IO[bytes]) -> UploadedFile:
        """Store a file. Old texts are removed for it, as for `add_text`.

        Raises:
            APIError: 413 if the key's files would exceed their limit, 507 if all keys' would; 400 for an empty file.
        """
        file_id = f"file-{secrets.token_hex(16)}"
        path = self.folder / owner.name / f"{file_id}.bin"
        create_private_folder(path.parent)
        create_private_file(path)
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(content, target)
                file_bytes = target.tell()
            if not file_bytes:
                raise make_bad_request_error("the file is empty", "file")
            purpose = make_one_line(purpose, _MAX_NAME_LENGTH)
            file = UploadedFile(file_id, file_bytes, int(time.time()), clean_file_name(name), purpose)
            with self.ledger.lock:
                self._free_space(owner, file_bytes)
                self.ledger.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", (owner.name, *astuple(file)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    async def read_text(self, owner: Owner, file_id: str) -> DocumentRef:
        """Return the text of a file, which is converted if its text is not stored. Raises like `get` and `add_text`."""
        file = await asyncio.to_thread(self.get, owner, file_id)
        values = time.time(), owner.name, file_id
        if (ref := await asyncio.to_thread(self._find_text, values)) is not None:
            return ref
        with (self.folder / owner.name / f"{file.id}.bin").open("rb") as content:
            document = Document.from_file(content, file.filename)
            return await self.add_text(owner, document, file_id)

    def _find_text(self, values: tuple[float, str, str]) -> DocumentRef | None:
        query = "UPDATE texts SET used = ? WHERE owner = ? AND file = ? RETURNING ref"
        with self.ledger.lock:
            for row in self.ledger.execute(query, values):
                ref: DocumentRef = json.loads(row["ref"])
                if self.store.has_text(ref):
                    _hold_text(ref)
                    return ref
        return None

    async def add_text(
        self, owner: Owner, document: Document, file_id: str | None = None, *, replaces_held: bool = False
    ) -> DocumentRef:
        """Store the text of a document for a key: plain text, Markdown, HTML, PDF, DOCX.

        If the texts of the key or of all keys would exceed their limit, the oldest texts that no read uses are removed.

        Args:
            owner: the key.
            document: the document.
            file_id: the id of the file with this text, for `read_text`.
            replaces_held: whether the request needs only this text from now on, as it has joined its texts in it.

        Raises:
            DocumentError: the document cannot be converted to text within the limits of `documents.conversion`.
            APIError: 413 for the key's limit, 507 for the limit of all keys; all other texts are being read.
        """
        async with self._conversions[owner.name]:
            await asyncio.to_thread(self._free_space, owner, 1)  # before a conversion takes minutes and memory
            ref = await self.store.add_async(document)
            await asyncio.to_thread(self._record_text, owner, ref, file_id, replaces_held)
        return ref

    def _record_text(self, owner: Owner, ref: DocumentRef, file_id: str | None, replaces_held: bool) -> None:
        with self.ledger.lock:
            if replaces_held and (held_keys := _keys_of_request.get()) is not None:
                held_keys.clear()
            key = compute_document_id(ref)
            values = (owner.name, key, self.store.count_bytes(ref), time.time(), json.dumps(ref), file_id)
            self.ledger.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", values)
            try:
                self._free_space(owner, 0, key)
            except APIError:
                self._remove_text(owner.name, key, ref)
                raise
            _hold_text(ref)

    @contextmanager
    def holding_texts(self) -> Iterator[None]:
        """Keep the texts that a request stores or finds, until its read has started."""
        keys: set[str] = set()
        token = _keys_of_request.set(keys)
        self._held_keys[id(keys)] = keys
        try:
            yield
        finally:
            del self._held_keys[id(keys)]
            _keys_of_request.reset(token)

    def _list_keys_in_use(self) -> set[str]:
        return {*map(compute_document_id, self.texts_in_use()), *itertools.chain(*list(self._held_keys.values()))}

    def _free_space(self, owner: Owner, additional_bytes: int, *needed_keys: str) -> None:
        """Remove the oldest texts that no read uses until `additional_bytes` bytes fit."""
        with self.ledger.lock:
            keys_in_use = {*self._list_keys_in_use(), *needed_keys}
            old_texts: dict[tuple[str, str], Any] = {}
            for quota_owner in (owner, None):
                excess_bytes, excess_entries = self._compute_excess(quota_owner, additional_bytes)
                excess_bytes -= sum(row["bytes"] for row in old_texts.values())
                excess_entries -= len(old_texts)
                removable_texts = self._iter_removable_texts(quota_owner, keys_in_use)
                while excess_bytes > 0 or excess_entries > 0:
                    if (row := next(removable_texts, None)) is None:
                        raise _make_quota_error(quota_owner)
                    if (row["owner"], row["key"]) not in old_texts:
                        old_texts[row["owner"], row["key"]] = row
                        excess_bytes, excess_entries = excess_bytes - row["bytes"], excess_entries - 1
            for row in old_texts.values():  # only now, since a refusal removes nothing
                self._remove_text(row["owner"], row["key"], json.loads(row["ref"]))

    def _iter_removable_texts(self, owner: Owner | None, keys_in_use: Collection[str]) -> Iterator[Any]:
        """Yield the rows of the texts that are not in use, the oldest first."""
        query = f"SELECT owner, key, bytes, ref FROM texts {_OWNER_CONDITION} ORDER BY used"  # noqa: S608  no text of a client
        rows = self.ledger.execute(query, (owner and owner.name,))
        yield from (row for row in rows if row["key"] not in keys_in_use)

    def _remove_text(self, owner: str, key: str, ref: DocumentRef) -> None:
        self.ledger.execute("DELETE FROM texts WHERE owner = ? AND key = ?", (owner, key))
        other_rows = self.ledger.execute(_TEXTS_OF_ANY_OWNER, (key,))
        if not other_rows and key not in self._list_keys_in_use():
            self.store.remove(ref)

    def _compute_excess(self, owner: Owner | None, additional_bytes: int) -> tuple[int, int]:
        """Return by how many bytes and entries the quota of a key, or of all keys if `owner` is None, is exceeded."""
        quota, max_files = self.total_quota, 100 * _MAX_FILES
        if owner is not None:
            quota, max_files = owner.max_bytes or self.quota, _MAX_FILES
        entries = "(SELECT owner, bytes FROM files UNION ALL SELECT owner, bytes FROM texts)"
        query = f"SELECT coalesce(sum(bytes), 0), count(*) FROM {entries} {_OWNER_CONDITION}"  # noqa: S608  no text of a client
        ((used_bytes, entry_count),) = self.ledger.execute(query, (owner and owner.name,))
        return used_bytes + additional_bytes - quota, entry_count + bool(additional_bytes) - max_files

    def list_files(self, owner: Owner) -> list[UploadedFile]:
        """Return the files of a key, the newest first."""
        return self._select_files("owner = ? ORDER BY created_at DESC, id", (owner.name,))

    def get(self, owner: Owner, file_id: str) -> UploadedFile:
        """Return a file.

        Raises:
            APIError: 404; the file does not exist, or belongs to another key.
        """
        for file in self._select_files("owner = ? AND id = ?", (owner.name, file_id)):
            return file
        raise make_not_found_error(f"there is no file {make_one_line(file_id, 64)!r}", param="file_id")

    def get_content_path(self, owner: Owner, file_id: str) -> Path:
        """Return the path of a file's bytes. Raises like `get`."""
        return self.folder / owner.name / f"{self.get(owner, file_id).id}.bin"

    def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file. Runs that read it keep what they have read. Raises like `get`."""
        path = self.get_content_path(owner, file_id)
        self.ledger.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner.name, file_id))
        path.unlink(missing_ok=True)

    def _select_files(self, condition: str, values: tuple[Any, ...]) -> list[UploadedFile]:
        columns = "id, bytes, created_at, filename, purpose"
        rows = self.ledger.execute(f"SELECT {columns} FROM files WHERE {condition}", values)  # noqa: S608  those above
        return [UploadedFile(**row) for row in rows]


def _hold_text(ref: DocumentRef) -> None:
    if (keys := _keys_of_request.get()) is not None:
        keys.add(compute_document_id(ref))


def _make_quota_error(owner: Owner | None) -> APIError:
    if owner is not None:
        message = "the files and texts of this key would exceed their limit; delete some files, or send less text"
        return APIError(413, message, code="files_too_large")
    message = "the files and texts of all keys would exceed their limit; try again later"
    return APIError(507, message, code="insufficient_storage", headers={"Retry-After": "60"})


def clean_file_name(name: str | None) -> str:
    """Return the last part of a client's file name, in one line, for messages. It is never used as a path."""
    file_name = re.split(r"[\\/]", name or "")[-1]
    return make_one_line(file_name, _MAX_NAME_LENGTH).strip() or "file"
