"""Forked processes: they must not use locks and queues of their parent, whose threads they do not have.

A lock that another thread held at that moment would stay locked for ever, and a queue that another thread served would
never be served. So both are created again in the child. If processes cannot fork, there is nothing to do.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object with its own threads or locks."""

    def after_fork(self) -> None:
        """Start, in the child, as if no thread had been started."""
        ...


_forkable: WeakSet[Forkable] = WeakSet()


def renew_in_children(each: Forkable) -> None:
    """Call an object's `after_fork` in every process that is forked from this one, while the object exists."""
    _forkable.add(each)


def _renew() -> None:
    for each in list(_forkable):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
