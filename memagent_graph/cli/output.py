"""Output that commands share: one JSON object, sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(values: Mapping[str, Any]) -> None:
    """Print it on standard output in ASCII, so that the terminal's encoding and unusual file names do not matter."""
    sys.stdout.write(json.dumps(values) + "\n")


def format_size(count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit_size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit_size:
            return f"{count / unit_size:.1f} {unit}"
    return f"{count} bytes"
