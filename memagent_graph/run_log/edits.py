"""Who replaced a memory: the text of the event's detail."""

from __future__ import annotations

from typing import Final

_SOMEBODY: Final = "a person"
_DID: Final = " replaced the memory"


def edited_by(author: str | None) -> str:
    """The detail of the event that a person replaced a memory."""
    return f"{author or _SOMEBODY}{_DID}"


def author_of(detail: str) -> str | None:
    """Who it was, according to the event's detail; None if unknown."""
    author = detail.removesuffix(_DID)
    return None if author in {_SOMEBODY, detail} else author
