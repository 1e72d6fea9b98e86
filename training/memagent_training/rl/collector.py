"""Collects the groups of an iteration, records them in the journal, and loads them again after a resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from statistics import fmean
from typing import Final, TypeVar

from memagent_evaluation.samples import Sample
from memagent_graph.grouping import group_values
from memagent_graph.run_log import RunFilter
from memagent_training.algorithm.advantages import find_drop_reason
from memagent_training.data.replay import load_groups
from memagent_training.data.reward_functions import LoggedReward
from memagent_training.data.rollouts import OUTCOME, RolloutGroup
from memagent_training.job.collect import REWARD_SOURCE, CollectedGroup, Collection, collect, make_gold
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import choose_term_rewards
from memagent_training.rl.loop_journal import CollectionRecord, LoopJournal, MeanReward
from memagent_training.rl.online_trainer import EndOfLoop
from memagent_training.rl.policy_serving import PolicyBackend
from memagent_training.rl.rl_job import PreparedLoop
from memagent_training.training_errors import ReplayError, TrainingError

log = logging.getLogger(__name__)

T = TypeVar("T", int, str)

_MAX_POOR_COLLECTIONS: Final = 3
"""The loop ends after this many consecutive collections with too few groups at one stage."""
_COLLAPSE_RATIO: Final = 0.5
"""The newest average reward must be at least this fraction of the best one of the same stage."""


class CollapsedError(TrainingError):
    """The policy became much worse during training."""


class Collector:
    """Provides the groups of each iteration.

    A collection is recorded in the journal before the training on it, so that none is used twice.
    """

    def __init__(self, prepared: PreparedLoop, backend: PolicyBackend, journal: LoopJournal) -> None:
        self._prepared = prepared
        self._backend = backend
        self._journal = journal
        self._terms = prepared.config.advantage_settings.terms
        self._term_rewards = choose_term_rewards(self._terms, has_gold=True, has_logged=False)
        self._newest_groups: tuple[int, list[RolloutGroup]] | None = None
        """The number and the groups of the newest collection."""

    async def collect(self, iteration: int, version: int) -> CollectionRecord:
        """Collect until there are groups for every step of an iteration, with the served weights of `version`.

        Raises:
            EndOfLoop: reads of a question no longer differ, so more collections would not help.
            ReplayError: no read can be trained on.
            CollapsedError: reads no longer differ because the policy became much worse.
        """
        while True:
            collection_number = len(self._journal.records)
            stage = self._prepared.curriculum.find_stage(self._journal.records)
            started_at = time.monotonic()
            collection = await self._backend.run_with_weights(
                version, partial(self._read_questions, collection_number, stage)
            )
            groups: list[RolloutGroup] = []
            replay_error: ReplayError | None = None
            try:
                if collection.groups_by_run_id:
                    groups = await asyncio.to_thread(self._load, collection_number, stage, collection.groups_by_run_id)
            except ReplayError as error:
                replay_error = error
            self._newest_groups = (collection_number, groups)
            # Reads of a group may also differ in step rewards; a difference in penalties alone gives no signal.
            settings = self._prepared.config.advantage_settings
            useful_groups = sum(find_drop_reason(group, settings) is None for group in groups)
            same_rewards = [group.rewards[0] for group in collection.all_groups if not group.has_variance]
            record = CollectionRecord(
                number=collection_number,
                iteration=iteration,
                is_enough=useful_groups >= self._prepared.steps_per_iteration,
                version=_find_oldest_version(groups, version),
                stage=stage,
                questions=collection.questions,
                group_of=collection.groups_by_run_id,
                by_length=_compute_mean_rewards(collection, attrgetter("length")),
                by_task=_compute_mean_rewards(collection, attrgetter("task")),
                solved_groups=sum(reward >= 1 for reward in same_rewards),
                uniform_groups=sum(reward < 1 for reward in same_rewards),
                failed_groups=len(collection.failures),
                prompt_tokens=collection.usage.prompt_tokens,
                cached_tokens=collection.usage.cached_tokens,
                completion_tokens=collection.usage.completion_tokens,
                turns=collection.usage.turns,
                seconds=time.monotonic() - started_at,
            )
            self._journal.add(record)
            if replay_error is not None:  # raised only now, so that a resumed loop makes another collection
                raise replay_error
            for name, failure in list(collection.failures.items())[:1]:
                log.warning("%d questions failed; the first, %s, with: %s", len(collection.failures), name, failure)
            if record.is_enough:
                return record
            self._end_if_stuck(record)

    async def _read_questions(self, collection_number: int, stage: int) -> Collection:
        has_step_rewards = any(term.reward != OUTCOME for term in self._terms)
        return await collect(
            self._backend.make_rollout_reader(),
            self._draw_questions(collection_number, stage),
            self._prepared.job.collect_settings,
            name=_make_collection_name(collection_number),
            reward=self._prepared.job.reward,
            keep_uniform=has_step_rewards or not self._prepared.config.drop_zero_variance,
        )

    def _draw_questions(self, collection_number: int, stage: int) -> Iterator[Sample]:
        return self._prepared.curriculum.draw_questions(collection_number, stage, self._journal.records)

    def _end_if_stuck(self, record: CollectionRecord) -> None:
        """End the loop after several consecutive collections with too few groups."""
        latest = self._journal.records[-_MAX_POOR_COLLECTIONS:]
        is_stuck = len(latest) == _MAX_POOR_COLLECTIONS and not any(poor_record.is_enough for poor_record in latest)
        if is_stuck and latest[0].stage == self._prepared.curriculum.find_stage(self._journal.records):
            refuse_collapse(self._journal.records, _MAX_POOR_COLLECTIONS)  # wrong reads do not differ either
            other_groups = record.solved_groups + record.uniform_groups + record.failed_groups
            raise EndOfLoop(
                f"reads of a question no longer differ: of {record.questions} questions, {record.solved_groups} were "
                f"always answered right, {record.uniform_groups} had equal rewards below 1, "
                f"{record.questions - other_groups} had different rewards, and {record.failed_groups} failed"
            )

    def get_groups(self, record: CollectionRecord) -> list[RolloutGroup]:
        """Return the groups of a collection, to train on."""
        newest_groups = self._newest_groups  # read once: a collection in the background may replace it
        if newest_groups is not None and newest_groups[0] == record.number:
            return newest_groups[1]
        return self._load(record.number, record.stage, record.group_of)

    def _load(self, collection_number: int, stage: int, groups_by_run_id: Mapping[str, str]) -> list[RolloutGroup]:
        """Return a collection's groups from the run log."""
        find_gold = None
        if self._term_rewards:
            questions = islice(
                self._draw_questions(collection_number, stage), self._prepared.job.collect_settings.max_questions
            )
            gold_by_group = {
                f"{_make_collection_name(collection_number)}-{index}": make_gold(sample)
                for index, sample in enumerate(questions)
            }
            find_gold = GoldAnswers({run: gold_by_group[group] for run, group in groups_by_run_id.items()}).find
        replay = load_groups(
            self._backend.run_log,
            reward=LoggedReward(None, REWARD_SOURCE),
            term_rewards=self._term_rewards,
            find_gold=find_gold,
            run_filter=RunFilter(run_ids=tuple(groups_by_run_id)),
            groups=groups_by_run_id,
            max_tokens=self._prepared.base.context_window,
        )
        if replay.report.refused:
            log.warning("not all rollouts can be trained on: %s", "; ".join(replay.report.format_lines()))
        return replay.require_groups()


def refuse_collapse(records: Sequence[CollectionRecord], window: int = 8) -> None:
    """Refuse to continue after rewards fell.

    Stages are not compared with each other: rewards on longer documents are lower at first.

    Args:
        records: the collections so far.
        window: the number of collections in an average, as an iteration with too few groups has several.

    Raises:
        CollapsedError: the newest average is below half the best one before.
    """
    rewards = [record.reward for record in records if record.stage == records[-1].stage]
    averages = [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]
    if averages and max(averages) > 0 and averages[-1] < _COLLAPSE_RATIO * max(averages):
        raise CollapsedError(
            f"the policy collapsed: the mean reward of the last {window} collections is {averages[-1]:.3f}, "
            f"and it was {max(averages):.3f} before",
            hint="Begin a loop in another folder from an earlier policy (`best` in this one, if any was measured) with "
            "a lower learning rate, or smaller steps (fewer an iteration, max_grad_norm, beta).",
        )


def _make_collection_name(collection_number: int) -> str:
    return f"collection-{collection_number}"


def _find_oldest_version(groups: Sequence[RolloutGroup], default: int) -> int:
    """Return the version of the oldest weights; a resumed collection has conversations of several versions."""
    versions = {
        conversation.policy_version
        for group in groups
        for rollout in group.rollouts_G
        for conversation in rollout.conversations_K
    }
    return min(map(PolicyBackend.parse_version, versions), default=default)


def _compute_mean_rewards(collection: Collection, key: Callable[[CollectedGroup], T]) -> dict[T, MeanReward]:
    """Return the mean reward of the reads by a key of their groups."""
    groups = sorted(collection.all_groups, key=key)
    rewards = group_values((key(group), reward) for group in groups for reward in group.rewards)
    return {value: MeanReward(fmean(values), len(values)) for value, values in rewards.items()}
