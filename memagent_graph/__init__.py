"""Read documents of any length with a language model of small context: MemAgent as a LangGraph state machine.

>>> from memagent_graph import MemAgent, OpenAICompatiblePolicy
>>> agent = MemAgent(OpenAICompatiblePolicy(base_url="http://localhost:8000/v1"))
>>> result = agent.read(pathlib.Path("book.txt"), "Who built the lighthouse?")  # doctest: +SKIP

Names are loaded when they are first used, so importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memagent_graph.budget import Budget as Budget
    from memagent_graph.documents import Document as Document
    from memagent_graph.documents import DocumentRef as DocumentRef
    from memagent_graph.documents import DocumentStore as DocumentStore
    from memagent_graph.documents.chunking import Chunk as Chunk
    from memagent_graph.documents.chunking import Chunker as Chunker
    from memagent_graph.errors import BudgetError as BudgetError
    from memagent_graph.errors import CheckpointError as CheckpointError
    from memagent_graph.errors import DocumentError as DocumentError
    from memagent_graph.errors import MemAgentError as MemAgentError
    from memagent_graph.errors import MissingExtraError as MissingExtraError
    from memagent_graph.errors import PolicyError as PolicyError
    from memagent_graph.errors import PromptError as PromptError
    from memagent_graph.errors import ResponseFormatError as ResponseFormatError
    from memagent_graph.errors import RunError as RunError
    from memagent_graph.errors import RunLogError as RunLogError
    from memagent_graph.errors import TokenizerError as TokenizerError
    from memagent_graph.events import EventKind as EventKind
    from memagent_graph.events import ReadEvent as ReadEvent
    from memagent_graph.events import StopReason as StopReason
    from memagent_graph.events import UpdateRule as UpdateRule
    from memagent_graph.policies.chat_model import ChatModelPolicy as ChatModelPolicy
    from memagent_graph.policies.local import LocalPolicy as LocalPolicy
    from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy as OpenAICompatiblePolicy
    from memagent_graph.policies.scripted import ScriptedPolicy as ScriptedPolicy
    from memagent_graph.policy import Completion as Completion
    from memagent_graph.policy import FinishReason as FinishReason
    from memagent_graph.policy import Policy as Policy
    from memagent_graph.policy import SamplingParams as SamplingParams
    from memagent_graph.policy import TokenUsage as TokenUsage
    from memagent_graph.prompts import AnswerFormat as AnswerFormat
    from memagent_graph.prompts import PromptLayout as PromptLayout
    from memagent_graph.prompts import Prompts as Prompts
    from memagent_graph.prompts import PromptTemplate as PromptTemplate
    from memagent_graph.prompts import load_prompts as load_prompts
    from memagent_graph.provenance.evidence import Evidence as Evidence
    from memagent_graph.reader import MemAgent as MemAgent
    from memagent_graph.reading.graph import ReaderGraph as ReaderGraph
    from memagent_graph.reading.graph import build_graph as build_graph
    from memagent_graph.reading.state import Limits as Limits
    from memagent_graph.reading.state import ReaderContext as ReaderContext
    from memagent_graph.reading.state import ReaderState as ReaderState
    from memagent_graph.reading.state import SequentialState as SequentialState
    from memagent_graph.reading.state import UpdateRules as UpdateRules
    from memagent_graph.reading.steps import StepContext as StepContext
    from memagent_graph.reading.steps import branch as branch
    from memagent_graph.reading.strategy import Strategy as Strategy
    from memagent_graph.reading.strategy import StrategyGraph as StrategyGraph
    from memagent_graph.response_format import ResponseFormat as ResponseFormat
    from memagent_graph.results import ReadResult as ReadResult
    from memagent_graph.results import Usage as Usage
    from memagent_graph.roles import ANSWER as ANSWER
    from memagent_graph.roles import UPDATE as UPDATE
    from memagent_graph.roles import ParsedReply as ParsedReply
    from memagent_graph.roles import ParseFailure as ParseFailure
    from memagent_graph.roles import Role as Role
    from memagent_graph.run_log import Conversation as Conversation
    from memagent_graph.run_log import Reward as Reward
    from memagent_graph.run_log import RunFilter as RunFilter
    from memagent_graph.run_log import RunLog as RunLog
    from memagent_graph.strategies import Overwrite as Overwrite
    from memagent_graph.tokenizers import Tokenizer as Tokenizer
    from memagent_graph.tokenizers import load_tokenizer as load_tokenizer
    from memagent_graph.trace import Call as Call
    from memagent_graph.trace import MemoryUpdate as MemoryUpdate
    from memagent_graph.trace import Span as Span
    from memagent_graph.trace import Trace as Trace
    from memagent_graph.trace import Writes as Writes

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "budget": "Budget",
    "documents": "Document DocumentRef DocumentStore",
    "documents.chunking": "Chunk Chunker",
    "errors": "BudgetError CheckpointError DocumentError MemAgentError MissingExtraError PolicyError PromptError "
    "ResponseFormatError RunError RunLogError TokenizerError",
    "events": "EventKind ReadEvent StopReason UpdateRule",
    "policies.chat_model": "ChatModelPolicy",
    "policies.local": "LocalPolicy",
    "policies.openai_compatible": "OpenAICompatiblePolicy",
    "policies.scripted": "ScriptedPolicy",
    "policy": "Completion FinishReason Policy SamplingParams TokenUsage",
    "prompts": "AnswerFormat PromptLayout PromptTemplate Prompts load_prompts",
    "provenance.evidence": "Evidence",
    "reader": "MemAgent",
    "reading.graph": "ReaderGraph build_graph",
    "reading.state": "Limits SequentialState ReaderContext ReaderState UpdateRules",
    "reading.steps": "StepContext branch",
    "reading.strategy": "Strategy StrategyGraph",
    "response_format": "ResponseFormat",
    "results": "ReadResult Usage",
    "roles": "ANSWER UPDATE ParsedReply ParseFailure Role",
    "run_log": "Conversation Reward RunFilter RunLog",
    "strategies": "Overwrite",
    "tokenizers": "Tokenizer load_tokenizer",
    "trace": "Call MemoryUpdate Span Trace Writes",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = [  # noqa: PLE0604  names of the table above
    "__version__",
    *sorted(_MODULE_BY_NAME),
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
