"""Lines of memory that a person pinned: where the policy's new memory lacks one, it is put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Pins: TypeAlias = Callable[[str], Sequence[str]]
"""The lines that are pinned now on a branch, by its name; for the trunk, "", those of all branches."""


def with_pins(memory: str, pins: Sequence[str], fits: Callable[[str], bool], cut: Callable[[str], str]) -> str:
    """A memory with all pinned lines, whatever their indentation: missing ones are put before it.

    Where that is longer than a memory may be, all pinned lines go first, and the end of the rest is cut off.

    Args:
        memory: what the policy wrote.
        pins: the pinned lines.
        fits: whether a text is within the memory budget.
        cut: the beginning of a text, as long as the budget.
    """
    lines = memory.splitlines()
    held, pinned = {line.strip() for line in lines}, {pin.strip() for pin in pins}
    missing = [pin for pin in dict.fromkeys(pins) if pin.strip() not in held]
    if not missing:
        return memory
    together = "\n".join([*missing, memory]) if memory else "\n".join(missing)
    if fits(together):
        return together
    return cut("\n".join([*dict.fromkeys(pins), *(line for line in lines if line.strip() not in pinned)]))
