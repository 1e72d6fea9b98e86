"""Collects an iteration's groups, adds them to the journal, and finds them when the loop is resumed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from statistics import fmean
from typing import Any, Final, TypeVar

from memagent_evaluation.samples import Sample
from memagent_graph.run_log import RunFilter
from memagent_training.algorithm.advantages import reason_to_drop
from memagent_training.data.replay import load_groups
from memagent_training.data.reward_functions import LoggedReward
from memagent_training.data.rollouts import OUTCOME, RolloutGroup
from memagent_training.job.collect import SOURCE, Collected, CollectedGroup, collect, gold_of
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import term_rewards
from memagent_training.rl.collapse import check_rewards
from memagent_training.rl.loop_journal import CollectionRecord, LoopJournal, MeanReward
from memagent_training.rl.online_trainer import EndOfLoop
from memagent_training.rl.policy_serving import Serving
from memagent_training.rl.rl_job import PreparedLoop
from memagent_training.training_errors import ReplayError

log = logging.getLogger(__name__)

T = TypeVar("T", int, str)

_MAX_POOR_COLLECTIONS: Final = 3
"""The loop ends after this many collections in a row, at one stage, with too few groups."""


class Collector:
    """Provides groups for each iteration.

    A collection is in the journal before it is trained on, so that none is used twice.
    """

    def __init__(self, prepared: PreparedLoop, serving: Serving, journal: LoopJournal) -> None:
        self._prepared = prepared
        self._serving = serving
        self._journal = journal
        self._terms = prepared.config.advantage_settings.terms
        self._term_rewards = term_rewards(self._terms, has_gold=True, has_logged=False)
        self._loaded: tuple[int, list[RolloutGroup]] | None = None
        """The newest collection's groups, by its number."""

    async def collect(self, iteration: int, version: int) -> CollectionRecord:
        """Collect until there are groups for every step of an iteration, with weights that are served.

        Raises:
            EndOfLoop: there will be no more.
            ReplayError: nothing that was read can be trained on.
            CollapsedError: there will be no more, although there were some before.
        """
        while True:
            number = len(self._journal.records)
            stage = self._prepared.curriculum.stage(self._journal.records)
            began = time.monotonic()
            found = await self._serving.reading(version, partial(self._read, number, stage))
            groups: list[RolloutGroup] = []
            refusal: ReplayError | None = None
            try:
                if found.group_of:
                    groups = await asyncio.to_thread(self._load, number, stage, found.group_of)
            except ReplayError as error:
                refusal = error
            self._loaded = (number, groups)
            # Step rewards teach something too; penalties alone do not.
            advantage = self._prepared.config.advantage_settings
            teaching = sum(reason_to_drop(group, advantage) is None for group in groups)
            uniform = [group for group in (*found.groups, *found.uniform) if not group.has_variance]
            record = CollectionRecord(
                number=number,
                iteration=iteration,
                is_enough=teaching >= self._prepared.steps_per_iteration,
                version=_oldest_version(groups, version),
                stage=stage,
                asked=found.questions,
                group_of=found.group_of,
                by_length=_mean_rewards(found, attrgetter("length")),
                by_task=_mean_rewards(found, attrgetter("task")),
                all_right=sum(min(group.rewards) >= 1 for group in uniform),
                other_uniform=sum(min(group.rewards) < 1 for group in uniform),
                failed=len(found.failed),
                prompt_tokens=found.usage.prompt_tokens,
                cached_tokens=found.usage.cached_tokens,
                completion_tokens=found.usage.completion_tokens,
                turns=found.usage.turns,
                seconds=time.monotonic() - began,
            )
            self._journal.collected(record)
            if refusal is not None:  # only now: another collection follows when the loop is resumed
                raise refusal
            for name, failure in list(found.failed.items())[:1]:
                log.warning("%d questions failed, %s of them: %s", len(found.failed), name, failure)
            if record.is_enough:
                return record
            self._check_supply(record)

    def _read(self, number: int, stage: int) -> Coroutine[Any, Any, Collected]:
        return collect(
            self._serving.rollouts,
            self._questions(number, stage),
            self._prepared.job.collect,
            name=_collection(number),
            reward=self._prepared.job.reward,
            keep_uniform=any(term.reward != OUTCOME for term in self._terms)
            or not self._prepared.config.drop_zero_variance,
            resume=True,
        )

    def _questions(self, number: int, stage: int) -> Iterator[Sample]:
        return self._prepared.curriculum.questions(number, stage, self._journal.records)

    def _check_supply(self, record: CollectionRecord) -> None:
        latest = self._journal.records[-_MAX_POOR_COLLECTIONS:]
        is_stuck = len(latest) == _MAX_POOR_COLLECTIONS and not any(each.is_enough for each in latest)
        if is_stuck and latest[0].stage == self._prepared.curriculum.stage(self._journal.records):
            check_rewards(self._journal.records, _MAX_POOR_COLLECTIONS)  # reads that are all wrong do not differ either
            raise EndOfLoop(
                f"reads of a question no longer differ: of {record.asked} questions, {record.all_right} were always "
                f"answered right, {record.other_uniform} never or all the same, {record.groups} now and then, and "
                f"{record.failed} failed"
            )

    def groups(self, record: CollectionRecord) -> list[RolloutGroup]:
        """Return what an iteration is trained on."""
        loaded = self._loaded  # read it once: a collection in the background may become the newest at any moment
        if loaded is not None and loaded[0] == record.number:
            return loaded[1]
        return self._load(record.number, record.stage, record.group_of)

    def _load(self, number: int, stage: int, group_of: Mapping[str, str]) -> list[RolloutGroup]:
        """Return a collection's groups from the run log."""
        gold = self._gold(number, stage, group_of) if self._term_rewards else None
        replay = load_groups(
            self._serving.run_log,
            reward=LoggedReward(None, SOURCE),
            term_rewards=self._term_rewards,
            gold_of=None if gold is None else gold.of,
            chosen=RunFilter(run_ids=tuple(group_of)),
            groups=group_of,
            max_tokens=self._prepared.base.window,
        )
        if replay.report.refused:
            log.warning("not all rollouts can be trained on: %s", "; ".join(replay.report.summary()))
        return replay.require_groups()

    def _gold(self, number: int, stage: int, group_of: Mapping[str, str]) -> GoldAnswers:
        """Return the gold answers of a collection's runs, with their evidence."""
        questions = islice(self._questions(number, stage), self._prepared.job.collect.max_questions)
        of_group = {f"{_collection(number)}-{place}": gold_of(sample) for place, sample in enumerate(questions)}
        return GoldAnswers({run: of_group[group] for run, group in group_of.items()})


def _collection(number: int) -> str:
    return f"collection-{number}"


def _oldest_version(groups: Sequence[RolloutGroup], version: int) -> int:
    """Return the oldest weights that read any of it: an interrupted collection may continue with newer weights."""
    logged = (
        each.policy_version for group in groups for rollout in group.rollouts_G for each in rollout.conversations_K
    )
    return min((Serving.iteration_of(each) for each in logged), default=version)


def _mean_rewards(found: Collected, of: Callable[[CollectedGroup], T]) -> dict[T, MeanReward]:
    """Return the mean reward of the reads, by what `of` says of their group."""
    rewards: dict[T, list[float]] = {}
    for group in sorted((*found.groups, *found.uniform), key=of):
        rewards.setdefault(of(group), []).extend(group.rewards)
    return {key: MeanReward(fmean(values), len(values)) for key, values in rewards.items()}
