"""The conversion program: reads a file from standard input, and writes its text to standard output, within limits.

`conversion.py` starts it in a new interpreter, so damage by a hostile file is limited to this process.

Standard output is a sequence of blocks and omissions. A block is a line of JSON with label, headings and size,
`["page 3", ["Title"], 120]`, and that many bytes of UTF-8; an omission is a line `{"what": ...}`. The last line is
`null`, or an object with the error's `kind`, `message` and `hint`. If it is missing, the process was stopped.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any, Final

from memagent_graph.converters import Block, ConversionError, Omission, Parts, SourceFile, iter_parts

PART_CHARACTERS: Final = 1 << 20
MAX_HEADINGS: Final = 10
"""Maximum number of headings above a block."""
MAX_HEADING_CHARACTERS: Final = 120
MAX_LABEL_CHARACTERS: Final = 1000
"""Longer labels, such as names of files in a message, are cut, because a header has a maximum size, too."""
MEGABYTE: Final = 1_000_000
_HEADER_ALLOWANCE_BYTES: Final = 1 << 20
"""The part of the output's limit that is for headers and omissions."""


def main(task: dict[str, Any]) -> None:
    """Convert standard input. `task` has the fields of `SourceFile` and the bounds, and may name a user's converter."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # text that a converter prints is not part of the document
        _set_limits(**task["bounds"])
        convert(task, sys.stdin.buffer, out)


def convert(task: dict[str, Any], file: IO[bytes], out: IO[bytes]) -> None:
    """Write the text of a file, its omissions and the last line."""
    last_line = None
    try:
        file.seek(0)
        source = SourceFile(task["name"], task["kind"], file, task["pages"], task["converters"])
        _write_parts(convert_file(source, task["converter"]), out, int(task["bounds"]["text"] * MEGABYTE))
    except ConversionError as error:
        last_line = error.values
    except MemoryError:
        last_line = ConversionError(kind="memory").values
    out.write(json.dumps(last_line).encode() + b"\n")


def convert_file(source: SourceFile, converter: str | None) -> Parts:
    """Convert a file with the user's converter, or with the standard one if that is None or returns None.

    Raises:
        ConversionError: the file cannot be converted.
    """
    if converter is not None:
        from memagent_graph.errors import DocumentError  # noqa: PLC0415  only for a user's converter
        from memagent_graph.own_code import load_own_code  # noqa: PLC0415

        try:
            parts = load_own_code(converter, noun="a converter", error=DocumentError)(source)
            if parts is not None:
                yield from iter_parts(parts)
                return
        except DocumentError as error:
            raise ConversionError(error.message, error.hint) from error
        except (ConversionError, MemoryError):
            raise
        except Exception as error:  # whatever a user's code raises
            raise ConversionError(
                f"the converter {converter} failed at {source.name}: {type(error).__name__}: {error}",
                "Correct the converter's code.",
            ) from error
    yield from source.convert()


def _set_limits(seconds: float, memory: float, text: float) -> None:
    """Set the operating system's limits for this process, if it has any; the parent process checks the time."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return
    bounds = {
        resource.RLIMIT_CPU: int(seconds) + 2,  # in case the parent process has died
        resource.RLIMIT_AS: int(memory * MEGABYTE),
        resource.RLIMIT_FSIZE: int(text * MEGABYTE * 9 / 8) + _HEADER_ALLOWANCE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for resource_kind, bound in bounds.items():
        _, hard_limit = resource.getrlimit(resource_kind)
        limit = bound if hard_limit == resource.RLIM_INFINITY else min(bound, hard_limit)
        try:
            resource.setrlimit(resource_kind, (limit, limit))
        except (OSError, ValueError):
            continue  # macOS does not enforce some of them


def _write_parts(parts: Parts, out: IO[bytes], max_text_bytes: int) -> None:
    written_bytes = 0
    for part in parts:
        if not isinstance(part, Block):
            what, place, remedy = (str(text)[:MAX_LABEL_CHARACTERS] for text in (part.what, part.place, part.remedy))
            out.write(json.dumps(asdict(Omission(what, place, remedy, part.count))).encode() + b"\n")
            continue
        for start in range(0, max(len(part.text), 1), PART_CHARACTERS):
            data = part.text[start : start + PART_CHARACTERS].encode("utf-8", "surrogatepass")
            written_bytes += len(data)
            if written_bytes > max_text_bytes:
                raise ConversionError(kind="text")
            headings = [str(heading)[:MAX_HEADING_CHARACTERS] for heading in (part.headings or ())[:MAX_HEADINGS]]
            label = None if part.label is None else str(part.label)[:MAX_LABEL_CHARACTERS]
            label_and_headings = [None, None] if start else [label, headings]
            out.write(json.dumps([*label_and_headings, len(data)]).encode() + b"\n")
            out.write(data)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
