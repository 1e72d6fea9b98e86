r"""Reward functions over logged runs, so that old runs can be scored anew without rolling out again.

A reward function takes a `TrainingRun` and gives a number, or None where it cannot tell (no gold answer, a text that
was redacted away). Any callable will do:

    def short_and_right(run: TrainingRun) -> float | None:
        if run.answer is None:
            return None
        return float("4711" in run.answer) - 0.001 * len(run.answer)

    relabel(log, short_and_right, name="short_and_right")

Rewards of single conversations are in `step_rewards`, a language model's judgement in `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final, Protocol, TypeVar

from memagent_graph.evaluation.scorers import contains, normalised, token_f1
from memagent_graph.policy import strip_reasoning
from memagent_graph.prompts import last_boxed
from memagent_graph.run_log import RunFilter, RunLog
from memagent_training.data.training_runs import TrainingRun, read_runs
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.training_errors import RewardError

_LAST_CHARACTERS: Final = 300
_T = TypeVar("_T")


class RewardFunction(Protocol):
    """What a run is worth."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """The run's reward, a finite number; None where it cannot be told."""
        ...


class StepRewardFunction(Protocol):
    """What each conversation of a run is worth by itself."""

    def __call__(self, run: TrainingRun, /) -> Sequence[float] | None:
        """One finite number for each of `run.conversations_K`; None where they cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class BoxedExactMatch:
    r"""The paper's: 1 if the last \boxed{} in the completion's last 300 characters equals a gold answer.

    Both are normalised (`scorers.normalised`). Gold answers of a list are alternatives. An evaluation's strict score,
    which the closed loop rewards, is stricter: reasoning does not count, nor is one of several wanted strings enough.
    """

    gold: GoldAnswers

    def __call__(self, run: TrainingRun, /) -> float | None:
        """1 or 0."""
        gold = self.gold.of(run)
        if gold is None or run.raw_answer is None:
            return None
        boxed = last_boxed(run.raw_answer[-_LAST_CHARACTERS:])
        return float(boxed is not None and normalised(boxed) in {normalised(each) for each in gold})


@dataclass(frozen=True, slots=True)
class LenientMatch:
    """1 if the answer holds a gold answer as whole words. A part of a gold answer ("The") earns nothing."""

    gold: GoldAnswers

    def __call__(self, run: TrainingRun, /) -> float | None:
        """1 or 0."""
        gold, answer = self.gold.of(run), run.answer
        return None if gold is None or answer is None else float(any(contains(answer, each) for each in gold))


@dataclass(frozen=True, slots=True)
class TokenF1:
    """The answer's F1 over normalised words, against the gold answer that it is nearest to. 0 to 1."""

    gold: GoldAnswers

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 1."""
        gold, answer = self.gold.of(run), run.answer
        return None if gold is None or answer is None else max(token_f1(answer, each) for each in gold)


class RulerScore(StrEnum):
    """How RULER counts several gold strings."""

    ALL = "all"
    """The share of them that is there; for all tasks but questions."""
    PART = "part"
    """1 if any of them is there; for its questions (qa_1, qa_2)."""


@dataclass(frozen=True, slots=True)
class RulerStringMatch:
    """RULER's metric: gold strings contained in the answer completion, case folded and otherwise as they are.

    The completion counts as a whole, without its reasoning, as RULER looks at all that a model said.
    """

    gold: GoldAnswers
    score: RulerScore = RulerScore.ALL

    def __call__(self, run: TrainingRun, /) -> float | None:
        """0 to 1."""
        gold = self.gold.of(run)
        if gold is None or run.raw_answer is None:
            return None
        said = strip_reasoning(run.raw_answer).casefold()
        found = [each.casefold() in said for each in gold]
        return float(any(found)) if self.score is RulerScore.PART else sum(found) / len(found)


@dataclass(frozen=True, slots=True)
class LoggedReward:
    """The newest reward of a name that the log holds for the run: a person's feedback, or an earlier function's."""

    name: str = "reward"
    source: str | None = None
    """Only rewards that it gave; None takes anyone's."""

    def __call__(self, run: TrainingRun, /) -> float | None:
        """The value as logged; None where there is none."""
        for each in reversed(run.rewards):
            if each.conversation is None and each.name == self.name and self.source in {None, each.source}:
                return each.value
        return None


@dataclass(frozen=True, slots=True)
class Weighted:
    """The weighted sum of reward functions, by name. It cannot be told where one of them cannot."""

    parts: Mapping[str, tuple[float, RewardFunction]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise RewardError("no rewards were given to add up", hint="Name at least one, with its weight.")

    def __call__(self, run: TrainingRun, /) -> float | None:
        """The sum.

        Raises:
            RewardError: a part is no finite number; says which.
        """
        total = 0.0
        for name, (weight, function) in self.parts.items():
            value = function(run)
            if value is None:
                return None
            total += weight * checked(value, run, name)
        return total


@dataclass(frozen=True, slots=True)
class RelabelReport:
    """What `relabel` did, by run id."""

    given: tuple[str, ...]
    """They have a new reward."""
    unknown: tuple[str, ...]
    """The function could not tell theirs; they got none."""


def relabel(
    log: RunLog,
    function: RewardFunction,
    *,
    name: str,
    source: str | None = None,
    chosen: RunFilter | None = None,
    at_once: int = 1,
) -> RelabelReport:
    """Give runs of a log a reward each. Earlier ones stay in the log; the newest of a name counts.

    Args:
        log: where they are.
        function: what they are worth.
        name: the reward's name in the log.
        source: who gives it; the function's own name without it.
        chosen: which runs; all without it.
        at_once: how many runs to score side by side, in threads; more than 1 pays off for a judge on a server.

    Raises:
        RewardError: the function gave something that is no finite number; runs that came before have their rewards.
        RunLogError: the log cannot be read or written.
    """
    given: list[str] = []
    unknown: list[str] = []
    for run, value in _mapped(lambda run: function(run.without_discarded()), read_runs(log, chosen), at_once):
        if value is None:
            unknown.append(run.run_id)
            continue
        log.reward(run.run_id, checked(value, run, name), name=name, source=source or name_of(function))
        given.append(run.run_id)
    return RelabelReport(tuple(given), tuple(unknown))


def relabel_steps(
    log: RunLog,
    function: StepRewardFunction,
    *,
    name: str,
    source: str | None = None,
    chosen: RunFilter | None = None,
) -> RelabelReport:
    """Give each conversation of runs a reward, discarded attempts excepted; otherwise as `relabel`."""
    given: list[str] = []
    unknown: list[str] = []
    for run in map(TrainingRun.without_discarded, read_runs(log, chosen)):
        values_K = function(run)
        if values_K is None:
            unknown.append(run.run_id)
            continue
        for conversation, value in zip(run.conversations_K, checked_steps(values_K, run, name), strict=True):
            log.reward(run.run_id, value, name=name, source=source or name_of(function), conversation=conversation.id)
        given.append(run.run_id)
    return RelabelReport(tuple(given), tuple(unknown))


def checked(value: float, run: TrainingRun, name: str) -> float:
    """The value, if it is a finite number.

    Raises:
        RewardError: it is not.
    """
    if not math.isfinite(value):
        raise RewardError(
            f"the reward {name!r} is {value}, which is no finite number",
            run_id=run.run_id,
            hint="Mend the reward function; None says that it cannot tell.",
        )
    return float(value)


def checked_steps(values_K: Sequence[float], run: TrainingRun, name: str) -> tuple[float, ...]:
    """The values, if there is a finite number for each of the run's conversations.

    Raises:
        RewardError: there is not.
    """
    if len(values_K) != len(run.conversations_K):
        raise RewardError(
            f"the reward {name!r} has {len(values_K)} values for {len(run.conversations_K)} conversations",
            run_id=run.run_id,
            hint="Give one for each of run.conversations_K.",
        )
    return tuple(checked(value, run, name) for value in values_K)


def name_of(function: object) -> str:
    """What a function or a class of them is called."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _mapped(
    function: Callable[[TrainingRun], _T], runs: Iterator[TrainingRun], at_once: int
) -> Iterator[tuple[TrainingRun, _T]]:
    with ThreadPoolExecutor(max_workers=at_once) as threads:
        while batch := list(islice(runs, at_once)):
            yield from zip(batch, threads.map(function, batch), strict=True)
