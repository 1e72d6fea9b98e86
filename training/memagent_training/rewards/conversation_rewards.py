"""Rewards of each conversation of a run: for a well-formed reply, and for words of the answer in the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from memagent_evaluation.samples import Metric
from memagent_evaluation.scorers import separate_words
from memagent_graph.events import EventKind, StopReason
from memagent_graph.policy import FinishReason
from memagent_graph.run_log import Conversation, Outcome
from memagent_graph.trace import Writes
from memagent_training.data.training_runs import TrainingRun

_DAMAGE_EVENTS: Final = frozenset({EventKind.TRUNCATED.value, EventKind.OVERLONG.value, EventKind.INVALID_ANSWER.value})


class FormatReward:
    """1 for a conversation whose reply has the required format, otherwise 0.

    A memory update must become the memory, or decide in its role's grammar to keep the memory. An answer must have the
    form that the run's prompts ask for; a structured answer must match `response_format`. No reply may be cut off.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return 1 or 0 for each conversation; None if a text was redacted."""
        if any(conversation.text is None for conversation in run.conversations_K):
            return None
        has_answer = run.record.stop_reason != StopReason.NO_ANSWER.value
        return [float(_is_well_formed(conversation, has_answer)) for conversation in run.conversations_K]


def _is_well_formed(conversation: Conversation, has_answer: bool) -> bool:
    is_damaged = any(event.kind in _DAMAGE_EVENTS for event in conversation.events)
    if is_damaged or conversation.finish_reason == FinishReason.LENGTH.value:
        return False
    has_text = bool((conversation.text or "").strip())
    if conversation.writes is Writes.ANSWER:
        return has_answer and has_text
    if conversation.outcome is Outcome.KEPT_PREVIOUS:
        return has_text and not any(event.rule for event in conversation.events)
    return conversation.outcome is Outcome.ACCEPTED


class RecallGain:
    """The change that an update makes to the recall of the gold answer's words in the memory (ReMemR1).

    Of several wordings the nearest counts; of several required strings, all words count. 0 for an answer.
    """

    def __call__(self, run: TrainingRun, /) -> list[float] | None:
        """Return -1 to 1 for each conversation; None if there is no gold answer, or a memory was redacted."""
        gold, memories_K = run.gold, run.memories_before_and_after
        if gold is None or not gold.answers or any(after is None for _, after in memories_K):
            return None
        wordings = [" ".join(gold.answers)] if gold.metric is Metric.ALL else gold.answers
        return [
            _compute_word_recall(after or "", wordings) - _compute_word_recall(before or "", wordings)
            for before, after in memories_K
        ]

    def explain_unknown(self, run: TrainingRun, /) -> str:
        """Return why the run has no reward."""
        return "a memory was redacted away" if run.gold and run.gold.answers else "no gold answer is known"


def _compute_word_recall(memory: str, wordings: Sequence[str]) -> float:
    memory_words = Counter(separate_words(memory).split())
    gold_words = [Counter(separate_words(wording).split()) for wording in wordings]
    return max((words & memory_words).total() / max(1, words.total()) for words in gold_words)
