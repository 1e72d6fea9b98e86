"""Read documents of any length with a language model of small context: MemAgent as a LangGraph state machine.

>>> from memagent_graph import MemAgent, OpenAICompatiblePolicy
>>> agent = MemAgent(OpenAICompatiblePolicy(base_url="http://localhost:8000/v1"))
>>> result = agent.read(pathlib.Path("book.txt"), "Who built the lighthouse?")  # doctest: +SKIP

Names are loaded when they are first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memagent_graph.budget import Budget
    from memagent_graph.chunking import Chunk, Chunker
    from memagent_graph.documents import Document, DocumentRef, DocumentStore
    from memagent_graph.errors import (
        BudgetError,
        DocumentError,
        MemAgentError,
        MissingExtraError,
        PolicyError,
        PromptError,
        RunError,
        TokenizerError,
    )
    from memagent_graph.graph import ReaderGraph, build_graph
    from memagent_graph.policies import ChatModelPolicy, LocalPolicy, OpenAICompatiblePolicy, ScriptedPolicy
    from memagent_graph.policy import Completion, FinishReason, Policy, SamplingParams, TokenUsage
    from memagent_graph.prompts import AnswerFormat, PromptLayout, Prompts, PromptTemplate, load_prompts
    from memagent_graph.reader import MemAgent, ReadRequest
    from memagent_graph.results import EventKind, MemoryUpdate, ReadEvent, ReadResult, StopReason, UpdateRule, Usage
    from memagent_graph.run_log import RunLog
    from memagent_graph.state import Limits, ReaderContext, ReaderState, UpdateRules
    from memagent_graph.strategies import Overwrite, Strategy
    from memagent_graph.tokenizers import Tokenizer, load_tokenizer

__version__ = "0.1.0"

_HOMES = {
    "budget": ("Budget",),
    "chunking": ("Chunk", "Chunker"),
    "documents": ("Document", "DocumentRef", "DocumentStore"),
    "errors": (
        "BudgetError",
        "DocumentError",
        "MemAgentError",
        "MissingExtraError",
        "PolicyError",
        "PromptError",
        "RunError",
        "TokenizerError",
    ),
    "graph": ("ReaderGraph", "build_graph"),
    "policies": ("ChatModelPolicy", "LocalPolicy", "OpenAICompatiblePolicy", "ScriptedPolicy"),
    "policy": ("Completion", "FinishReason", "Policy", "SamplingParams", "TokenUsage"),
    "prompts": ("AnswerFormat", "PromptLayout", "PromptTemplate", "Prompts", "load_prompts"),
    "reader": ("MemAgent", "ReadRequest"),
    "results": ("EventKind", "MemoryUpdate", "ReadEvent", "ReadResult", "StopReason", "UpdateRule", "Usage"),
    "run_log": ("RunLog",),
    "state": ("Limits", "ReaderContext", "ReaderState", "UpdateRules"),
    "strategies": ("Overwrite", "Strategy"),
    "tokenizers": ("Tokenizer", "load_tokenizer"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604  names of the table above
    "__version__",
    *sorted(_MODULE_OF),
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
