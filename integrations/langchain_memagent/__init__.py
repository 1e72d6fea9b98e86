"""MemAgent in LangChain agents and LangGraph graphs.

- `ReadLongDocument`: a tool with which an agent reads a document of any length;
- `MemAgentMiddleware`: tool results and histories that are too long are read for the question, not cut off;
- `memagent_node`: reading as a node of any `StateGraph`.

Names are imported when they are first used; only the middleware needs the extra "langchain".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_memagent.middleware import MemAgentMiddleware as MemAgentMiddleware
    from langchain_memagent.node import memagent_node as memagent_node
    from langchain_memagent.read_long_document import ReadLongDocument as ReadLongDocument

_MODULES = {
    "MemAgentMiddleware": "middleware",
    "ReadLongDocument": "read_long_document",
    "memagent_node": "node",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605  names of the table above


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
