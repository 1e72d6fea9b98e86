"""Uploaded files, each in the folder of its key: its bytes, and next to them its metadata."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.plain_text import in_one_line
from memagent_graph.storage.private_files import private_file, private_folder
from memagent_graph.storage.whole_files import write_whole
from memagent_serve.api_errors import ApiError, bad_request, not_found
from memagent_serve.keys import Owner

_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_PIECE_BYTES: Final = 1 << 20
_LONGEST_NAME: Final = 200


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


class Uploads:
    """The uploaded files of all keys.

    Args:
        folder: the folder for them.
        quota: the maximum bytes of one key's files together, unless the key has its own limit.
    """

    def __init__(self, folder: Path, *, quota: int) -> None:
        self._folder = folder
        self._quota = quota

    def add(self, owner: Owner, name: str | None, purpose: str, pieces: IO[bytes]) -> UploadedFile:
        """Store a file.

        Raises:
            ApiError: 413 if the key's files would exceed their limit; 400 for an empty file.
        """
        room = (owner.max_bytes or self._quota) - sum(file.bytes for file in self.all(owner))
        file_id = f"file-{secrets.token_hex(16)}"
        path = self._path(owner, file_id)
        private_folder(path.parent)
        private_file(path)
        size = 0
        try:
            with path.open("wb") as target:
                while piece := pieces.read(_PIECE_BYTES):
                    size += len(piece)
                    if size > room:
                        raise ApiError(
                            413,
                            "the files of this key would exceed their limit; delete some",
                            code="files_too_large",
                        )
                    target.write(piece)
            if not size:
                raise bad_request("the file is empty", "file")
            entry = UploadedFile(file_id, size, int(time.time()), shown_name(name), in_one_line(purpose, _LONGEST_NAME))
            write_whole(path.with_suffix(".json"), json.dumps(asdict(entry)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return entry

    def all(self, owner: Owner) -> list[UploadedFile]:
        """Return the files of a key, the newest first."""
        files = []
        for path in self._folder_of(owner).glob("file-*.json"):
            with suppress(FileNotFoundError):  # deleted in the meantime
                files.append(_read(path))
        return sorted(files, key=lambda file: (-file.created_at, file.id))

    def get(self, owner: Owner, file_id: str) -> UploadedFile:
        """One file.

        Raises:
            ApiError: 404; there is none, or it belongs to another key.
        """
        path = self._path(owner, file_id).with_suffix(".json")
        if not path.is_file():
            raise _no_file(file_id)
        return _read(path)

    def content(self, owner: Owner, file_id: str) -> Path:
        """Return the path of its bytes. Raises like `get`."""
        self.get(owner, file_id)
        return self._path(owner, file_id)

    def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file. What was read of it stays with its runs. Raises like `get`."""
        path = self.content(owner, file_id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _folder_of(self, owner: Owner) -> Path:
        return self._folder / owner.name

    def _path(self, owner: Owner, file_id: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise _no_file(file_id)
        return self._folder_of(owner) / f"{file_id}.bin"


def shown_name(name: str | None) -> str:
    """Return a client's name for a file, for messages: its last part, in one line; it is never used as a path."""
    last = re.split(r"[\\/]", name or "")[-1]
    return in_one_line(last, _LONGEST_NAME).strip() or "file"


def listing(files: Iterable[UploadedFile]) -> dict[str, Any]:
    """Return a list in the API's form."""
    return {"object": "list", "data": [file.body() for file in files], "has_more": False}


def _read(path: Path) -> UploadedFile:
    return UploadedFile(**json.loads(path.read_text(encoding="utf-8")))


def _no_file(file_id: str) -> ApiError:
    return not_found(f"there is no file {in_one_line(file_id, 64)!r}", param="file_id")


async def stored(store: DocumentStore, file: IO[bytes], name: str) -> DocumentRef:
    """Return the text of a stored file: plain text, Markdown, HTML, PDF, DOCX; its name and first bytes determine the
    kind.

    Raises:
        DocumentError: it cannot be converted to text within the limits of `documents.conversion`.
    """
    return await store.add_async(Document.from_file(file, name))
