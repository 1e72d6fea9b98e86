"""Collects rollouts for training: the policy reads each question several times, and these reads form a group.

Questions are samples of an evaluation task, read by the public reader. A group whose rollouts all have the same reward
has no training signal, so more questions are read until enough groups have variance (DAPO's dynamic sampling): as many
groups are in progress as are still needed, and a group without variance is replaced by another.

A group is complete when all its rewards are in the run log. A collection that was killed therefore continues under its
name: complete groups are taken from the log, and the others are read again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TypeVar, cast

from memagent_evaluation.samples import Sample
from memagent_evaluation.scorers import OwnMetric
from memagent_graph import MemAgent, MemAgentError, RunLog, Usage
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_training.data.reward_functions import RewardFunction, call_reward_function, explain_unknown
from memagent_training.data.rollouts import MAX_REWARD
from memagent_training.data.training_runs import Gold, read_run
from memagent_training.rewards.reward_names import resolve_reward
from memagent_training.training_errors import RewardError, TrainingError

T = TypeVar("T")

REWARD_SOURCE = "collect"
"""The source of the collection's rewards in the log."""
_MAX_ATTEMPTS = 2
"""The number of attempts at a read before its group fails."""
_SERVER_ERRORS = (PolicyUnreachableError, PolicyAuthenticationError)
"""Errors that would also affect every other question."""


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """The size of a collection."""

    rollouts: int = 16
    """G: the number of reads of each question."""
    groups: int = 16
    """The number of groups with variance that are needed."""
    max_questions: int = 64
    """The maximum number of questions, even if too few groups have variance."""
    concurrency: int = 256
    """The maximum number of reads in flight."""

    def __post_init__(self) -> None:
        for name, minimum in (("rollouts", 2), ("concurrency", 1)):
            if (value := getattr(self, name)) < minimum:
                hint = f"Set --{name} to {minimum} or more."
                raise TrainingError(f"{name} must be at least {minimum}, got {value}", hint=hint)
        if not 1 <= self.groups <= self.max_questions:
            raise TrainingError(
                f"groups must be 1 to max_questions ({self.max_questions}), got {self.groups}",
                hint="Change --groups or --max-questions.",
            )


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """One question's rollouts."""

    name: str
    task: str
    length: int
    """The sample's length, in the task's unit."""
    run_ids: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def has_variance(self) -> bool:
        """Whether the rollouts have different rewards."""
        return not math.isclose(min(self.rewards), max(self.rewards))


@dataclass(slots=True)
class Collection:
    """The result of a collection. Rewards are also in the run log."""

    groups: list[CollectedGroup] = field(default_factory=list)
    """Groups with variance, in the order of their completion; with `keep_uniform`, all complete groups."""
    uniform_groups: list[CollectedGroup] = field(default_factory=list)
    """Complete groups that are left out because all of their reads have the same reward."""
    failures: dict[str, MemAgentError] = field(default_factory=dict)
    """The first error of each group in which a read failed in every attempt."""
    usage: Usage = field(default_factory=Usage)
    """The usage of the reads of this collection, without FLOPs."""

    @property
    def all_groups(self) -> list[CollectedGroup]:
        """Groups whose reads did not fail, with and without variance."""
        return [*self.groups, *self.uniform_groups]

    @property
    def questions(self) -> int:
        """The number of questions that were asked."""
        return len(self.all_groups) + len(self.failures)

    @property
    def groups_by_run_id(self) -> dict[str, str]:
        """The names of groups by run id, for `load_groups`."""
        return {run_id: group.name for group in self.groups for run_id in group.run_ids}


def make_gold(sample: Sample) -> Gold:
    """Return a question's correct answers with its task's rules for them, and the evidence in the document."""
    own_score = partial(sample.task.own_score, sample) if isinstance(sample.task, OwnMetric) else None
    return Gold(sample.gold, sample.task.metric, own_score, tuple(needle.text for needle in sample.needles) or None)


async def collect(
    agent: MemAgent,
    samples: Iterable[Sample],
    settings: CollectSettings,
    *,
    name: str,
    reward: str | RewardFunction = "exact_match",
    keep_uniform: bool = False,
) -> Collection:
    """Collect rollouts until enough groups have variance, or there are no more questions.

    A collection of this name in the log is continued: its complete groups are not read again. Samples, settings, reward
    and policy must then be the same, which is not checked; otherwise use a new name.

    Args:
        agent: a reader with a run log, at the temperature to train at, whose policy reports token ids and log-probs.
            If its rules refuse a memory, the reward is for the memory that is kept instead;
            `UpdateRules(invented=UpdateRule.ACCEPT)` turns off the rule that a policy's profile may set.
        samples: the questions, taken one at a time as needed.
        settings: the number of rollouts, groups and questions.
        name: the name of this collection; the names of its runs and groups begin with it.
        reward: the name of a built-in reward, or a function; it gets runs with their gold answers. The reward is logged
            under the name of the built-in or of the function.
        keep_uniform: also keep groups without variance, whose reads may differ in rewards other than the outcome.

    Raises:
        RewardError: a reward is not a finite number, or the function returns None; the message names function and run.
        TrainingError: the reader keeps no log, or there is no such reward.
        PolicyUnreachableError, PolicyAuthenticationError: the server is down, or refuses the key. Complete groups are
            in the log.
        MemAgentError: every question failed; the first error.
    """
    if agent.run_log is None:
        raise TrainingError("the reader keeps no run log", hint="Make it with run_log=...: training replays the log.")
    reward_name, reward_function = resolve_reward(reward)
    collection = Collection()
    read_slots = asyncio.Semaphore(settings.concurrency)
    reader = _GroupReader(agent, agent.run_log, settings, reward_name, reward_function, read_slots, collection)
    indexed_samples = enumerate(islice(samples, settings.max_questions))
    running_tasks: dict[asyncio.Task[CollectedGroup], str] = {}
    try:
        while True:
            for index, sample in islice(
                indexed_samples, max(0, settings.groups - len(collection.groups) - len(running_tasks))
            ):
                group_name = f"{name}-{index}"
                running_tasks[asyncio.create_task(reader.read_group(group_name, sample))] = group_name
            if not running_tasks:
                break
            finished_tasks, _ = await asyncio.wait(running_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished_tasks:
                group_name = running_tasks.pop(task)
                try:
                    group = task.result()
                except (*_SERVER_ERRORS, RewardError):  # a bad reward is not a failed read
                    raise
                except MemAgentError as error:
                    collection.failures[group_name] = error
                else:
                    is_kept = group.has_variance or keep_uniform
                    (collection.groups if is_kept else collection.uniform_groups).append(group)
    finally:
        for task in running_tasks:
            task.cancel()
        await asyncio.gather(*running_tasks, return_exceptions=True)
    if collection.failures and not collection.all_groups:
        raise next(iter(collection.failures.values()))
    return collection


@dataclass(frozen=True, slots=True)
class _GroupReader:
    agent: MemAgent
    run_log: RunLog
    settings: CollectSettings
    reward_name: str
    reward_function: RewardFunction
    read_slots: asyncio.Semaphore
    collection: Collection

    async def read_group(self, name: str, sample: Sample) -> CollectedGroup:
        """Read a question several times and reward the reads, or find them in the log; the document is stored once."""
        run_ids = tuple(f"{name}-{index}" for index in range(self.settings.rollouts))
        rewards = await asyncio.to_thread(self._find_logged_rewards, run_ids)
        if rewards is None:
            document = Document.from_text("".join(sample.text()), name=name)
            reference = await self.agent.store.add_async(document)
            await _gather(self._read(run_id, reference, sample) for run_id in run_ids)
            gold = make_gold(sample)
            rewards = await _gather(asyncio.to_thread(self._compute_reward, run_id, gold) for run_id in run_ids)
            await asyncio.to_thread(self._log_rewards, run_ids, rewards)
        return CollectedGroup(name, sample.task.name, sample.length, run_ids, tuple(rewards))

    def _compute_reward(self, run_id: str, gold: Gold) -> float:
        run = replace(read_run(self.run_log, run_id), gold=gold, store=self.agent.store).without_discarded()
        value = call_reward_function(self.reward_function, run, self.reward_name)
        if value is None:
            hint = "Give the reward the gold answers or documents that it needs; it cannot use what redaction drops."
            message = (
                f"the reward {self.reward_name!r} returned no reward ({explain_unknown(self.reward_function, run)})"
            )
            raise RewardError(message, run_id=run_id, hint=hint)
        if isinstance(value, tuple) or not abs(value) <= MAX_REWARD:
            raise RewardError(
                f"the reward {self.reward_name!r} is {value}, which is not one finite number of 32 bits",
                run_id=run_id,
                hint="Correct the reward function; return None if it cannot score a run.",
            )
        return value

    def _find_logged_rewards(self, run_ids: tuple[str, ...]) -> list[float] | None:
        """Return the rewards of a group that an earlier call completed; None if a reward is missing."""
        totals = self.run_log.totals(run_ids)
        rewards = [totals[run_id].rewards.get(self.reward_name) for run_id in run_ids]
        return None if None in rewards else cast("list[float]", rewards)

    async def _read(self, run_id: str, reference: DocumentRef, sample: Sample) -> None:
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            try:
                async with self.read_slots:  # under the same id: the log keeps the completed run
                    result = await self.agent.aread(reference, sample.question, run_id=run_id)
            except MemAgentError:
                if not attempts_left:
                    raise
            else:
                self.collection.usage = _add_usage(self.collection.usage, result.usage)
                return

    def _log_rewards(self, run_ids: tuple[str, ...], rewards: Sequence[float]) -> None:
        for run_id, reward in zip(run_ids, rewards, strict=True):
            self.run_log.reward(run_id, reward, name=self.reward_name, source=REWARD_SOURCE)


async def _gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results when all have ended, or raise the first error in order."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _add_usage(left: Usage, right: Usage) -> Usage:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "turns", "seconds")
    return Usage(**{name: getattr(left, name) + getattr(right, name) for name in names})
