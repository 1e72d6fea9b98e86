"""The one JSON object that a command with --json prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(values: Mapping[str, Any]) -> None:
    """Print it on standard output, in ASCII: a terminal's encoding, or a file name that is no text, cannot break it."""
    sys.stdout.write(json.dumps(values) + "\n")
