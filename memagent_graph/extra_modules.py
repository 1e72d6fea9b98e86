"""Imports optional modules, which an extra of the distribution installs."""

from __future__ import annotations

import importlib
from typing import Any

from memagent_graph.errors import MissingExtraError


def extra_module(name: str, extra: str, needed_for: str) -> Any:
    """Return a module by its name.

    Raises:
        MissingExtraError: it is not installed. `needed_for` is the purpose in the message.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(extra, needed_for) from error
