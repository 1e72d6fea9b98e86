"""The policies that come with the package. Each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memagent_graph.policies.chat_model import ChatModelPolicy
    from memagent_graph.policies.local import LocalPolicy
    from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
    from memagent_graph.policies.scripted import ScriptedPolicy

__all__ = ["ChatModelPolicy", "LocalPolicy", "OpenAICompatiblePolicy", "ScriptedPolicy"]

_MODULES = {
    "ChatModelPolicy": "chat_model",
    "LocalPolicy": "local",
    "OpenAICompatiblePolicy": "openai_compatible",
    "ScriptedPolicy": "scripted",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
