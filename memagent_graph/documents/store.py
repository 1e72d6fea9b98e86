"""Stores the texts of documents as UTF-8 files in a folder, each named by the SHA-256 of its content.

    texts/<sha256>.txt         a document's text, unchanged, with its newlines
    sections/<sha256>.json     starts of pages, sources or headings
    temporary/<sha256>.<kind>  text, sections and headings of a document that a server may remove

Graph state and run logs contain only a `DocumentRef`; the text is read from the store. Several processes may share a
folder: files appear only when they are complete, and their names depend only on their content.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import IO, Any, Final, Literal, Self

from memagent_graph.concurrency.background import Cancellation
from memagent_graph.converters import Omission, Parts
from memagent_graph.documents.conversion import run_in_thread
from memagent_graph.documents.decoding import READ_BYTES
from memagent_graph.documents.headings import find_headings
from memagent_graph.documents.loaders import open_document
from memagent_graph.documents.omissions import OmissionSummary, describe_omission
from memagent_graph.documents.sources import PDF_TYPE, Document, DocumentRef, SourceMark
from memagent_graph.errors import (
    DocumentError,
    DocumentMismatchError,
    DocumentStoreError,
    EmptyDocumentError,
    EncodingError,
)
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.private_files import create_private_folder, get_default_store_path, write_atomically

_MarkKind = Literal["sections", "headings"]
_Kind = Literal["text", "sections", "headings"]
_KEY = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MARKS: Final = 1_000_000
"""Maximum number of sections or headings of a document."""
_MAX_MARK_BYTES: Final = 64 << 20
"""Maximum size of a file of sections or headings."""
_UNFINISHED_FILE_SECONDS: Final = 86_400
"""The age after which an unfinished file is deleted, because its writer must have been killed."""


class DocumentStore:
    """A folder of document texts.

    Args:
        root: the folder. It is created when the first document is added.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._converter: str | None = None
        self._replace_undecodable = False
        self._is_temporary = False
        self._texts = self.root / "texts"
        self._sections = self.root / "sections"
        self._temporary = self.root / "temporary"

    def with_options(self, *, converter: str | None = None, replace_undecodable: bool = False) -> Self:
        """Return a copy of the store with options for the documents that are added through it.

        Args:
            converter: a user's converter for files that are not plain text: path/to/file.py:function or
                module:function, see `memagent_graph.converters`.
            replace_undecodable: whether to put U+FFFD in place of bytes or code points that are not text.
        """
        store = copy(self)
        store._converter, store._replace_undecodable = converter, replace_undecodable
        return store

    def for_temporary_documents(self) -> Self:
        """Return a copy of the store whose documents have files of their own, so that `remove` deletes nobody else's.

        All stores of the folder can read them. A copy does not know which documents the copies of other programs still
        use, so only one program may have such a copy of a folder.
        """
        store = copy(self)
        store._is_temporary = True
        return store

    def add(self, document: Any, *, cancellation: Cancellation | None = None) -> DocumentRef:
        """Store the text of a document, if it is not stored yet, and return its reference.

        Args:
            document: a `Document`, or a source that `Document.of` accepts. It is read a megabyte at a time.
            cancellation: ends a conversion from another thread.

        Raises:
            DocumentError: the document cannot be read or stored. The subclass shows the reason.
            MissingExtraError: the converter needs an extra that is not installed.
        """
        document = Document.of(document)
        with self._translate_disk_errors():
            self._make_folders()
            source = open_document(
                document,
                replace=self._replace_undecodable,
                cancellation=cancellation or Cancellation(),
                converter=self._converter,
            )
            with source as (media_type, parts), self._open_temporary_file() as file:
                ref, marks = self._write_parts(parts, file, document.name, media_type)
                for kind, data in marks.items():
                    write_atomically(self._get_path(ref, kind, is_temporary=self._is_temporary), data)
                text_path = self._get_path(ref, "text", is_temporary=self._is_temporary)
                if not text_path.exists():
                    file.flush()  # raises if the disk is full; a write itself may store only a part
                    os.fsync(file.fileno())
                    Path(file.name).replace(text_path)
            if document.pages:
                ref["pages"] = document.pages
            if media_type == PDF_TYPE and isinstance(document.content, Path) and document.content.name == document.name:
                ref["path"] = str(document.content.absolute())
            return ref

    async def add_async(self, document: Document) -> DocumentRef:
        """Run `add` in a thread. If the caller is cancelled, the conversion is cancelled too."""
        return await run_in_thread(lambda cancellation: self.add(document, cancellation=cancellation))

    async def reattach(self, ref: DocumentRef, document: Document) -> None:
        """Store the text of a reference again, if it was removed.

        Raises:
            DocumentMismatchError: the document has a different text from the reference.
        """
        if "pages" in ref and not document.pages:
            document = document.only(ref["pages"])
        new_ref = await self.add_async(document)
        if new_ref["key"] != ref["key"]:
            raise DocumentMismatchError(
                f"{document.name} is not the text that {ref['name']} was", hint="Pass the document of that run."
            )

    def read_bytes(self, ref: DocumentRef, start_byte: int, end_byte: int) -> bytes:
        """Return the stored bytes from `start_byte` to `end_byte`, or to the end of the text."""
        if not self.has_text(ref):
            raise DocumentError(
                f"the text of {ref['name']} is not in the document store {self.root}",
                hint="It was removed, or stored elsewhere: pass the document again.",
            )
        with self._translate_disk_errors("read"), self._find_path(ref, "text").open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size  # a log of somebody else may have any positions
            file.seek(min(start_byte, size))
            return file.read(max(0, min(end_byte, size) - start_byte))

    def read(self, ref: DocumentRef, start_byte: int, end_byte: int) -> str:
        """Return the text between two byte positions. Raises DocumentError if they split a character."""
        try:
            return self.read_bytes(ref, start_byte, end_byte).decode()
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"bytes {start_byte} to {end_byte} of {ref['name']} split a character",
                hint="Use the spans of chunks.",
            ) from error

    def pieces(self, ref: DocumentRef) -> Iterator[str]:
        """Yield the text, a megabyte at a time. Raises DocumentError if it is no longer in the store."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, ref["size"], READ_BYTES):
            if not (data := self.read_bytes(ref, start, start + READ_BYTES)):
                return  # the size in such a log may be wrong, too
            yield decoder.decode(data)

    def sections(self, ref: DocumentRef) -> list[SourceMark]:
        """Return the starts of the document's pages or sources, in order; empty if it has none."""
        return self._load_marks(ref, "sections")

    def headings(self, ref: DocumentRef) -> list[SourceMark]:
        """Return the starts of the document's headings, in order. A label includes the headings above.

        They come from the converter. If it found none, or only a title, headings and numbered clauses are detected in
        the text.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        marks = self._load_marks(ref, "headings")
        if len(marks) <= 1:
            detected_marks = find_headings(self.pieces(ref), ref["media_type"])
            mark_by_start = {mark.start_char: mark for mark in [*detected_marks, *marks]}
            marks = [mark_by_start[start] for start in sorted(mark_by_start)]
        return marks

    def _load_marks(self, ref: DocumentRef, kind: _MarkKind) -> list[SourceMark]:
        if (name := ref.get(kind)) is None:
            return []
        try:
            values = read_json_file(self._find_path(ref, kind), _MAX_MARK_BYTES)
            return [SourceMark(start_char, label) for start_char, label in values]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise DocumentError(
                f"{name!r} is not a list of sections that this version wrote: {error}", hint="Read the file again."
            ) from error

    def has_text(self, ref: DocumentRef) -> bool:
        """Return whether the text of a reference is in this store."""
        return self._find_path(ref, "text").exists()

    def count_bytes(self, ref: DocumentRef) -> int:
        """Return the size of a document in the store, with its sections and headings."""
        return sum(path.stat().st_size for path in self._list_paths(ref) if path.exists())

    def remove(self, ref: DocumentRef) -> None:
        """Delete a document's text, sections and headings.

        Other references to them lose them, too, unless this store is for temporary documents.
        """
        with self._translate_disk_errors():
            for path in self._list_paths(ref):
                path.unlink(missing_ok=True)

    def _list_paths(self, ref: DocumentRef) -> list[Path]:
        kinds: list[_Kind] = ["text", *(kind for kind in ("sections", "headings") if ref.get(kind) is not None)]
        return [self._get_path(ref, kind, is_temporary=self._is_temporary) for kind in kinds]

    @contextlib.contextmanager
    def _translate_disk_errors(self, action: Literal["read", "written"] = "written") -> Iterator[None]:
        """Raise `DocumentStoreError` for a full or read-only disk, or too many open files."""
        try:
            yield
        except OSError as error:
            raise DocumentStoreError(
                f"the document store {self.root} cannot be {action}: {error.strerror or error}",
                hint="Raise the limit of open files (`ulimit -n`)."
                if error.errno in {errno.EMFILE, errno.ENFILE}
                else "Make it writable, free disk space, or set MEMAGENT_HOME to another folder for all data.",
            ) from error

    def _make_folders(self) -> None:
        for folder in (self._temporary,) if self._is_temporary else (self._texts, self._sections):
            create_private_folder(folder)
        for path in self.root.glob(".incoming-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _UNFINISHED_FILE_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _open_temporary_file(self) -> Iterator[IO[bytes]]:
        """Yield a temporary file in the store's folder. It is removed at the end, unless it was renamed."""
        with tempfile.NamedTemporaryFile("wb", prefix=".incoming-", dir=self.root, delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def _write_parts(
        self, parts: Parts, file: IO[bytes], name: str, media_type: str
    ) -> tuple[DocumentRef, dict[_MarkKind, bytes]]:
        """Write blocks to a file, and return the document's reference, and the starts of sections and headings as JSON.

        Args:
            parts: the blocks and omissions of the document.
            file: an open binary file.
            name: the document's name.
            media_type: the document's actual type.

        Raises:
            EmptyDocumentError: the text has only white space.
            EncodingError: the text has a surrogate, and U+FFFD may not take its place.
        """
        digest = hashlib.sha256()
        omissions = OmissionSummary()
        sections, headings = _Marks("sections", omissions), _Marks("headings", omissions)
        characters = 0
        is_blank = True
        for part in parts:
            if isinstance(part, Omission):
                omissions.add(part)
                continue
            if part.label is not None:
                sections.add(characters, str(part.label))
            if part.headings:
                headings.add(characters, " > ".join(map(str, part.headings)))
            text = part.text
            try:
                data = text.encode()
            except UnicodeEncodeError as error:
                if not self._replace_undecodable:
                    raise EncodingError(
                        f"{name} has half of a surrogate pair at character {characters + error.start}, which no text "
                        "file can hold",
                        hint="Use --replace-undecodable to put U+FFFD there.",
                    ) from None
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                data = text.encode()
            digest.update(data)
            file.write(data)
            characters += len(text)
            is_blank = is_blank and (not text or text.isspace())
        stored_omissions = omissions.list_kinds()
        if is_blank:
            omission_texts = "; ".join(map(describe_omission, stored_omissions))
            raise EmptyDocumentError(
                f"{name} holds no text"
                + (" but white space" if characters else "")
                + (f"; {omission_texts}" if omission_texts else ""),
                hint="Pass a converter of your own that reads it (--converter), such as one for scanned pages."
                if omission_texts
                else "Check that it is the document you meant.",
            )
        ref = DocumentRef(key=f"sha256:{digest.hexdigest()}", name=name, size=file.tell(), media_type=media_type)
        data_by_kind: dict[_MarkKind, bytes] = {}
        if sections.values:
            data_by_kind["sections"] = _encode_json(sections.values)
        if headings.values:
            data_by_kind["headings"] = _encode_json(headings.values)
        for kind, data in data_by_kind.items():
            ref[kind] = hashlib.sha256(data).hexdigest()
        if stored_omissions:
            ref["omissions"] = stored_omissions
        return ref, data_by_kind

    def _find_path(self, ref: DocumentRef, kind: _Kind) -> Path:
        """Return the path of a part of a document: that of this store, or else that of the other kind of store."""
        path = self._get_path(ref, kind, is_temporary=self._is_temporary)
        if path.exists():
            return path
        other_path = self._get_path(ref, kind, is_temporary=not self._is_temporary)
        return other_path if other_path.exists() else path

    def _get_path(self, ref: DocumentRef, kind: _Kind, *, is_temporary: bool) -> Path:
        """Return the path of a part of a document.

        Raises:
            DocumentError: the key is malformed.
            ValueError: the name of sections or headings is not a digest.
        """
        match = _KEY.fullmatch(ref["key"])
        if match is None:
            raise DocumentError(
                f"{ref['key']!r} is not a key of the document store", hint="Pass what store.add returned."
            )
        if is_temporary:
            return self._temporary / f"{compute_document_id(ref)}.{kind}"
        if kind == "text":
            return self._texts / f"{match[1]}.txt"
        if not re.fullmatch(r"[0-9a-f]{64}", name := ref[kind]):
            raise ValueError("its name is not a digest")
        return self._sections / f"{name}.json"


def compute_document_id(ref: DocumentRef) -> str:
    """Return the SHA-256 of a document: of its text and of its sections and headings."""
    parts = (ref["key"], ref.get("sections"), ref.get("headings"))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Marks:
    """The starts of sections or headings, with labels, of at most `_MAX_MARK_BYTES` as JSON.

    Args:
        noun: sections or headings.
        omissions: counts the marks after the first `_MAX_MARKS`.
    """

    def __init__(self, noun: str, omissions: OmissionSummary) -> None:
        self.values: list[tuple[int, str]] = []
        self._noun, self._omissions = noun, omissions
        self._bytes, self._longest = 0, _MAX_MARK_BYTES

    def add(self, start_char: int, label: str) -> None:
        """Add a mark. If the marks become too large, the longest labels lose their middle: a page is at the end."""
        if len(self.values) >= _MAX_MARKS:
            self._omissions.add(Omission(f"names of {self._noun} after the first {_MAX_MARKS:,}"))
            return
        self._append(start_char, label)
        while self._bytes > _MAX_MARK_BYTES:
            values, self.values, self._bytes = self.values, [], 0
            self._longest = max(len(label) for _, label in values) // 2
            for value in values:
                self._append(*value)

    def _append(self, start_char: int, label: str) -> None:
        if len(label) > self._longest:
            half = self._longest // 2
            label = f"{label[:half]}…{label[len(label) - half :]}"
        self.values.append((start_char, label))
        self._bytes += len(_encode_json(label)) + len("[1234567890123, ], ")


_json_encoder: Final = json.JSONEncoder(ensure_ascii=False)


def _encode_json(value: Any) -> bytes:
    return _json_encoder.encode(value).encode("utf-8", "replace")


def open_store(folder: Path | str | None) -> DocumentStore:
    """Return the store in a folder, by default in the data folder.

    Raises:
        DocumentStoreError: `folder` is an address.
    """
    if isinstance(folder, str) and "://" in folder:
        raise DocumentStoreError(
            f"--store must be a folder, got the address {folder.split('://')[0]}://...",
            hint="Use a folder. Machines can share one that all of them mount.",
        )
    return DocumentStore(folder or get_default_store_path())


def find_store(document: DocumentRef, log: Path) -> DocumentStore:
    """Return the store that has a log's document: next to the log (as in evaluations), or else in the data folder."""
    store_near_log = DocumentStore(log.with_name(get_default_store_path().name))
    with contextlib.suppress(DocumentError, OSError):
        if store_near_log.has_text(document):
            return store_near_log
    return DocumentStore(get_default_store_path())
