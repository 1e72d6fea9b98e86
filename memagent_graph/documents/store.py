"""Stores documents' text: a folder of UTF-8 files named by their content's sha256.

    texts/<sha256>.txt       a document's text, unchanged, with its newlines
    sections/<sha256>.json   where pages or sources begin; with -text or -markdown, where headings do
    streams/<uuid>.txt       the text of a live stream so far
    streams/<uuid>.json      which text a stream became when it ended

State and run logs contain a `DocumentRef`; the text is read from here. Several processes may share a folder: files
appear only when they are complete, and their names depend only on their content.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from memagent_graph.documents.conversion import ConversionBounds, ConversionCancellation, in_thread
from memagent_graph.documents.headings import headings, is_markdown
from memagent_graph.documents.live_streams import LiveStream, utf8
from memagent_graph.documents.loaders import READ_BYTES, LabelledText, no_pages, opened
from memagent_graph.documents.sources import PDF, Document, DocumentRef, SourceMark
from memagent_graph.errors import (
    DocumentError,
    DocumentMismatchError,
    EmptyDocumentError,
)
from memagent_graph.storage.private_files import private_folder

__all__ = ["Document", "DocumentRef", "DocumentStore", "SourceMark"]

_KEY = re.compile(r"(sha256):([0-9a-f]{64})|(stream):([0-9a-f-]{36})")
ABANDONED_SECONDS: Final = 86_400
"""After so long, a file that is being written has been given up."""


class DocumentStore:
    """A folder of document texts.

    Args:
        root: the folder; it is made when the first document is added.
        bounds: limits for the conversion of a PDF, DOCX or HTML file; if left out, those in the environment
            (`ConversionBounds.from_environment`).
    """

    def __init__(self, root: str | os.PathLike[str], *, bounds: ConversionBounds | None = None) -> None:
        self.root = Path(root)
        self._bounds = bounds
        self._texts = self.root / "texts"
        self._sections = self.root / "sections"
        self._streams = self.root / "streams"
        self._live: dict[str, LiveStream] = {}
        self._became: dict[str, tuple[str, int]] = {}

    def add(
        self, document: Any, *, replace_undecodable: bool = False, cancellation: ConversionCancellation | None = None
    ) -> DocumentRef:
        """Store a document's text, once, or register a live stream to be stored as it is read.

        Args:
            document: a `Document`, or anything that `Document.of` accepts. It is read here, a megabyte at a time,
                unless it is live.
            replace_undecodable: put U+FFFD for bytes or code points that are not text.
            cancellation: ends a conversion from another thread.

        Raises:
            DocumentError: it cannot be read (see the subclasses for why), or it cannot be stored; with the remedy.
            MissingExtraError: its kind needs the extra `files`.
        """
        document = Document.of(document)
        with self._disk_errors_translated():
            self._make_folders()
            if document.is_live and document.pages is not None:
                raise no_pages(document, "a stream of text")
            if document.is_live:
                return self._register(document, str(uuid.uuid4()), replace_undecodable)
            replace = replace_undecodable or document.errors == "replace"
            opening = opened(document, replace=replace, bounds=self._bounds, cancellation=cancellation)
            with opening as (kind, pieces), self._new_file() as (file, temporary):
                key, size, marks = _write(pieces, file, document.name, replace=replace)
                publish(file, temporary, self._texts / f"{key}.txt")
            ref = DocumentRef(key=f"sha256:{key}", name=document.name, size=size, media_type=kind)
            if marks:
                ref["sections"] = self._add_sections(marks)
            if document.pages is not None:
                ref["pages"] = str(document.pages)
            if kind == PDF and isinstance(document.content, Path) and document.content.name == document.name:
                ref["path"] = str(document.content.absolute())
            return ref

    async def add_async(self, document: Document, *, replace_undecodable: bool = False) -> DocumentRef:
        """Like `add`, in a thread; if it is cancelled, the conversion ends too."""
        return await in_thread(
            lambda cancellation: self.add(document, replace_undecodable=replace_undecodable, cancellation=cancellation)
        )

    def reattach(
        self,
        ref: DocumentRef,
        document: Document,
        *,
        replace_undecodable: bool = False,
        cancellation: ConversionCancellation | None = None,
    ) -> DocumentRef:
        """Attach a source to a reference again, if its text was removed, or if the reading of a stream was interrupted.

        A stream's new source is compared with the stored text while it is read.

        Raises:
            DocumentMismatchError: the text is not that of the reference.
        """
        if "pages" in ref and document.pages is None:
            document = document.only(ref["pages"])
        kind, name = parsed_key(ref)
        if kind == "stream" and self._ended_as(name) is None:
            self._make_folders()
            if not document.is_live:
                pieces = self._text(document, replace_undecodable, cancellation)
                document = Document(document.name, document.media_type, pieces, errors=document.errors)
            self.close(ref)
            return {**self._register(document, name, replace_undecodable), "name": ref["name"]}
        given = self.add(document, replace_undecodable=replace_undecodable, cancellation=cancellation)
        if document.is_live:
            try:
                self.pull(given, sys.maxsize)
            finally:
                self.close(given)
            given = self.resolve(given)
        expected = self.resolve(ref)
        if given["key"] != expected["key"]:
            raise DocumentMismatchError(
                f"{document.name} is not the text that {ref['name']} was", hint="Pass the document of that run."
            )
        return expected

    async def reattach_async(
        self, ref: DocumentRef, document: Document, *, replace_undecodable: bool = False
    ) -> DocumentRef:
        """Like `reattach`, in a thread; if it is cancelled, the conversion ends too."""
        return await in_thread(
            lambda cancellation: self.reattach(
                ref, document, replace_undecodable=replace_undecodable, cancellation=cancellation
            )
        )

    def resolve(self, ref: DocumentRef) -> DocumentRef:
        """For a stream that has ended, its reference by content; any other reference unchanged."""
        kind, name = parsed_key(ref)
        ended = self._ended_as(name) if kind == "stream" else None
        return ref if ended is None else {**ref, "key": f"sha256:{ended[0]}", "size": ended[1]}

    def size(self, ref: DocumentRef) -> int | None:
        """The text's length in UTF-8 bytes; None while a stream has not ended."""
        resolved = self.resolve(ref)
        if resolved["size"] is None and not resolved["key"].startswith("stream:"):
            return self._path(ref).stat().st_size
        return resolved["size"]

    def stored_bytes(self, ref: DocumentRef) -> int:
        """How many UTF-8 bytes can be read now, without taking more from a stream."""
        size = self.size(ref)
        if size is not None:
            return size
        live = self._live.get(parsed_key(ref)[1])
        return live.stored_bytes if live is not None else self._path(ref).stat().st_size

    def read_bytes(self, ref: DocumentRef, start_byte: int, end_byte: int) -> bytes:
        """The stored bytes from `start_byte` up to `end_byte` or the text's end."""
        try:
            file = self._path(ref).open("rb", buffering=0)
        except FileNotFoundError:
            # The file of a stream that ended between the look-up and the opening has moved.
            file = self._path(ref).open("rb", buffering=0)
        with file:
            file.seek(start_byte)
            return file.read(max(0, end_byte - start_byte))

    def read(self, ref: DocumentRef, start_byte: int, end_byte: int) -> str:
        """The text between two bytes. Raises DocumentError if they are not at the beginning of characters."""
        try:
            return self.read_bytes(ref, start_byte, end_byte).decode()
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"bytes {start_byte} to {end_byte} of {ref['name']} split a character",
                hint="Use the spans of chunks.",
            ) from error

    def pull(self, ref: DocumentRef, until_byte: int) -> None:
        """Read a live stream until the given number of bytes is stored, or it has ended. May block.

        Raises:
            DocumentError: it has no source in this process, or its source failed or is async.
        """
        live = self._source_for(ref, until_byte)
        if live is not None:
            with self._disk_errors_translated():
                live.pull(until_byte)
                self._finish(ref, live)

    async def fetch_async(self, ref: DocumentRef) -> None:
        """Bring a text to this machine before it is read; in this store it is there, or nowhere."""

    async def pull_async(self, ref: DocumentRef, until_byte: int) -> None:
        """Like `pull`, without blocking the event loop."""
        live = self._source_for(ref, until_byte)
        if live is not None:
            with self._disk_errors_translated():
                await live.pull_async(until_byte)
                self._finish(ref, live)

    def sections(self, ref: DocumentRef) -> list[SourceMark]:
        """Where the document's pages or sources begin, in order; empty if it has none."""
        name = ref.get("sections")
        if name is None:
            return []
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            raise DocumentError(f"{name!r} is not a list of sections that this version wrote")
        try:
            marks = json.loads((self._sections / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return [SourceMark(start_char, label) for start_char, label in marks]

    def headings(self, ref: DocumentRef) -> list[SourceMark]:
        """Where the document's headings and numbered clauses begin, in order; none for a stream that has not ended.

        They are looked for once, and then kept beside the sections.

        Raises:
            DocumentError: the text is no longer here.
        """
        resolved = self.resolve(ref)
        kind, name = parsed_key(resolved)
        kept = self._sections / f"{name}-{'markdown' if is_markdown(ref['media_type']) else 'text'}.json"
        if kind == "stream":
            return []
        with contextlib.suppress(FileNotFoundError, ValueError):
            return [SourceMark(start_char, label) for start_char, label in json.loads(kept.read_text("utf-8"))]
        found = headings(self._decoded(resolved), ref["media_type"])
        # Where the store cannot be written, they are looked for again the next time.
        with contextlib.suppress(OSError), self._new_file() as (file, temporary):
            file.write(json.dumps([[mark.start_char, mark.label] for mark in found]).encode())
            publish(file, temporary, kept)
        return found

    def _decoded(self, ref: DocumentRef) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, self.stored_bytes(ref), READ_BYTES):
            yield decoder.decode(self.read_bytes(ref, start, start + READ_BYTES))

    def remove(self, ref: DocumentRef) -> None:
        """Delete a document's text. Other references to the same text lose it too."""
        self.close(ref)
        resolved = self.resolve(ref)
        names = [self._texts / f"{parsed_key(resolved)[1]}.txt"]
        kind, name = parsed_key(ref)
        if kind == "stream":
            names += [self._streams / f"{name}.json", self._streams / f"{name}.txt"]
            self._became.pop(name, None)
        if "sections" in ref:
            names.append(self._sections / f"{ref['sections']}.json")
        names += [self._sections / f"{parsed_key(resolved)[1]}-{kind}.json" for kind in ("markdown", "text")]
        for path in names:
            path.unlink(missing_ok=True)

    def close(self, ref: DocumentRef) -> None:
        """Release a live stream's source; the text that was stored stays."""
        live = self._live.pop(parsed_key(ref)[1], None)
        if live is not None:
            live.close()

    @contextlib.contextmanager
    def _disk_errors_translated(self) -> Iterator[None]:
        """Raise the package's own error for a full or read-only disk."""
        try:
            yield
        except OSError as error:
            raise DocumentError(
                f"the document store {self.root} cannot be written: {error}",
                hint="Free disk space there, or set MEMAGENT_HOME to another folder for everything that is kept.",
            ) from error

    def _make_folders(self) -> None:
        for folder in (self._texts, self._sections, self._streams):
            if not folder.exists():
                private_folder(folder)
        for path in self.root.glob(".incoming-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[tuple[IO[bytes], Path]]:
        """A temporary file in this folder; it is removed afterwards unless it was renamed."""
        descriptor, path = tempfile.mkstemp(prefix=".incoming-", dir=self.root)
        with contextlib.ExitStack() as stack:
            stack.callback(Path(path).unlink, missing_ok=True)
            yield stack.enter_context(os.fdopen(descriptor, "wb")), Path(path)

    def _text(self, document: Document, replace: bool, cancellation: ConversionCancellation | None) -> Iterator[str]:
        with opened(document, replace=replace, bounds=self._bounds, cancellation=cancellation) as (_, pieces):
            for _, text in pieces:
                yield text

    def _add_sections(self, marks: list[SourceMark]) -> str:
        data = json.dumps([[mark.start_char, mark.label] for mark in marks], ensure_ascii=False)
        name = hashlib.sha256(data.encode("utf-8", "replace")).hexdigest()
        with self._new_file() as (file, temporary):
            file.write(data.encode("utf-8", "replace"))
            publish(file, temporary, self._sections / f"{name}.json")
        return name

    def _register(self, document: Document, name: str, replace: bool) -> DocumentRef:
        self._live[name] = LiveStream(document, self._streams / f"{name}.txt", replace=replace)
        return DocumentRef(key=f"stream:{name}", name=document.name, size=None, media_type=document.media_type)

    def _source_for(self, ref: DocumentRef, until_byte: int) -> LiveStream | None:
        kind, name = parsed_key(ref)
        if kind == "sha256" or self._ended_as(name) is not None:
            return None
        live = self._live.get(name)
        if live is None and self.stored_bytes(ref) < until_byte:
            raise DocumentError(
                f"the stream {ref['name']} was interrupted, and its source is no longer there",
                hint="Pass the same document again when resuming; what was read is kept.",
            )
        return live

    def _finish(self, ref: DocumentRef, live: LiveStream) -> None:
        """Name an ended stream's text by its content. The alias is written first, so that a crash loses nothing."""
        _, name = parsed_key(ref)
        if not live.ended or name in self._became:
            return
        key, size = live.digest.hexdigest(), live.stored_bytes
        live.close()
        with self._new_file() as (file, temporary):
            file.write(json.dumps({"sha256": key, "size": size}).encode())
            publish(file, temporary, self._streams / f"{name}.json")
        (self._streams / f"{name}.txt").replace(self._texts / f"{key}.txt")
        self._became[name] = (key, size)
        self._live.pop(name, None)

    def _ended_as(self, name: str) -> tuple[str, int] | None:
        known = self._became.get(name)
        if known is None and name not in self._live:
            with contextlib.suppress(FileNotFoundError):
                alias = json.loads((self._streams / f"{name}.json").read_text(encoding="utf-8"))
                known = self._became[name] = (alias["sha256"], alias["size"])
        return known

    def _path(self, ref: DocumentRef) -> Path:
        kind, name = parsed_key(ref)
        ended = self._ended_as(name) if kind == "stream" else (name, 0)
        candidates = [self._texts / f"{ended[0]}.txt"] if ended is not None else []
        if kind == "stream":
            candidates.append(self._streams / f"{name}.txt")
        for path in candidates:
            if path.exists():
                return path
        raise DocumentError(
            f"the text of {ref['name']} is not in the document store {self.root}",
            hint="It was removed, or stored elsewhere: pass the document again.",
        )


def parsed_key(ref: DocumentRef) -> tuple[str, str]:
    """The kind of a reference's key, "sha256" or "stream", and the name after it."""
    match = _KEY.fullmatch(ref["key"])
    if match is None:
        raise DocumentError(f"{ref['key']!r} is not a key of the document store")
    return match.group(1) or match.group(3), match.group(2) or match.group(4)


def _write(
    pieces: Iterator[LabelledText], file: IO[bytes], name: str, *, replace: bool
) -> tuple[str, int, list[SourceMark]]:
    """Write labelled text to a file; return its sha256, its size in bytes, and the beginnings of its sections."""
    digest = hashlib.sha256()
    marks: list[SourceMark] = []
    size = characters = 0
    blank = True
    for label, text in pieces:
        if label is not None:
            marks.append(SourceMark(characters, label))
        data = utf8(text, name, characters, replace=replace)
        digest.update(data)
        file.write(data)
        size += len(data)
        characters += len(text)
        blank = blank and (not text or text.isspace())
    if blank:
        raise EmptyDocumentError(
            f"{name} holds no text" + (" but white space" if size else ""),
            hint="Check that it is the document you meant.",
        )
    return digest.hexdigest(), size, marks


def publish(file: IO[bytes], temporary: Path, final: Path) -> None:
    """Rename a finished file. It is on disk before anyone can see it."""
    if final.exists():
        return
    file.flush()  # raises if the disk is full; a write itself may store only a part
    os.fsync(file.fileno())
    temporary.replace(final)
