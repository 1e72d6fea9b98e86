"""Modules that an extra of the distribution installs, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from memagent_graph.errors import MissingExtraError


def extra_module(name: str, extra: str, needed_for: str) -> Any:
    """Return the module of a name.

    Raises:
        MissingExtraError: it is not installed; `needed_for` says what needs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(extra, needed_for) from error
