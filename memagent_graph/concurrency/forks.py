"""Forked processes: what they must not take over from their parent, whose threads they do not have.

A lock that another thread held at that moment would stay held for ever, and a queue that another thread served would
never be served. So both are made again in the child. Where processes cannot fork, there is nothing to do.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Something with threads or locks of its own."""

    def after_fork(self) -> None:
        """Called in the child: begin as if no thread had been started."""
        ...


_forkable: WeakSet[Forkable] = WeakSet()


def renew_in_children(each: Forkable) -> None:
    """Have an object's `after_fork` called in every process that is forked from this one, while the object lives."""
    _forkable.add(each)


def _renew() -> None:
    for each in list(_forkable):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
