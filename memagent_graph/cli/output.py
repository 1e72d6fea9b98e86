"""Output that commands share: one JSON object, counts, sizes, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(values: Mapping[str, Any]) -> None:
    """Print it on standard output in ASCII, so that the terminal's encoding and unusual file names do not matter."""
    sys.stdout.write(json.dumps(values) + "\n")


def size(count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit_size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit_size:
            return f"{count / unit_size:.1f} {unit}"
    return f"{count} bytes"


def console(width_without_terminal: int | None = None) -> Console:
    """Return a console on standard output for tables, with this width if it is not a terminal."""
    import rich.console

    terminal = rich.console.Console(highlight=False)
    if width_without_terminal is not None and not terminal.is_terminal:
        terminal.width = width_without_terminal
    return terminal
