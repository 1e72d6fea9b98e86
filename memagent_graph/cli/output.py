"""Output that several commands share: JSON objects and sizes in bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(values: Mapping[str, Any]) -> None:
    """Print a JSON object on standard output, in ASCII, so that every terminal and file name can be shown."""
    sys.stdout.write(json.dumps(values) + "\n")


def format_size(byte_count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit_size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if byte_count >= unit_size:
            return f"{byte_count / unit_size:.1f} {unit}"
    return f"{byte_count} bytes"
