"""Rewards of whole runs: a comparison of the answer with the gold one, as in an evaluation.

The gold answer is the run's own (`TrainingRun.gold`), from the task or from a file of gold answers. Rewards of single
conversations are in `reward_names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memagent_evaluation import scorers
from memagent_evaluation.samples import Metric
from memagent_graph.events import StopReason
from memagent_graph.prompts import last_boxed
from memagent_graph.reasoning import extract_reply
from memagent_training.data.training_runs import Gold, TrainingRun


class _GoldReward:
    @staticmethod
    def gold_for(run: TrainingRun) -> Gold | None:
        """Return the gold answers for a run; None if they are not known."""
        return run.gold if run.gold is not None and run.gold.answers else None

    def why_unknown(self, run: TrainingRun, /) -> str:
        """Return why the reward is not known."""
        return "no gold answer is known" if self.gold_for(run) is None else "a text was redacted away"


class ExactMatch(_GoldReward):
    r"""1 if the answer is a gold one in the requested form: an evaluation's strict score.

    If the reader took the answer from a \boxed{}, that must be in the completion's last 300 characters.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the answer is a gold one in the requested form, 0 if not, None if unknown."""
        gold, answer = self.gold_for(run), run.answer
        if gold is None or answer is None or run.raw_answer is None:
            return None
        reply = extract_reply(run.raw_answer)
        final = scorers.find_boxed_at_end(reply, gold.answers) if last_boxed(reply) == answer else answer
        return float(final is not None and scorers.is_exact_match(final, gold.answers, gold.metric or Metric.ANY))


class BoxedExactMatch(_GoldReward):
    r"""1 if the last \boxed{} in the last 300 characters is a gold answer, both normalised as for `strict`.

    It looks at the same place as the paper's reward; `MemAgentReleased` also compares in the same way. Reasoning counts
    as part of the completion, unlike in `ExactMatch`.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the last box is a gold answer, 0 if not, None if unknown."""
        gold = self.gold_for(run)
        if gold is None or run.raw_answer is None:
            return None
        boxed = scorers.find_boxed_at_end(run.raw_answer)
        return float(boxed is not None and scorers.is_exact_match(boxed, gold.answers, gold.metric or Metric.ANY))


class MemAgentReleased(_GoldReward):
    r"""The reward that MemAgent was released with (arXiv 2507.02259): 1 if the last box is a gold answer.

    Known from the released code's verifier for HotpotQA, whose rules are reimplemented here: completion and gold answer
    in lower case, the last \boxed{} or "\boxed " in the last 300 characters, and the string rules of the MATH benchmark
    without its rewriting of fractions, roots and units. Spaces and line ends do not count, so NewYork is New York;
    \dfrac and \tfrac are \frac; \left, \right, degrees, \$ and \% are left out; " ." is " 0.". Other punctuation and
    articles count. There, each question has one gold answer; here any of several is accepted.
    """

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the last box is a gold answer, 0 if not, None if unknown."""
        gold = self.gold_for(run)
        if gold is None or run.raw_answer is None:
            return None
        boxed = _find_box_as_released(run.raw_answer[-300:].lower())
        forms = {_normalise_as_released(answer.lower()) for answer in gold.answers}
        return float(boxed is not None and _normalise_as_released(boxed) in forms)


_REPLACEMENTS: Final = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."), (" ", ""),
)  # fmt: skip
"""The replacements of the released reward, in order."""


def _normalise_as_released(text: str) -> str:
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    return text


def _find_box_as_released(text: str) -> str | None:
    """Return the content of the last box; None if there is none, or it is not closed."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    opened = start + len("\\boxed{")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    depth = 1
    for at in range(opened, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[opened:at]
    return None


class LenientMatch(_GoldReward):
    """1 if the answer contains a gold answer as whole words. A part of a gold answer ("The") gets 0."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return 1 if the answer contains a gold answer, 0 if not, None if unknown."""
        gold, answer = self.gold_for(run), run.answer
        if gold is None or answer is None:
            return None
        return float(scorers.is_lenient_match(answer, gold.answers, gold.metric or Metric.ANY))


class TokenF1(_GoldReward):
    """The answer's F1 over normalised words, compared with the nearest gold answer. 0 to 1."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return a score from 0 to 1; None if unknown."""
        gold, answer = self.gold_for(run), run.answer
        if gold is None or answer is None:
            return None
        return scorers.compute_best_f1(answer, gold.answers, gold.metric or Metric.ANY)


@dataclass(frozen=True, slots=True)
class StringMatch(_GoldReward):
    """RULER's metric: gold strings contained in the answer completion, case folded and otherwise unchanged.

    The whole completion counts, without its reasoning, as RULER looks at everything that a model said; but one without
    an answer in the requested form gets 0. A task with its own metric is scored by that.
    """

    metric: Metric | None = None
    """How several gold strings count; if left out, as the run's task says, or else all of them."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """Return a score from 0 to 1; None if unknown."""
        gold = self.gold_for(run)
        if gold is None or run.raw_answer is None:
            return None
        if run.record.stop_reason == StopReason.NO_ANSWER.value:
            return 0.0
        if gold.own_score is not None and self.metric is None:
            return gold.own_score(run.answer or "")
        metric = self.metric or gold.metric or Metric.ALL
        return scorers.compute_string_match(extract_reply(run.raw_answer), gold.answers, metric)
