"""Modules of the extra "eval", imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from memagent_graph.errors import MissingExtraError


def extra_module(name: str, needed_for: str) -> Any:
    """The module of a name.

    Raises:
        MissingExtraError: it is not installed; `needed_for` says what needs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("eval", needed_for) from error
