"""Rewards of whole runs, which compare the answer with the gold answers as an evaluation does.

The gold answers are in `TrainingRun.gold`, from the task or from a file of gold answers. Rewards of single
conversations are in `reward_names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

from memagent_evaluation import scorers
from memagent_evaluation.samples import Metric
from memagent_graph.events import StopReason
from memagent_graph.prompts import extract_last_boxed
from memagent_graph.reasoning import extract_reply
from memagent_training.data.training_runs import Gold, TrainingRun


class _GoldReward(ABC):
    _reads_completion: ClassVar[bool] = True
    """Whether the completion is compared, or only the answer that was taken from it."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return the reward, 0 to 1; None if unknown."""
        text = run.raw_answer if self._reads_completion else run.answer
        if run.gold is None or not run.gold.answers or text is None:
            return None
        return self._compare(text, run.gold, run)

    @abstractmethod
    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float | None: ...

    def explain_unknown(self, run: TrainingRun, /) -> str:
        """Return why the reward is not known."""
        return "a text was redacted away" if run.gold and run.gold.answers else "no gold answer is known"


class ExactMatch(_GoldReward):
    r"""1 if the answer is a gold answer in the requested form: the strict score of an evaluation.

    If the reader took the answer from a \boxed{}, the box must be in the completion's last 300 characters.
    """

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float | None:
        reply, answer = extract_reply(text), run.answer
        if answer is None:
            return None
        final_answer = scorers.find_boxed_at_end(reply, gold.answers) if extract_last_boxed(reply) == answer else answer
        return _is_exact(final_answer, gold)


class BoxedExactMatch(_GoldReward):
    r"""1 if the last \boxed{} in the last 300 characters is a gold answer, both normalised as for `strict`.

    It reads the same place as the paper's reward, but compares differently; `MemAgentReleased` also compares as the
    paper does. Unlike in `ExactMatch`, reasoning is part of the completion.
    """

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float:
        return _is_exact(scorers.find_boxed_at_end(text), gold)


def _is_exact(answer: str | None, gold: Gold) -> float:
    return float(answer is not None and scorers.is_exact_match(answer, gold.answers, gold.metric or Metric.ANY))


class MemAgentReleased(_GoldReward):
    r"""The reward that MemAgent was released with (arXiv 2507.02259): 1 if the last box is a gold answer.

    It has the rules of the released code's verifier for HotpotQA: completion and gold answer in lower case, the last
    \boxed{} or "\boxed " in the last 300 characters, and the string rules of the MATH benchmark except those for
    fractions, roots and units. Spaces and line ends do not count, so NewYork is New York; \dfrac and \tfrac are \frac;
    \left, \right, degrees, \$ and \% are left out; " ." is " 0.". Other punctuation and articles count. The verifier
    has one gold answer per question; here any of several is accepted.
    """

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float:
        boxed = _find_box_as_released(text[-300:].lower())
        normalised_golds = {_normalise_as_released(answer.lower()) for answer in gold.answers}
        return float(boxed is not None and _normalise_as_released(boxed) in normalised_golds)


_REPLACEMENTS: Final = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."), (" ", ""),
)  # fmt: skip
"""The replacements that the released reward makes, in order."""


def _normalise_as_released(text: str) -> str:
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    return text


def _find_box_as_released(text: str) -> str | None:
    """Return the content of the last box; None if there is none, or it is not closed."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    content_start = start + len("\\boxed{")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    depth = 1
    for index in range(content_start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[content_start:index]
    return None


class LenientMatch(_GoldReward):
    """1 if the answer contains a gold answer as whole words. A part of a gold answer ("The") gets 0."""

    _reads_completion = False

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float:
        return float(scorers.is_lenient_match(text, gold.answers, gold.metric or Metric.ANY))


class TokenF1(_GoldReward):
    """The F1 of the answer's normalised words, compared with the nearest gold answer. 0 to 1."""

    _reads_completion = False

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float:
        return scorers.compute_best_f1(text, gold.answers, gold.metric or Metric.ANY)


@dataclass(frozen=True, slots=True)
class StringMatch(_GoldReward):
    """RULER's metric: whether all gold strings (`string_match`), or any (`string_match_part`), are in the completion.

    As in RULER, the whole completion without its reasoning counts; but a completion without an answer in the requested
    form gets 0. A task with its own metric is scored by that metric.
    """

    metric: Metric | None = None
    """Whether all gold strings are required or any of them; by default as in the run's task, or else all."""

    def _compare(self, text: str, gold: Gold, run: TrainingRun) -> float:
        if run.record.stop_reason == StopReason.NO_ANSWER.value:
            return 0.0
        if gold.own_score is not None and self.metric is None:
            return gold.own_score(run.answer or "")
        metric = self.metric or gold.metric or Metric.ALL
        return scorers.compute_string_match(extract_reply(text), gold.answers, metric)
