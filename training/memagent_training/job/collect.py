"""Rollouts for training: each question read several times by the policy that is trained, in whole groups.

Questions are samples of an evaluation task, read by the public reader. A group whose rollouts have the
same reward has no training signal, so more questions are asked until enough groups have variance (DAPO's dynamic
sampling): as many groups are in progress as are still needed, and one without variance is replaced by another.

A group is complete when all its rewards are in the run log. So a collection that was killed continues under its name:
complete groups are taken from the log, the others are read again.
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
from memagent_training.data.reward_functions import RewardFunction, check_reward, why_unknown
from memagent_training.data.training_runs import Gold, read_run
from memagent_training.rewards.reward_names import name_reward
from memagent_training.training_errors import RewardError, TrainingError

_T = TypeVar("_T")

SOURCE = "collect"
"""The source of the collection's rewards in the log."""
_ATTEMPTS = 2
"""Attempts at a read before its group fails."""
_SERVER_GONE = (PolicyUnreachableError, PolicyAuthenticationError)
"""Errors that every other question would have too."""


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
    """Reads in flight."""

    def __post_init__(self) -> None:
        for name, least in (("rollouts", 2), ("concurrency", 1)):
            if (value := getattr(self, name)) < least:
                hint = f"Set --{name} to {least} or more."
                raise TrainingError(f"{name} must be at least {least}, got {value}", hint=hint)
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
    """Groups with variance, in the order of their completion; also those without, if they are kept."""
    uniform_groups: list[CollectedGroup] = field(default_factory=list)
    """Groups that are not kept because all of their reads have the same reward."""
    failures: dict[str, MemAgentError] = field(default_factory=dict)
    """The first error of each group that is left out because one of its reads failed for good."""
    usage: Usage = field(default_factory=Usage)
    """The cost of this call's reads; FLOPs are not counted."""

    @property
    def all_groups(self) -> list[CollectedGroup]:
        """Groups whose reads did not fail, with and without variance."""
        return [*self.groups, *self.uniform_groups]

    @property
    def questions(self) -> int:
        """The number of questions that were asked."""
        return len(self.all_groups) + len(self.failures)

    @property
    def group_of(self) -> dict[str, str]:
        """The group's name of each run of these groups, for `load_groups`."""
        return {run_id: group.name for group in self.groups for run_id in group.run_ids}


def find_gold(sample: Sample) -> Gold:
    """Return the correct answer of a question, by its task's rules, and its evidence in the document."""
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

    A collection of this name is continued if the log has one: its complete groups are not read again. The samples,
    settings, reward and policy must be the same, which is not checked; otherwise use a new name.

    Args:
        agent: a reader with a run log, whose policy reports token ids and log-probs, at the temperature to train at.
            If its rules refuse a memory, the reward is for the memory that was kept instead;
            `UpdateRules(invented=UpdateRule.ACCEPT)` turns off the rule that a policy's profile may bring.
        samples: the questions, taken one at a time as they are needed.
        settings: the number of rollouts, groups and questions.
        name: the name of this collection, with which its run ids and groups begin.
        reward: the reward: a built-in's name or a function, which gets runs with their gold answers. It is logged under
            the built-in's name, or the function's.
        keep_uniform: keep groups without variance too: they may differ in other rewards than the outcome.

    Raises:
        RewardError: a reward is not a finite number, or the function returns None; the message names function and run.
        TrainingError: the reader keeps no log, or there is no such reward.
        PolicyUnreachableError, PolicyAuthenticationError: the server is down, or refuses the key. Complete groups are
            in the log.
        MemAgentError: every question failed; the first error.
    """
    if agent.run_log is None:
        raise TrainingError("The reader keeps no run log", hint="Make it with run_log=...: training replays the log.")
    reward_name, function = name_reward(reward)
    collection = Collection()
    slots = asyncio.Semaphore(settings.concurrency)
    reader = _GroupReader(agent, agent.run_log, settings, reward_name, function, slots, collection)
    questions = enumerate(islice(samples, settings.max_questions))
    running: dict[asyncio.Task[CollectedGroup], str] = {}
    try:
        while True:
            for index, sample in islice(questions, max(0, settings.groups - len(collection.groups) - len(running))):
                group_name = f"{name}-{index}"
                running[asyncio.create_task(reader.read_group(group_name, sample))] = group_name
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group_name = running.pop(task)
                try:
                    group = task.result()
                except (*_SERVER_GONE, RewardError):  # a function's result is not a failure of the read
                    raise
                except MemAgentError as error:
                    collection.failures[group_name] = error
                else:
                    is_kept = group.has_variance or keep_uniform
                    (collection.groups if is_kept else collection.uniform_groups).append(group)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if collection.failures and not collection.all_groups:
        raise next(iter(collection.failures.values()))
    return collection


@dataclass(frozen=True, slots=True)
class _GroupReader:
    agent: MemAgent
    run_log: RunLog
    settings: CollectSettings
    reward_name: str
    reward: RewardFunction
    slots: asyncio.Semaphore
    collection: Collection

    async def read_group(self, name: str, sample: Sample) -> CollectedGroup:
        """Make all rollouts of a question, or find them in the log; the document is stored once."""
        run_ids = tuple(f"{name}-{index}" for index in range(self.settings.rollouts))
        rewards = await asyncio.to_thread(self._find_rewards, run_ids)
        if rewards is None:
            document = Document.from_text("".join(sample.text()), name=name)
            reference = await self.agent.store.add_async(document)
            await _gather(self._read(run_id, reference, sample) for run_id in run_ids)
            gold = find_gold(sample)
            rewards = await _gather(asyncio.to_thread(self._judge, run_id, gold) for run_id in run_ids)
            await asyncio.to_thread(self._log_rewards, run_ids, rewards)
        return CollectedGroup(name, sample.task.name, sample.length, run_ids, tuple(rewards))

    def _judge(self, run_id: str, gold: Gold) -> float:
        run = replace(read_run(self.run_log, run_id), gold=gold, store=self.agent.store).without_discarded()
        value = self.reward(run)
        if value is None:
            hint = "Pass it what it needs; if redaction drops answers from the log, they cannot be rewarded."
            message = f"the reward {self.reward_name!r} returned no reward ({why_unknown(self.reward, run)})"
            raise RewardError(message, run_id=run_id, hint=hint)
        return check_reward(value, run, self.reward_name)

    def _find_rewards(self, run_ids: tuple[str, ...]) -> list[float] | None:
        """Return a group's rewards from an earlier call; None if it is incomplete."""
        totals = self.run_log.totals(run_ids)
        rewards = [totals[run_id].rewards.get(self.reward_name) for run_id in run_ids]
        return None if None in rewards else cast("list[float]", rewards)

    async def _read(self, run_id: str, reference: DocumentRef, sample: Sample) -> None:
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                async with self.slots:  # under the same id: the log keeps the completed run
                    result = await self.agent.aread(reference, sample.question, run_id=run_id)
            except MemAgentError:
                if not attempts_left:
                    raise
            else:
                self.collection.usage = _sum(self.collection.usage, result.usage)
                return

    def _log_rewards(self, run_ids: tuple[str, ...], rewards: Sequence[float]) -> None:
        for run_id, reward in zip(run_ids, rewards, strict=True):
            self.run_log.reward(run_id, reward, name=self.reward_name, source=SOURCE)


async def _gather(awaitables: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return all results, or raise the first error in order, when all have ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)


def _sum(one: Usage, other: Usage) -> Usage:
    counted = ("prompt_tokens", "completion_tokens", "cached_tokens", "turns", "seconds")
    return Usage(**{name: getattr(one, name) + getattr(other, name) for name in counted})
