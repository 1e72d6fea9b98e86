"""Converts files to text in a separate process, which has limits and can be stopped at any moment.

Converters are entry points by kind of file; see `memagent_graph.converters`. None is part of the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from memagent_graph.concurrency.background import Cancellation, PerLoop
from memagent_graph.converters import Block, Omission, Parts
from memagent_graph.documents import conversion_program
from memagent_graph.entry_points import CONVERTERS, list_entry_points
from memagent_graph.errors import DocumentError, MissingExtraError, UnsupportedDocumentError

T = TypeVar("T")

_MAX_THREADS: Final = 16
"""Maximum number of documents that an event loop converts at the same time."""
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_CHARACTERS: Final = {"what": 100, "place": 200, "remedy": 300}
"""Maximum characters of a text in an omission."""
_BOUNDS: Final = {
    "seconds": ("MEMAGENT_CONVERSION_SECONDS", "120", "takes more than {:g} seconds"),
    "memory": ("MEMAGENT_CONVERSION_MEMORY_MB", "2000", "needs more than {:g} MB of memory"),
    "text": ("MEMAGENT_CONVERSION_TEXT_MB", "500", "gives more than {:g} MB of text"),
}
"""By bound of a conversion: its environment variable, its default, and what exceeds it. Plain text is not converted.

The memory is the address space of the process, which the operating system bounds, on Linux; the text is in UTF-8.
"""


def _read_bounds() -> dict[str, float]:
    """Return the bounds: the defaults, or what their environment variables say.

    Raises:
        DocumentError: a variable is not a number above 0.
    """
    bounds: dict[str, float] = {}
    for name, (variable, default, _) in _BOUNDS.items():
        text = os.environ.get(variable) or default
        with contextlib.suppress(ValueError):
            bounds[name] = float(text)
        if not bounds.get(name, 0) > 0:
            raise DocumentError(
                f"{variable} must be a number above 0, got {text!r}",
                hint=f"Set it to a number such as {default}, or leave it unset.",
            )
    return bounds


async def run_in_thread(work: Callable[[Cancellation], T]) -> T:
    """Run `work` in a conversion thread. If the caller is cancelled, the conversion is cancelled too."""
    cancellation = Cancellation()
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads.get(), work, cancellation)
    finally:
        cancellation.cancel()


_threads: Final = PerLoop(
    lambda: ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="memagent-conversion"),
    lambda threads: asyncio.to_thread(threads.shutdown, cancel_futures=True),
)
"""A separate thread pool, because a conversion may take minutes and short work must not wait for it."""


@cache
def converter_kinds() -> Mapping[str, tuple[str, str]]:
    """Return, by kind of file, the converter ("module:function") and the extra that it needs ("" for none)."""
    return {
        kind: (entry.value.partition("[")[0].strip(), "".join(entry.extras[:1]))
        for kind, entry in list_entry_points(CONVERTERS).items()
    }


def convert_parts(
    name: str,
    kind: str,
    file: IO[bytes],
    cancellation: Cancellation,
    *,
    pages: str = "",
    converter: str | None = None,
) -> Parts:
    """Yield a file's text in order, and its omissions.

    Args:
        name: the document's name, for messages.
        kind: as in `SourceFile`; HTML has to be UTF-8.
        file: the file on disk, from its beginning.
        cancellation: stops the conversion early.
        pages: the pages of a PDF file to convert, as `Document.pages`; empty for all.
        converter: the user's own converter: path/to/file.py:function, module:function, or the name of an entry point.

    Raises:
        DocumentError: the file cannot be converted within its bounds, lacks some of these pages, or the conversion was
            cancelled.
        MissingExtraError: a package that the converter needs is missing.
    """
    task = {
        "name": name.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:1000],
        "kind": kind,
        "pages": pages,
        "converter": _find_converter(converter),
        "converters": {kind: location for kind, (location, _) in converter_kinds().items()},
        "bounds": _read_bounds(),
    }
    file.flush()
    with tempfile.TemporaryFile() as result:
        code = _run(task, file, result, cancellation)
        result.seek(0)
        yield from _read_output(task, result, code)


def _find_converter(converter: str | None) -> str | None:
    """Return the absolute location of a user's converter."""
    if converter is None or converter in converter_kinds():
        return converter and converter_kinds()[converter][0]
    module, colon, function = converter.rpartition(":")
    return f"{Path(module).expanduser().resolve()}{colon}{function}" if module.endswith(".py") else converter


def _run(task: Mapping[str, Any], source: IO[bytes], result: IO[bytes], cancellation: Cancellation) -> int:
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
            code = process.wait(task["bounds"]["seconds"])
    except subprocess.TimeoutExpired:
        raise _bound_exceeded(task, "seconds") from None
    finally:
        process.kill()
        process.wait()
    if cancellation.is_cancelled:
        raise DocumentError(f"the conversion of {task['name']} was cancelled", hint="Read it again.")
    return code


def _read_output(task: Mapping[str, Any], result: IO[bytes], code: int) -> Parts:
    """Yield the output of the process. The file may be hostile, so the output is not trusted."""
    remaining = int(task["bounds"]["text"] * conversion_program.MEGABYTE)
    while header := result.readline(_MAX_HEADER_BYTES):
        try:
            part = json.loads(header)
        except ValueError:
            break
        if isinstance(part, dict) and "what" in part:
            texts = {name: str(part[name])[:limit] for name, limit in _MAX_CHARACTERS.items()}
            yield Omission(**texts, count=int(part["count"]))
            continue
        if isinstance(part, dict):
            if not part:
                return
            raise _make_failure(task, part)
        match part:
            case [str() | None as label, list() | None as headings, int() as size]:
                pass
            case _:
                break
        data = result.read(min(size, remaining))
        remaining -= size
        if len(data) < size:
            break
        text = data.decode("utf-8", "surrogatepass")
        yield Block(text, label, None if headings is None else tuple(map(str, headings)))
    raise DocumentError(
        f"the conversion of the {_describe(task)} failed (exit code {code})",
        hint=f"The file is damaged, or needs more memory than the {task['bounds']['memory']:g} MB that "
        f"{_BOUNDS['memory'][0]} allows; save it again, or convert it to plain text.",
    )


def _describe(task: Mapping[str, Any]) -> str:
    return f"{str(task['kind']).upper()} file {task['name']}"


def _make_failure(task: Mapping[str, Any], values: dict[str, str]) -> DocumentError | MissingExtraError:
    match values.get("kind"):
        case "memory" | "text" as bound:
            return _bound_exceeded(task, bound)
        case "unsupported":
            return UnsupportedDocumentError(values["message"], hint=values["hint"])
        case "missing" if extra := converter_kinds().get(task["kind"], ("", ""))[1]:
            return MissingExtraError(extra, f"reading the {_describe(task)}")
        case "missing":
            return DocumentError(
                f"reading the {_describe(task)} needs the package {values['message']!r}", hint="Install it."
            )
    return DocumentError(values["message"], hint=values["hint"])


def _bound_exceeded(task: Mapping[str, Any], bound: str) -> DocumentError:
    (variable, _, excess), value = _BOUNDS[bound], task["bounds"][bound]
    return DocumentError(
        f"the conversion of the {_describe(task)} {excess.format(value)}",
        hint=f"If you trust the file, raise the bound: {variable}={value * 4:g}; "
        "otherwise convert it to plain text first.",
    )
