"""Rewards of single conversations: whether the form is correct, and whether the memory has what the answer needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memagent_evaluation.samples import Metric
from memagent_evaluation.scorers import contains, separate_words
from memagent_graph.calls import Writes
from memagent_graph.errors import DocumentError
from memagent_graph.events import EventKind, StopReason
from memagent_graph.policy import FinishReason
from memagent_graph.prompts import last_boxed
from memagent_graph.run_log import Conversation, Outcome
from memagent_training.data.training_runs import TrainingRun
from memagent_training.rewards.gold_answers import GoldAnswers

_WITHOUT_FORM: Final = frozenset({EventKind.TRUNCATED.value, EventKind.OVERLONG.value, EventKind.INVALID_ANSWER.value})


@dataclass(frozen=True, slots=True)
class FormatReward:
    r"""1 for a conversation with the correct form, otherwise 0.

    A memory update must become the memory, or say in its role's grammar that memory stays, and must not be cut off. An
    answer must have a complete \boxed{}, if that is requested, or some text, and must not be cut off; a structured
    answer must have the form of `response_format`.
    """

    boxed: bool | None = True
    """Whether answers must be boxed; None means the form that the run's prompts requested, as seen from the outcome."""

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """1 or 0 for each; None if a text was redacted."""
        if any(each.text is None for each in run.conversations_K):
            return None
        answered = run.record.stop_reason != StopReason.NO_ANSWER.value
        return [float(self._is_kept(each, answered)) for each in run.conversations_K]

    def _is_kept(self, conversation: Conversation, answered: bool) -> bool:
        text = conversation.text or ""
        has_lost_it = any(event.kind in _WITHOUT_FORM for event in conversation.events)
        if has_lost_it or conversation.finish_reason == FinishReason.LENGTH.value:
            return False
        if conversation.writes is Writes.ANSWER:
            if self.boxed is None:
                return answered and bool(text.strip())
            return last_boxed(text) is not None if self.boxed else bool(text.strip())
        said = bool(text.strip()) and not any(each.rule for each in conversation.events)
        return conversation.outcome is Outcome.ACCEPTED or (said and conversation.outcome is Outcome.KEPT_PREVIOUS)


@dataclass(frozen=True, slots=True)
class EvidenceInMemory:
    """The change of the share of gold strings in memory by an update.

    With one gold string that is +1 when it enters the memory, -1 when it is lost, +1 when it is there again, and 0
    while it is kept or absent, and for the answer. So the sum over a run is the share in the last memory: dropping it
    and writing it again gains nothing. Strings are compared as whole words, normalised (`scorers.contains`). One that
    is in the question itself is left out, because any memory may repeat the question. Where the document is kept, a
    string counts only when a chunk that was read has it (two neighbouring chunks are searched together): a lucky guess
    before that gains nothing. Several strings are wordings, of which one is enough, unless all of them are required.
    """

    gold: GoldAnswers | None = None
    """Where to find the gold answers; the run's own if left out."""

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """-1 to 1 for each; None if there is no gold answer, or a memory was redacted."""
        expected = run.gold if self.gold is None else self.gold.gold_of(run)
        memories_K = run.memories_around
        if expected is None or not expected.answers or any(after is None for _, after in memories_K):
            return None
        telling = [each for each in expected.answers if not contains(run.question, each)]
        try:
            read_K = _read(run, telling)
        except DocumentError:
            read_K = [(frozenset(telling), frozenset(telling))] * len(run.conversations_K)
        share = expected.metric is Metric.ALL
        return [
            _held(after, telling, after_read, share=share) - _held(before, telling, before_read, share=share)
            for (before, after), (before_read, after_read) in zip(memories_K, read_K, strict=True)
        ]


def _held(memory: str | None, gold: list[str], read: frozenset[str], *, share: bool) -> float:
    """Return the share of gold strings in a memory, of those that were read; or whether there is any."""
    matches = [text in read and contains(memory or "", text) for text in gold]
    return sum(matches) / max(1, len(matches)) if share else float(any(matches))


def _read(run: TrainingRun, gold: list[str]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return the gold strings in chunks that were read before each conversation, and in it.

    Raises:
        DocumentError: the document is not kept.
    """
    if run.store is None:
        raise DocumentError("the document is not kept")
    before: dict[str, frozenset[str]] = {}
    after: dict[str, frozenset[str]] = {}
    newest: dict[str, str] = {}
    """By step: the text of the last chunk read before it."""
    for step in run.trace.steps:
        before[step.id] = frozenset[str]().union(*(after.get(parent, frozenset()) for parent in step.parents))
        text = newest.get(step.parents[-1], "") if step.parents else ""
        found: set[str] = set()
        for span in step.reads:
            chunk = run.store.read(run.record.document, span.start_byte, span.end_byte)
            found |= {string for string in gold if contains(text + chunk, string)}
            text = chunk
        after[step.id], newest[step.id] = before[step.id] | found, text
    nothing = frozenset[str]()
    return [(before.get(each.step, nothing), after.get(each.step, nothing)) for each in run.conversations_K]


@dataclass(frozen=True, slots=True)
class RecallGain:
    """The change of the share of the gold answer's words in memory by an update (ReMemR1).

    Of several wordings the nearest counts; of several required strings, all words count. 0 for an answer.
    """

    gold: GoldAnswers | None = None
    """Where to find the gold answers; the run's own if left out."""

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """-1 to 1 for each; None if there is no gold answer, or a memory was redacted."""
        gold = run.gold if self.gold is None else self.gold.gold_of(run)
        around_K = run.memories_around
        if gold is None or not gold.answers or any(after is None for _, after in around_K):
            return None
        wordings = [" ".join(gold.answers)] if gold.metric is Metric.ALL else gold.answers
        return [
            _word_recall(after or "", wordings) - _word_recall(before or "", wordings) for before, after in around_K
        ]

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return the reason."""
        gold = run.gold if self.gold is None else self.gold.gold_of(run)
        return "a memory was redacted away" if gold is not None and gold.answers else "no gold answer is known"


def _word_recall(memory: str, wordings: Sequence[str]) -> float:
    held = Counter(separate_words(memory).split())
    wanted = [Counter(separate_words(each).split()) for each in wordings]
    return max((words & held).total() / max(1, words.total()) for words in wanted)
