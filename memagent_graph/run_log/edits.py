"""Who replaced a memory, as the detail of the event says it."""

from __future__ import annotations

from typing import Final

_SOMEBODY: Final = "a person"
_DID: Final = " replaced the memory"


def edited_by(author: str | None) -> str:
    """The detail of the event that somebody replaced a memory."""
    return f"{author or _SOMEBODY}{_DID}"


def author_of(detail: str) -> str | None:
    """Who it was, by the event's detail; None where that is not known."""
    author = detail.removesuffix(_DID)
    return None if author in {_SOMEBODY, detail} else author
