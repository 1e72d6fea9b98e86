"""Converts files to text in a separate process, which has limits and can be stopped at any moment.

Converters are entry points, one for each kind of file; see `memagent_graph.converters`. The core has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from memagent_graph.concurrency.background import Cancellation, PerLoop
from memagent_graph.converters import Block, Omission, Parts
from memagent_graph.documents import conversion_program
from memagent_graph.entry_points import CONVERTERS, list_entry_points
from memagent_graph.errors import DocumentError, MissingExtraError, UnsupportedDocumentError
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.storage.bounded_files import parse_json

T = TypeVar("T")

_MAX_THREADS: Final = 16
"""Maximum number of documents that an event loop converts at the same time."""
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_OMISSION_CHARACTERS: Final = 300
"""Maximum characters of each text in an omission."""
_BOUNDS: Final = {
    "seconds": ("MEMAGENT_CONVERSION_SECONDS", "120", "takes more than {:g} seconds"),
    "memory": ("MEMAGENT_CONVERSION_MEMORY_MB", "2000", "needs more than {:g} MB of memory"),
    "text": ("MEMAGENT_CONVERSION_TEXT_MB", "500", "gives more than {:g} MB of text"),
}
"""The bounds of a conversion: environment variable, default, and the error for a file that exceeds the bound.

Memory is the address space of the process, which only Linux enforces. The size of the text is in UTF-8 bytes.
"""


def _read_bounds() -> dict[str, float]:
    """Return the bounds from their environment variables, or the defaults.

    Raises:
        DocumentError: a variable is not a finite number above 0.
    """
    bounds: dict[str, float] = {}
    for name, (variable, default, _) in _BOUNDS.items():
        setting = os.environ.get(variable) or default
        with contextlib.suppress(ValueError):
            bounds[name] = float(setting)
        if not 0 < bounds.get(name, 0) < math.inf:
            raise DocumentError(
                f"{variable} must be a finite number above 0, got {setting!r}",
                hint=f"Set it to a number such as {default}, or leave it unset.",
            )
    return bounds


async def run_in_thread(work: Callable[[Cancellation], T]) -> T:
    """Run `work` in a conversion thread. If the caller is cancelled, the conversion is cancelled too."""
    cancellation = Cancellation()
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread_pools.get(), work, cancellation)
    finally:
        cancellation.cancel()


_thread_pools: Final = PerLoop(
    lambda: ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="memagent-conversion"),
    lambda threads: asyncio.to_thread(threads.shutdown, cancel_futures=True),
)
"""Thread pools of their own, because a conversion may take minutes, and short work must not wait for it."""


@cache
def list_converters() -> Mapping[str, EntryPoint]:
    """Return the entry point of the converter for each kind of file."""
    return list_entry_points(CONVERTERS)


def convert_parts(
    name: str, kind: str, file: IO[bytes], *, pages: str, cancellation: Cancellation, converter: str | None
) -> Parts:
    """Convert a file in a separate process; yield its text in order, and its omissions.

    Args:
        name: the document's name, for messages.
        kind: as in `SourceFile`; HTML must be in UTF-8.
        file: a file on disk, which is read from its beginning.
        pages: the pages of a PDF file to convert, as `Document.pages`; empty for all.
        cancellation: stops the conversion early.
        converter: the user's own converter: path/to/file.py:function, module:function, or the name of an entry point.

    Raises:
        DocumentError: the file cannot be converted within the bounds, it lacks some of these pages, or the conversion
            was cancelled.
        MissingExtraError: a package that the converter needs is missing.
    """
    converters = {kind: f"{entry.module}:{entry.attr}" for kind, entry in list_converters().items()}
    source = (converter or "").rpartition(":")[0]
    if converter and source.endswith(".py") and not source.startswith("~"):  # the process runs in another folder
        converter = str(Path.cwd() / converter)
    task = {
        "name": replace_lone_surrogates(name.replace("\0", "\ufffd"))[:1000],
        "kind": kind,
        "pages": pages,
        "converter": converters.get(converter or "", converter),
        "converters": converters,
        "bounds": _read_bounds(),
    }
    file.flush()
    with tempfile.TemporaryFile() as result:
        exit_code = _run_conversion(task, file, result, cancellation)
        result.seek(0)
        yield from _read_output(task, result, exit_code)


def _run_conversion(task: Mapping[str, Any], source: IO[bytes], result: IO[bytes], cancellation: Cancellation) -> int:
    """Convert in a fresh interpreter, and return its exit code."""
    # Only a user's own module may be imported from the current folder.
    folders = [*filter(None, sys.path), *([str(Path.cwd())] if task["converter"] else [])]
    process = subprocess.Popen(
        # -P: do not search the program's folder for modules, because some there have common names.
        [sys.executable, "-P", conversion_program.__file__, json.dumps(task)],
        stdin=source,
        stdout=result,
        stderr=subprocess.DEVNULL,
        cwd=Path(conversion_program.__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )
    try:
        with cancellation.watch(process.kill):
            exit_code = process.wait(task["bounds"]["seconds"])
    except subprocess.TimeoutExpired:
        raise _make_bound_error(task, "seconds") from None
    finally:
        process.kill()
        process.wait()
    if cancellation.is_cancelled:
        raise DocumentError(f"the conversion of {task['name']} was cancelled", hint="Read it again.")
    return exit_code


def _read_output(task: Mapping[str, Any], result: IO[bytes], exit_code: int) -> Parts:
    """Parse the output of the process. It is not trusted, because the file may be hostile."""
    remaining_bytes = int(task["bounds"]["text"] * conversion_program.MEGABYTE)
    with contextlib.suppress(ValueError):
        while header := result.readline(_MAX_HEADER_BYTES):
            match parse_json(header):
                case [str() | None as label, list() | None as headings, int(size)] if 0 <= size <= remaining_bytes:
                    data = result.read(size)
                    remaining_bytes -= size
                    if len(data) < size:
                        break
                    text = data.decode("utf-8", "surrogatepass")
                    yield Block(text, label, None if headings is None else tuple(map(str, headings)))
                case {"what": what, "place": place, "remedy": remedy, "count": int(count)}:
                    what, place, remedy = (str(text)[:_MAX_OMISSION_CHARACTERS] for text in (what, place, remedy))
                    yield Omission(what, place, remedy, count)
                case {"kind": str(kind), "message": str(message), "hint": str() | None as hint}:
                    raise _make_error(task, kind, message, hint)
                case None:
                    return
                case _:
                    break
    raise DocumentError(
        f"the conversion of the {_describe_file(task)} failed (exit code {exit_code})",
        hint=f"The file is damaged, or needs more memory than the {task['bounds']['memory']:g} MB that "
        f"{_BOUNDS['memory'][0]} allows; save it again, or convert it to plain text.",
    )


def _describe_file(task: Mapping[str, Any]) -> str:
    return f"{str(task['kind']).upper()} file {task['name']}"


def _make_error(
    task: Mapping[str, Any], kind: str, message: str, hint: str | None
) -> DocumentError | MissingExtraError:
    entry = list_converters().get(task["kind"])
    match kind:
        case "memory" | "text":
            return _make_bound_error(task, kind)
        case "unsupported":
            return UnsupportedDocumentError(message, hint=hint)
        case "missing" if entry and entry.extras:
            return MissingExtraError(entry.extras[0], f"reading the {_describe_file(task)}")
        case "missing":
            return DocumentError(
                f"reading the {_describe_file(task)} needs the package {message!r}", hint="Install it."
            )
    return DocumentError(message, hint=hint)


def _make_bound_error(task: Mapping[str, Any], bound: str) -> DocumentError:
    (variable, _, problem), value = _BOUNDS[bound], task["bounds"][bound]
    return DocumentError(
        f"the conversion of the {_describe_file(task)} {problem.format(value)}",
        hint=f"If you trust the file, raise the bound: {variable}={value * 4:g}; "
        "otherwise convert it to plain text first.",
    )
