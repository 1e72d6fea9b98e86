"""Scores old runs again, without reading again: rewards of runs and conversations are added to their log.

relabel(log, short_and_right, name="short_and_right")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from memagent_graph.run_log import RunFilter, RunLog
from memagent_training.data.reward_functions import (
    RewardFunction,
    StepRewardFunction,
    checked,
    checked_steps,
    name_of,
)
from memagent_training.data.training_runs import TrainingRun, read_runs


@dataclass(frozen=True, slots=True)
class RelabelReport:
    """The report of `relabel`, by run id."""

    given: tuple[str, ...]
    """Runs with a new reward."""
    unknown: tuple[str, ...]
    """Runs that the function could not judge; they got none."""


def relabel(
    log: RunLog,
    function: RewardFunction,
    *,
    name: str,
    source: str | None = None,
    chosen: RunFilter | None = None,
    at_once: int = 1,
) -> RelabelReport:
    """Give each run of a log a reward. Earlier ones stay in the log; the newest of a name counts.

    Args:
        log: the log.
        function: the reward function.
        name: the reward's name in the log.
        source: who gives it; the function's name if left out.
        chosen: which runs; all if left out.
        at_once: how many runs to score in parallel, in threads; more than 1 is useful for a judge on a server.

    Raises:
        RewardError: the function returned something that is not a finite number; earlier runs have their rewards.
        RunLogError: the log cannot be read or written.
    """

    def score(run: TrainingRun) -> list[tuple[int | None, float]] | None:
        value = function(run)
        return None if value is None else [(None, checked(value, run, name))]

    return _entered(log, score, chosen, at_once, name=name, source=source or name_of(function))


def relabel_steps(
    log: RunLog,
    function: StepRewardFunction,
    *,
    name: str,
    source: str | None = None,
    chosen: RunFilter | None = None,
) -> RelabelReport:
    """Give each conversation of runs a reward, except discarded attempts; otherwise like `relabel`."""

    def score(run: TrainingRun) -> list[tuple[int | None, float]] | None:
        values_K = function(run)
        if values_K is None:
            return None
        return list(zip((each.id for each in run.conversations_K), checked_steps(values_K, run, name), strict=True))

    return _entered(log, score, chosen, 1, name=name, source=source or name_of(function))


def _entered(
    log: RunLog,
    score: Callable[[TrainingRun], Sequence[tuple[int | None, float]] | None],
    chosen: RunFilter | None,
    at_once: int,
    **names: str,
) -> RelabelReport:
    """Log the result of `score` for runs without their discarded attempts, by conversation; None is the run itself."""
    given: list[str] = []
    unknown: list[str] = []
    runs = map(TrainingRun.without_discarded, read_runs(log, chosen))
    with ThreadPoolExecutor(max_workers=at_once) as threads:
        while batch := list(islice(runs, at_once)):
            for run, values in zip(batch, threads.map(score, batch), strict=True):
                for conversation, value in values or ():
                    log.reward(run.run_id, value, conversation=conversation, **names)
                (unknown if values is None else given).append(run.run_id)
    return RelabelReport(tuple(given), tuple(unknown))
