"""Old runs are scored again, without rolling out again: rewards of runs and conversations are entered in their log.

relabel(log, short_and_right, name="short_and_right")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from memagent_graph.run_log import RunFilter, RunLog
from memagent_training.data.reward_functions import (
    RewardFunction,
    StepRewardFunction,
    checked,
    checked_steps,
    name_of,
)
from memagent_training.data.training_runs import TrainingRun, read_runs

_T = TypeVar("_T")


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


def _mapped(
    function: Callable[[TrainingRun], _T], runs: Iterator[TrainingRun], at_once: int
) -> Iterator[tuple[TrainingRun, _T]]:
    with ThreadPoolExecutor(max_workers=at_once) as threads:
        while batch := list(islice(runs, at_once)):
            yield from zip(batch, threads.map(function, batch), strict=True)
