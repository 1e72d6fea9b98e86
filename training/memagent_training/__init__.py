"""Trains policies: from logged runs, in a closed loop with the reader, and the policies that ship.

For verifiers, this package is a taskset and its harness: `memagent-training`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ReaderHarness", "ReaderTaskset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memagent_training.engines import verifiers_environment  # noqa: PLC0415

    return getattr(verifiers_environment, name)
