"""Collect, train, sync, until there is nothing more to learn: what is killed goes on where it was."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from transformers import PrinterCallback, TrainerCallback

from memagent_graph.background import run_sync
from memagent_graph.run_log import RunFilter
from memagent_training import training_output as output
from memagent_training.advantages import reason_to_drop
from memagent_training.answer_matching import GoldAnswers
from memagent_training.collect import Collected, collect
from memagent_training.errors import ReplayError
from memagent_training.memory_estimate import lora_of_rank
from memagent_training.replay import load_groups
from memagent_training.rl.collapse import check_metrics, check_rewards
from memagent_training.rl.job import BEST, JOURNAL, PreparedLoop, RLJob, prepare, write_record
from memagent_training.rl.journal import CollectionRecord, Journal, LengthReward, Measurement
from memagent_training.rl.measuring import measure
from memagent_training.rl.online_trainer import CollectedIteration, EndOfLoop, OnlineTrainer
from memagent_training.rl.serving import Serving
from memagent_training.rl.watching import Phase, Watcher
from memagent_training.rollouts import RolloutGroup
from memagent_training.saved_policy import merge_adapter, save_policy
from memagent_training.step_rewards import EvidenceInMemory
from memagent_training.vllm_server import find_vllm_python

log = logging.getLogger(__name__)

_BEST_BEFORE: Final = f"{BEST}.before"
"""The best policy so far, while a better one takes its place."""
_COLLECTIONS_AT_MOST: Final = 3
"""Collections in a row without enough groups, the curriculum standing still, after which nothing more is learnt."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a loop made."""

    policy: Path
    """The finished policy's folder."""
    steps: int
    reason: str
    """Why it ended."""
    measurements: tuple[Measurement, ...]
    best: Path | None
    """The policy that was measured best, if any was measured."""


def run(job: RLJob, watcher: Watcher | None = None) -> Finished:
    """Run a loop to its end, or go on with one. To be called on every rank.

    Raises:
        TrainingError: something cannot be had, or the policy collapsed (`CollapsedError`); checkpoints, journal, and
            the best policy stay.
        VLLMNotInstalledError: the loop is to start its own server, and cannot.
        PolicyError: a server that is not ours is gone. The loop can be resumed.
    """
    prepared = prepare(job)
    if job.base_url is None:
        find_vllm_python()  # or it would be missed only once the model is loaded
    watcher = watcher or Watcher()
    checkpoints = output.find_checkpoints(job.out) if job.resume else output.Checkpoints(None)
    job.out.mkdir(parents=True, exist_ok=True)
    source = _Source(prepared, Serving(prepared), Journal(job.out / JOURNAL), watcher)
    try:
        trainer = OnlineTrainer(
            prepared.base.source,
            source,
            prepared.config,
            steps_per_iteration=prepared.steps_per_iteration,
            save_policy=source.export,
            callbacks=[_Told(watcher)],
            peft_config=None if job.lora_rank is None else lora_of_rank(job.lora_rank),
        )
        trainer.remove_callback(PrinterCallback)
        is_main = trainer.accelerator.is_main_process
        if is_main:
            write_record(prepared)
        reason = f"all {job.iterations} iterations are done"
        newest = checkpoints.newest
        if newest is not None or checkpoints.passed_over:
            watcher.resumes(newest, checkpoints.passed_over)
        source.tell_measurements()
        try:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        except EndOfLoop as end:
            reason = str(end)
        reached = trainer.state.global_step // prepared.steps_per_iteration
        source.export(trainer, reached)
        if is_main:
            source.measure_at_end(reached)
        save_policy(trainer, prepared.base, job.out, lora_rank=job.lora_rank)
    finally:
        source.close()
    watcher.ends(reason)
    best = job.out / BEST
    return Finished(
        job.out, trainer.state.global_step, reason, tuple(source.journal.measurements), best if best.is_dir() else None
    )


class _Source:
    """What the trainer asks for groups: everything of an iteration but the training itself."""

    def __init__(self, prepared: PreparedLoop, serving: Serving, journal: Journal, watcher: Watcher) -> None:
        self.serving = serving
        self.journal = journal
        self._prepared = prepared
        self._job = prepared.job
        self._watcher = watcher
        self._ahead: asyncio.Task[CollectionRecord] | None = None
        """The next iteration's collection, on the background loop."""
        self._told = 0
        self._phase: tuple[int, Phase] | None = None
        self._loaded: tuple[int, list[RolloutGroup]] | None = None
        """The newest collection's groups, by its number."""
        self._recover_best()

    def close(self) -> None:
        """Stop what is under way, and the server."""
        run_sync(self._closed())

    def export(self, trainer: OnlineTrainer, iteration: int) -> None:
        """Write the weights that an iteration begins with where its readers' server looks for them."""
        self._begins(iteration, Phase.SYNC)
        folder = self.serving.policy_folder(iteration)
        save_policy(trainer, self._prepared.base, folder, lora_rank=self._job.lora_rank, merged=False)

    def tell_measurements(self) -> None:
        """Tell what an earlier call measured."""
        for measurement in self.journal.measurements:
            self._watcher.measured(measurement)

    def groups_of(self, iteration: int) -> CollectedIteration:
        """See `GroupSource`."""
        times: dict[str, float] = {}
        record = self.journal.of_iteration(iteration)
        if record is None and self._ahead is not None:
            record = self._timed(times, iteration, Phase.COLLECT, self._awaited())
        follower = iteration + 1 if self._job.steps_behind else None
        wants_follower = (
            follower is not None and follower < self._job.iterations and self.journal.of_iteration(follower) is None
        )
        if record is None or wants_follower or self._is_due(iteration):
            served = self._timed(times, iteration, Phase.SYNC, self.serving.serve(iteration))
            self._watcher.serves(iteration, served)
        if self._is_due(iteration):
            self._timed(times, iteration, Phase.MEASURE, self._measure(iteration))
        if record is None:
            record = self._timed(times, iteration, Phase.COLLECT, self._collect(iteration, iteration))
        check_rewards(self.journal.records, self._job.collapse)
        self._tell_records()
        if wants_follower and follower is not None:
            run_sync(self._begun_ahead(follower, iteration))
        self._begins(iteration, Phase.TRAIN)
        return CollectedIteration(
            groups=self._groups(record),
            policy_versions=[self.serving.version(each) for each in range(max(iteration - 1, 0), iteration + 1)],
            metrics=_metrics(record, self.journal.measurements_before(iteration), times),
        )

    def measure_at_end(self, iteration: int) -> None:
        """Measure the finished weights, if any were to be measured."""
        if self._job.measure.every and not self.journal.measurements_before(iteration):
            self._begins(iteration, Phase.SYNC)
            self._watcher.serves(iteration, run_sync(self.serving.serve(iteration)))
            self._begins(iteration, Phase.MEASURE)
            run_sync(self._measure(iteration))

    # One phase each

    def _is_due(self, iteration: int) -> bool:
        every = self._job.measure.every
        return every > 0 and iteration % every == 0 and not self.journal.measurements_before(iteration)

    async def _measure(self, iteration: int) -> None:
        found = []
        for temperature in self._job.measure.temperatures:
            reader = self.serving.reader(temperature)
            work = partial(measure, self._prepared, reader, iteration, temperature)
            found.append(await self.serving.reading(iteration, work))
        rivals = [each for each in self.journal.measurements if each.is_like(found[0])]
        if all(found[0].mean > each.mean for each in rivals):
            await asyncio.to_thread(self._keep_best, iteration)  # before the journal says that this is done
        self.journal.measured(*found)  # together, so that a loop that is killed does not measure half of them
        for measurement in found:
            self._watcher.measured(measurement)

    def _keep_best(self, iteration: int) -> None:
        """Copy the weights, and the folder with what makes them a policy; the copy appears whole."""
        best, before = self._job.out / BEST, self._job.out / _BEST_BEFORE
        unfinished = best.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(self.serving.policy_folder(iteration), unfinished)
        if self._job.lora_rank is not None:  # adapters alone would be no policy to begin with
            merge_adapter(self._prepared.base, unfinished / output.ADAPTER_FOLDER, unfinished, self._prepared.config)
        shutil.rmtree(before, ignore_errors=True)
        if best.exists():
            best.rename(before)
        unfinished.rename(best)
        shutil.rmtree(before, ignore_errors=True)

    def _recover_best(self) -> None:
        """Put the best policy back that a kill left aside."""
        best, before = self._job.out / BEST, self._job.out / _BEST_BEFORE
        if before.is_dir() and not best.exists():
            before.rename(best)

    async def _collect(self, iteration: int, version: int) -> CollectionRecord:
        """Collect until there are groups for every step of the iteration.

        Raises:
            EndOfLoop: there will be none.
            ReplayError: nothing of what was read can be trained on.
            CollapsedError: there will be none, and there were.
        """
        while True:
            number = len(self.journal.records)
            stage = self._prepared.curriculum.stage(self.journal.records)
            began = time.monotonic()
            found = await self.serving.reading(version, partial(self._read, number, stage))
            groups, refusal = await asyncio.to_thread(self._usable, number, stage, found.group_of)
            self._loaded = (number, groups)
            record = CollectionRecord(
                number=number,
                iteration=iteration,
                is_enough=self._teaching(groups) >= self._prepared.steps_per_iteration,
                version=_oldest_version(groups, version),
                stage=stage,
                group_of=found.group_of,
                by_length=_by_length(found),
                all_right=sum(min(group.rewards) >= 1 for group in found.uniform),
                other_uniform=sum(min(group.rewards) < 1 for group in found.uniform),
                failed=len(found.failed),
                prompt_tokens=found.usage.prompt_tokens,
                cached_tokens=found.usage.cached_tokens,
                completion_tokens=found.usage.completion_tokens,
                turns=found.usage.turns,
                seconds=time.monotonic() - began,
            )
            self.journal.collected(record)
            if refusal is not None:  # only now: another collection follows when the loop is gone on with
                raise refusal
            for name, error in list(found.failed.items())[:1]:
                log.warning("%d questions failed, %s of them: %s", len(found.failed), name, error)
            if record.is_enough:
                return record
            self._check_supply(record)

    def _read(self, number: int, stage: int) -> Coroutine[Any, Any, Collected]:
        return collect(
            self.serving.rollouts,
            self._prepared.curriculum.questions(number, stage),
            self._job.collect,
            name=_collection(number),
            reward=self._prepared.reward,
            resume=True,
        )

    def _check_supply(self, record: CollectionRecord) -> None:
        latest = self.journal.records[-_COLLECTIONS_AT_MOST:]
        is_stuck = len(latest) == _COLLECTIONS_AT_MOST and not any(each.is_enough for each in latest)
        if is_stuck and latest[0].stage == self._prepared.curriculum.stage(self.journal.records):
            collapse = self._job.collapse
            soon = replace(collapse, window=min(collapse.window, _COLLECTIONS_AT_MOST))
            check_rewards(self.journal.records, soon)  # reads that are all wrong do not differ either
            asked = record.groups + record.all_right + record.other_uniform + record.failed
            raise EndOfLoop(
                f"reads of a question no longer differ: of {asked} questions, {record.all_right} were always answered "
                f"right, {record.other_uniform} never or all the same, {record.groups} now and then, and "
                f"{record.failed} failed"
            )

    def _groups(self, record: CollectionRecord) -> list[RolloutGroup]:
        """What an iteration is trained on."""
        if self._loaded is not None and self._loaded[0] == record.number:
            return self._loaded[1]
        return self._load(record.number, record.stage, record.group_of)

    def _usable(
        self, number: int, stage: int, group_of: Mapping[str, str]
    ) -> tuple[list[RolloutGroup], ReplayError | None]:
        """What a collection found that can be trained on, or why nothing of it can."""
        try:
            return (self._load(number, stage, group_of) if group_of else []), None
        except ReplayError as error:
            return [], error

    def _load(self, number: int, stage: int, group_of: Mapping[str, str]) -> list[RolloutGroup]:
        """A collection's groups as the run log has them."""
        replay = load_groups(
            self.serving.run_log,
            step_reward=self._evidence(number, stage, group_of) if self._job.evidence_share else None,
            chosen=RunFilter(run_ids=tuple(group_of)),
            groups=group_of,
            max_tokens=self._prepared.base.window,
        )
        if replay.report.refused:
            log.warning("not all rollouts can be trained on: %s", "; ".join(replay.report.summary()))
        return replay.require_groups()

    def _teaching(self, groups: Sequence[RolloutGroup]) -> int:
        """How many of these groups have something to teach; penalties and step rewards count, too."""
        settings = self._prepared.config.advantage_settings
        return sum(reason_to_drop(group, settings) is None for group in groups)

    def _evidence(self, number: int, stage: int, group_of: Mapping[str, str]) -> EvidenceInMemory:
        asked = {int(name.rpartition("-")[2]): name for name in set(group_of.values())}
        questions = self._prepared.curriculum.questions(number, stage)
        gold_of = {
            asked[place]: sample.gold
            for place, sample in enumerate(islice(questions, max(asked) + 1))
            if place in asked
        }
        answers: Mapping[str, tuple[str, ...]] = {run: gold_of[group] for run, group in group_of.items()}
        return EvidenceInMemory(GoldAnswers(answers), alternatives=False, store=self.serving.rollouts.store)

    # Collecting while the trainer works

    async def _begun_ahead(self, iteration: int, version: int) -> None:
        self._ahead = asyncio.create_task(self._collect(iteration, version))

    async def _awaited(self) -> CollectionRecord:
        assert self._ahead is not None  # noqa: S101  asked before
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def _closed(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)  # its reads let go of log and server first
        await self.serving.close()

    # Time

    def _begins(self, iteration: int, phase: Phase) -> None:
        if (iteration, phase) != self._phase:
            self._phase = (iteration, phase)
            self._watcher.begins(iteration, phase)

    def _timed(self, times: dict[str, float], iteration: int, phase: Phase, work: Coroutine[Any, Any, Any]) -> Any:
        self._begins(iteration, phase)
        began = time.monotonic()
        try:
            return run_sync(work)
        finally:
            times[f"{phase.value}/seconds"] = times.get(f"{phase.value}/seconds", 0.0) + time.monotonic() - began

    def _tell_records(self) -> None:
        for record in self.journal.records[self._told :]:
            self._watcher.collected(record)
        self._told = len(self.journal.records)


class _Told(TrainerCallback):
    """Passes on what the trainer tells."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Metrics of a step."""
        if logs and "loss" in logs:
            self._watcher.trained(state.global_step, logs)
            check_metrics(logs, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is whole."""
        self._watcher.saved(state.global_step)


def _collection(number: int) -> str:
    return f"collection-{number}"


def _oldest_version(groups: Sequence[RolloutGroup], version: int) -> int:
    """The oldest that read any of it: a collection that was cut short may go on with newer weights."""
    logged = (
        each.policy_version for group in groups for rollout in group.rollouts_G for each in rollout.conversations_K
    )
    return min((Serving.iteration_of(each) for each in logged), default=version)


def _by_length(found: Collected) -> dict[int, LengthReward]:
    rewards: dict[int, list[float]] = {}
    for group in (*found.groups, *found.uniform):
        rewards.setdefault(group.length, []).extend(group.rewards)
    return {length: LengthReward(sum(values) / len(values), len(values)) for length, values in sorted(rewards.items())}


def _metrics(record: CollectionRecord, measurements: list[Measurement], times: Mapping[str, float]) -> dict[str, float]:
    """For the training log."""
    tokens = record.prompt_tokens + record.completion_tokens
    metrics = {
        **times,
        "collect/reward": record.reward,
        "collect/groups": record.groups,
        "collect/all_right": record.all_right,
        "collect/other_uniform": record.other_uniform,
        "collect/failed": record.failed,
        "collect/stage": record.stage,
        "collect/cached_fraction": record.cached_tokens / max(record.prompt_tokens, 1),
        "collect/tokens_per_second": tokens / max(record.seconds, 1e-9),
    }
    for length, value in record.by_length.items():
        metrics[f"collect/reward_{length}"] = value.reward
    for each in measurements:
        for length, found in each.accuracy.items():
            metrics[f"measure/accuracy_{length}_at_{each.temperature:g}"] = found.mean
    return metrics
