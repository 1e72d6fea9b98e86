"""Files of clients become text in a process of their own, which has bounds on time and memory.

A small file may hold a document that unpacks to gigabytes, or that a converter never comes to an end with. Nothing can
stop a thread that is at it; a process can be ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError, MemAgentError

_MEMORY_BYTES: Final = 3 << 30
_OUTPUT_BYTES: Final = 1 << 16
_PLAIN: Final = frozenset({"", ".txt", ".text", ".md", ".markdown", ".csv", ".json", ".jsonl", ".log"})


async def converted(store: DocumentStore, path: Path, name: str, *, seconds: float) -> DocumentRef:
    """Store the text of a file: plain text, Markdown, HTML, PDF, DOCX; its first bytes and its name tell which.

    Args:
        store: where to.
        path: the file.
        name: what it is called, with its ending.
        seconds: the time that it may take.

    Raises:
        DocumentError: it cannot be turned into text, or not within these bounds.
    """
    if await asyncio.to_thread(_is_plain, path, name):
        with path.open("rb") as file:
            return await asyncio.to_thread(store.add, Document.from_file(file, name))
    command = [sys.executable, "-m", __name__, str(store.root), str(path), name, str(int(seconds) + 1)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise DocumentError(
            f"{name} could not be turned into text within {seconds:g} s", hint="Convert it to plain text first."
        ) from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        said = json.loads(output[:_OUTPUT_BYTES])
    except ValueError as error:
        raise DocumentError(
            f"{name} could not be turned into text: it takes too much memory or time, or breaks the converter",
            hint="Convert it to plain text first.",
        ) from error
    if "error" in said:
        raise DocumentError(said["error"], hint=said["hint"])
    return cast("DocumentRef", said)


def _is_plain(path: Path, name: str) -> bool:
    """Whether a file is text as it stands, which takes no converter."""
    with path.open("rb") as file:
        begins = file.read(8)
    return Path(name).suffix.lower() in _PLAIN and not begins.startswith((b"%PDF-", b"PK"))


def convert(root: str, path: str, name: str) -> dict[str, Any]:
    """Store the text of a file; its reference, or what went wrong."""
    try:
        with Path(path).open("rb") as file:
            return dict(DocumentStore(root).add(Document.from_file(file, name)))
    except MemAgentError as error:
        return {"error": error.message, "hint": error.hint}
    except (MemoryError, RecursionError):
        return {"error": f"{name} takes too much memory to be turned into text", "hint": "Convert it first."}


def _bound(seconds: int) -> None:
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


if __name__ == "__main__":
    _bound(int(sys.argv[4]))
    sys.stdout.write(json.dumps(convert(*sys.argv[1:4])))
