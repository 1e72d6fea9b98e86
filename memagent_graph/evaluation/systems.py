"""What is measured: a system answers one question on one stored document, and says what that cost.

    memagent            the reader: chunk by chunk, with a memory
    full_context        one call with the whole document
    middle_truncation   one call with the document's beginning and end
    retrieval           one call with the chunks that resemble the question most
    refine              chunk by chunk, with an answer that is improved
    map_reduce          an answer to each chunk, then one from all of them

All work with the same policy, tokenizer, window, sampling, and rules for replies that are cut off, empty or refused.
An evaluation makes them from the one reader that a user configured:

>>> settings = await SystemSettings.of(reader)  # doctest: +SKIP
>>> system = load_system("retrieval", settings)  # doctest: +SKIP
>>> attempt = await system.attempt(document, question, answer_tokens=128, run_id=new_run_id())  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from langchain_core.embeddings import Embeddings
from langgraph.checkpoint.base import BaseCheckpointSaver

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import EvaluationError, RunMismatchError, RunNotFoundError
from memagent_graph.evaluation.result_table import Outcome
from memagent_graph.events import count_events
from memagent_graph.policies.model_info import ModelInfo, SelfDescribing
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import ReaderContext
from memagent_graph.results import ReadResult, Usage
from memagent_graph.storage.checkpoints import open_saver
from memagent_graph.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a system made of one question on one document."""

    outcome: Outcome
    """Never FAILED: a failure is a `MemAgentError` that `attempt` raises."""
    answer: str | None
    """The answer in the form asked for, or the whole completion where it has not that form; None without an answer."""
    raw_answer: str | None
    """The whole completion that holds the answer."""
    usage: Usage
    """Tokens, calls (`turns`), wall seconds, and estimated operations where the model's size is known."""
    run_id: str | None = None
    """The run in the log, for systems that keep one."""
    chunks: int = 0
    """How many chunks of the document the policy went through; 0 for systems that ask about an excerpt."""
    memory: str | None = None
    """The memory that the answer came from, for systems that have one."""
    detail: str = ""
    """What else a reader of the results should know, such as "4,096 of 131,072 tokens shown"."""


class System(Protocol):
    """Anything that answers questions on stored documents. Several attempts may run at once, in one event loop."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in results."""
        ...

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """Answer one question.

        Args:
            document: a document in the settings' store.
            question: the question.
            answer_tokens: how many tokens a completion with an answer may have; the same for every system.
            run_id: the caller's name for this attempt, unique to sample and system. A system that saves its progress
                goes on from there when it is called with the same name again.

        Raises:
            MemAgentError: the attempt failed: the policy, the document, or a budget that leaves no room.
        """
        ...

    async def aclose(self) -> None:
        """Close what belongs to this system alone; the policy is the caller's."""
        ...


class Wording(StrEnum):
    """In which words baselines ask the policy."""

    PLAIN = "plain"
    """The templates of this package: for models that follow instructions."""
    POLICY = "policy"
    """The policy's own update prompt, with the text as its section, and its own answer prompt: for a policy that was
    trained on these and may understand nothing else. A baseline in other words would measure the wording."""


@dataclass(frozen=True)
class SystemSettings:
    """What all systems of one evaluation share."""

    context: ReaderContext
    """Policy, tokenizer, store, prompts, budget, sampling and rules: those of the reader."""
    context_window: int
    """What one call of the model can hold, prompt and completion, in tokens; the reader's budget may use less."""
    wording: Wording = Wording.PLAIN
    checkpoints: BaseCheckpointSaver[Any] | Path | str | None = None
    """Where the reader saves its state; without it an attempt that was killed begins anew."""
    strategy: Strategy | None = None
    """The reader's topology; the paper's where it is left out."""
    retrieved_chunks: int | None = None
    """How many chunks retrieval shows; as many as fit where it is left out."""
    retrieval_chunk_tokens: int | None = None
    """How long they are; 256 where it is left out, or an eighth of the room if that is less."""
    embeddings: Embeddings | None = None
    """Ranks chunks by cosine similarity instead of BM25."""
    concurrency: int = 16
    """Chunks of one document that map_reduce has in flight at once."""

    def __post_init__(self) -> None:
        for name in ("context_window", "retrieved_chunks", "retrieval_chunk_tokens", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EvaluationError(f"{name} is {value}", hint="It must be at least 1.")

    @classmethod
    async def of(cls, reader: MemAgent, **changes: Any) -> SystemSettings:
        """The settings of a reader.

        Baselines speak the policy's own wording where the policy has a profile and the reader uses its prompts.

        Args:
            reader: the reader.
            changes: fields of this class.

        Raises:
            PolicyError, TokenizerError, BudgetError: as the reader's first read would.
        """
        context = await reader.aprepare()
        policy = reader.policy
        info = await policy.describe() if isinstance(policy, SelfDescribing) else ModelInfo()
        profile = reader.profile or info.profile
        own = profile is not None and profile.prompts.fingerprint == context.prompts.fingerprint
        told = {
            "context_window": info.context_window or context.budget.context_window,
            "wording": Wording.POLICY if own else Wording.PLAIN,
        }
        return cls(context=context, **{**told, **changes})


class MemAgentSystem:
    """The reader itself. With checkpoints, an attempt that was killed goes on at the chunk where it was.

    Its readers and its checkpoint file belong to the event loop of the first attempt.
    """

    name: Final = "memagent"

    def __init__(self, settings: SystemSettings) -> None:
        self._settings = settings
        self._readers: dict[int, MemAgent] = {}
        self._saver: BaseCheckpointSaver[Any] | None = None
        self._opening = asyncio.Lock()

    async def attempt(self, document: DocumentRef, question: str, *, answer_tokens: int, run_id: str) -> Attempt:
        """Read the document, or read on where an earlier attempt of that name has checkpoints.

        Raises:
            MemAgentError: as `MemAgent.aread` and `MemAgent.aresume`; also where `run_id` is the name of a run with
                another document or question.
        """
        reader = await self._reader(answer_tokens)
        result = await self._resumed(reader, document, question, run_id)
        if result is None:
            result = await reader.aread(document, question, run_id=run_id)
        return _attempt(result)

    async def aclose(self) -> None:
        """Close the checkpoint file, if it was opened here."""
        saver, self._saver = self._saver, None
        self._readers.clear()
        if saver is not None and saver is not self._settings.checkpoints:
            await saver.conn.close()  # type: ignore[attr-defined]

    async def _resumed(self, reader: MemAgent, document: DocumentRef, question: str, run_id: str) -> ReadResult | None:
        """The result of going on with an earlier attempt; None where there was none."""
        if not reader.keeps_checkpoints:
            return None
        try:
            result = await reader.aresume(run_id)
        except RunNotFoundError:
            return None
        resolve = self._settings.context.store.resolve
        if result.question != question or resolve(result.document)["key"] != resolve(document)["key"]:
            raise RunMismatchError(
                "the checkpoints hold another question or document under this name",
                hint="Give every attempt a name of its own, or name another file for checkpoints.",
                run_id=run_id,
            )
        return result

    async def _reader(self, answer_tokens: int) -> MemAgent:
        """The reader whose answers have that bound. All share one policy, one log and one file of checkpoints."""
        async with self._opening:
            if self._saver is None:
                self._saver = await open_saver(self._settings.checkpoints)
            if answer_tokens not in self._readers:
                self._readers[answer_tokens] = self._make_reader(answer_tokens)
            return self._readers[answer_tokens]

    def _make_reader(self, answer_tokens: int) -> MemAgent:
        context = self._settings.context
        return MemAgent(
            context.policy,
            tokenizer=context.tokenizer,
            budget_changes={**asdict(context.budget), "answer_tokens": answer_tokens},
            prompts=context.prompts,
            sampling=context.sampling,
            rules=context.rules,
            limits=context.limits,
            boundary=context.boundary,
            strategy=self._settings.strategy,
            store=context.store,
            checkpoints=self._saver,
            run_log=context.run_log or False,
            settings={**context.log_settings, "answer_tokens": answer_tokens},
            replace_undecodable=context.replace_undecodable,
        )


def _attempt(result: ReadResult) -> Attempt:
    outcome = Outcome.of(result.stop_reason)
    details = [f"{kind.value}: {number}" for kind, number in count_events(result.events).items()]
    if outcome is Outcome.UNFINISHED:
        details.insert(0, f"stopped at {result.stop_reason.value} after {result.chunks_read} chunks")
    answered = outcome is Outcome.ANSWERED
    return Attempt(
        outcome=outcome,
        answer=result.answer if answered else None,
        raw_answer=result.raw_answer,
        usage=result.usage,
        run_id=result.run_id,
        chunks=result.chunks_read,
        memory=result.memory,
        detail=", ".join(details),
    )


_SYSTEMS: Final = {
    "memagent": (__name__, "MemAgentSystem"),
    "full_context": ("memagent_graph.evaluation.baselines.full_context", "FullContext"),
    "middle_truncation": ("memagent_graph.evaluation.baselines.middle_truncation", "MiddleTruncation"),
    "retrieval": ("memagent_graph.evaluation.baselines.retrieval", "Retrieval"),
    "refine": ("memagent_graph.evaluation.baselines.refine", "Refine"),
    "map_reduce": ("memagent_graph.evaluation.baselines.map_reduce", "MapReduce"),
}


def system_names() -> tuple[str, ...]:
    """The names that `load_system` takes."""
    return tuple(_SYSTEMS)


def load_system(name: str, settings: SystemSettings) -> System:
    """The system of that name.

    Raises:
        EvaluationError: there is none.
        MissingExtraError: it needs the extra "eval".
    """
    if name not in _SYSTEMS:
        near = difflib.get_close_matches(name, _SYSTEMS, n=3, cutoff=0.5)
        raise EvaluationError(
            f"there is no system {name!r}",
            hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"There are: {', '.join(_SYSTEMS)}.",
        )
    module, class_name = _SYSTEMS[name]
    make: Callable[[SystemSettings], System] = getattr(import_module(module), class_name)
    return make(settings)
