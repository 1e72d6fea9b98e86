"""Rewards of whole runs, which compare the answer with the gold answers as an evaluation does.

The gold answers are in `TrainingRun.gold`, from the task or from a file of gold answers. Rewards of single
conversations are in `reward_names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memagent_evaluation import scorers
from memagent_evaluation.samples import Metric
from memagent_graph.events import StopReason
from memagent_graph.prompts import extract_last_boxed
from memagent_graph.reasoning import extract_reply
from memagent_training.data.training_runs import Gold, TrainingRun


class _GoldReward:
    @staticmethod
    def get_gold(run: TrainingRun) -> Gold | None:
        """Return the gold answers for a run; None if they are not known."""
        return run.gold if run.gold is not None and run.gold.answers else None

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return why the reward is not known."""
        return "no gold answer is known" if self.get_gold(run) is None else "a text was redacted away"


class ExactMatch(_GoldReward):
    r"""1 if the answer is a gold answer in the requested form: the strict score of an evaluation.

    If the reader took the answer from a \boxed{}, the box must be in the completion's last 300 characters.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the answer is a gold answer in the requested form, 0 if not, None if unknown."""
        gold, answer = self.get_gold(run), run.answer
        if gold is None or answer is None or run.raw_answer is None:
            return None
        reply = extract_reply(run.raw_answer)
        final_answer = scorers.find_boxed_at_end(reply, gold.answers) if extract_last_boxed(reply) == answer else answer
        return float(
            final_answer is not None and scorers.is_exact_match(final_answer, gold.answers, gold.metric or Metric.ANY)
        )


class BoxedExactMatch(_GoldReward):
    r"""1 if the last \boxed{} in the last 300 characters is a gold answer, both normalised as for `strict`.

    It reads the same place as the paper's reward, but compares differently; `MemAgentReleased` also compares as the
    paper does. Unlike in `ExactMatch`, reasoning is part of the completion.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the last box is a gold answer, 0 if not, None if unknown."""
        gold = self.get_gold(run)
        if gold is None or run.raw_answer is None:
            return None
        boxed = scorers.find_boxed_at_end(run.raw_answer)
        return float(boxed is not None and scorers.is_exact_match(boxed, gold.answers, gold.metric or Metric.ANY))


class MemAgentReleased(_GoldReward):
    r"""The reward that MemAgent was released with (arXiv 2507.02259): 1 if the last box is a gold answer.

    It has the rules of the released code's verifier for HotpotQA: completion and gold answer in lower case, the last
    \boxed{} or "\boxed " in the last 300 characters, and the string rules of the MATH benchmark except those for
    fractions, roots and units. Spaces and line ends do not count, so NewYork is New York; \dfrac and \tfrac are \frac;
    \left, \right, degrees, \$ and \% are left out; " ." is " 0.". Other punctuation and articles count. The verifier
    has one gold answer per question; here any of several is accepted.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the last box is a gold answer, 0 if not, None if unknown."""
        gold = self.get_gold(run)
        if gold is None or run.raw_answer is None:
            return None
        boxed = _find_box_as_released(run.raw_answer[-300:].lower())
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

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the answer contains a gold answer, 0 if not, None if unknown."""
        gold, answer = self.get_gold(run), run.answer
        if gold is None or answer is None:
            return None
        return float(scorers.is_lenient_match(answer, gold.answers, gold.metric or Metric.ANY))


class TokenF1(_GoldReward):
    """The F1 of the answer's normalised words, compared with the nearest gold answer. 0 to 1."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return a score from 0 to 1; None if unknown."""
        gold, answer = self.get_gold(run), run.answer
        if gold is None or answer is None:
            return None
        return scorers.compute_best_f1(answer, gold.answers, gold.metric or Metric.ANY)


@dataclass(frozen=True, slots=True)
class StringMatch(_GoldReward):
    """RULER's metric: whether the gold strings are in the answer completion, compared without case.

    As in RULER, the whole completion without its reasoning counts; but a completion without an answer in the requested
    form gets 0. A task with its own metric is scored by that metric.
    """

    metric: Metric | None = None
    """Whether all gold strings are required or any of them; by default as in the run's task, or else all."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return a score from 0 to 1; None if unknown."""
        gold = self.get_gold(run)
        if gold is None or run.raw_answer is None:
            return None
        if run.record.stop_reason == StopReason.NO_ANSWER.value:
            return 0.0
        if gold.own_score is not None and self.metric is None:
            return gold.own_score(run.answer or "")
        metric = self.metric or gold.metric or Metric.ALL
        return scorers.compute_string_match(extract_reply(run.raw_answer), gold.answers, metric)
