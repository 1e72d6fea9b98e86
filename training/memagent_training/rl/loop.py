"""Collects, trains and syncs until there is nothing more to learn; a killed loop continues where it was."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from transformers import PrinterCallback, TrainerCallback

from memagent_evaluation.samples import Sample
from memagent_evaluation.scorers import score
from memagent_evaluation.statistics import estimate
from memagent_graph import MemAgent, MemAgentError
from memagent_graph.concurrency.background import run_sync
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_graph.prompts import AnswerFormat
from memagent_training.data.reward_functions import name_of
from memagent_training.job import training_output as output
from memagent_training.job.base_model import lora_config
from memagent_training.job.policy_card import write_card
from memagent_training.job.saved_policy import merge_adapter, save_policy
from memagent_training.rl.collapse import check_metrics, check_rewards
from memagent_training.rl.collecting import Collector
from memagent_training.rl.loop_journal import CollectionRecord, LoopJournal, Measurement
from memagent_training.rl.loop_status import LoopStatus, Phase
from memagent_training.rl.online_trainer import CollectedIteration, EndOfLoop, OnlineTrainer
from memagent_training.rl.policy_serving import Serving
from memagent_training.rl.rl_job import BEST, JOURNAL, Engine, PreparedLoop, RLJob, prepare
from memagent_training.serving.policy_sync.probe import RowLogProbs
from memagent_training.serving.vllm_server import find_vllm_python

T = TypeVar("T")
_BEFORE: Final = f"{BEST}.before"
"""The best policy so far, while a better one replaces it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a loop."""

    policy: Path
    """The finished policy's folder."""
    steps: int
    reason: str
    """Why it ended."""
    measurements: tuple[Measurement, ...]
    best: Path | None
    """The policy with the best measurement, if any was measured."""


def run(job: RLJob, watcher: LoopStatus | None = None) -> Finished:
    """Run a loop to its end, or continue one. To be called on every rank.

    Raises:
        TrainingError: something is missing, or the policy collapsed (`CollapsedError`); checkpoints, journal, and the
            best policy stay.
        VLLMNotInstalledError: the loop has to start its own server, but cannot.
        PolicyError: a server that is not ours is down. The loop can be resumed.
    """
    prepared = prepare(job)
    job = prepared.job
    if job.base_url is None and job.engine is Engine.VLLM:
        find_vllm_python()  # otherwise it would be found missing only after the model is loaded
    watcher = watcher or LoopStatus(job.iterations, quiet=True)
    checkpoints = output.find_checkpoints(job.out) if job.resume else output.Checkpoints(None)
    job.out.mkdir(parents=True, exist_ok=True)
    source = _Source(prepared, Serving.of(prepared), LoopJournal(job.out / JOURNAL), watcher)
    try:
        trainer = OnlineTrainer(
            prepared.base.source,
            source.groups_of,
            prepared.config,
            steps_per_iteration=prepared.steps_per_iteration,
            save_policy=source.export,
            callbacks=[_Told(watcher)],
            peft_config=lora_config(job.lora_rank),
        )
        trainer.remove_callback(PrinterCallback)
        is_main = trainer.accelerator.is_main_process
        if is_main:
            output.write_record(job.out, prepared.record)
        reason = f"all {job.iterations} iterations are done"
        newest = checkpoints.newest
        if newest is not None or checkpoints.passed_over:
            watcher.resumes(newest, checkpoints.passed_over)
        for measurement in source.journal.measurements:  # of an earlier call
            watcher.measured(measurement)
        try:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        except EndOfLoop as end:
            reason = str(end)
        reached = trainer.state.global_step // prepared.steps_per_iteration
        source.export(trainer, reached)
        if is_main:
            source.measure_at_end(reached)
        save_policy(trainer, prepared.base, job.out, lora_rank=job.lora_rank)
        if is_main:
            write_card(job.out, prepared.base, _facts(prepared, source.journal, reached), trainer.state.log_history)
    finally:
        source.close()
    watcher.ends(reason)
    return Finished(
        job.out, trainer.state.global_step, reason, tuple(source.journal.measurements), source.best.folder_if_any
    )


def _facts(prepared: PreparedLoop, journal: LoopJournal, reached: int) -> dict[str, str]:
    """For the policy's card."""
    job = prepared.job
    facts = {
        "questions": f"{', '.join(job.tasks)}{f' of {job.data}' if job.data else ''}, at lengths {list(job.lengths)}",
        "runs": f"{sum(len(record.group_of) for record in journal.records):,} in {reached} iterations",
        "reward": job.reward if isinstance(job.reward, str) else name_of(job.reward),
        "preset": str(job.preset),
    }
    for measurement in journal.measurements:
        if measurement.iteration in {0, reached}:
            way = f"at temperature {measurement.temperature:g}{', as it is used' if measurement.as_used else ''}"
            name = f"accuracy on held-out questions after {measurement.iteration} iterations, {way}"
            lengths = measurement.accuracy.items()
            facts[name] = ", ".join(f"{length:,}: {accuracy}" for length, accuracy in lengths)
    return facts


class _BestPolicy:
    """Keeps a copy of the best policy; restores it if a kill interrupted its replacement."""

    def __init__(self, prepared: PreparedLoop) -> None:
        self._prepared = prepared
        self._folder = prepared.job.out / BEST
        self._before = self._folder.with_name(_BEFORE)
        if self._before.is_dir() and not self._folder.exists():
            self._before.rename(self._folder)

    @property
    def folder_if_any(self) -> Path | None:
        """Its folder; None if nothing was measured yet."""
        return self._folder if self._folder.is_dir() else None

    def keep(self, policy: Path) -> None:
        """Replace the best policy by a copy of this folder; the copy appears when it is complete."""
        unfinished = self._folder.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(policy, unfinished)
        if self._prepared.job.serves_adapters:  # adapters alone are not a policy to start from
            adapter = unfinished / output.ADAPTER_FOLDER
            merge_adapter(self._prepared.base, adapter, unfinished, self._prepared.config)
        shutil.rmtree(self._before, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(self._before)
        unfinished.rename(self._folder)
        shutil.rmtree(self._before, ignore_errors=True)


class _Source:
    """The trainer's source of groups: everything in an iteration except the training itself."""

    def __init__(self, prepared: PreparedLoop, serving: Serving, journal: LoopJournal, watcher: LoopStatus) -> None:
        self.serving = serving
        self.journal = journal
        self._prepared = prepared
        self._job = prepared.job
        self._watcher = watcher
        self._ahead: asyncio.Task[CollectionRecord] | None = None
        """The next iteration's collection, on the background loop."""
        self._told = 0
        self._logprobs: RowLogProbs | None = None
        """The trainer's, with the weights that were exported last."""
        self._collector = Collector(prepared, serving, journal)
        self.best = _BestPolicy(prepared)

    def close(self) -> None:
        """Stop running work, and the server."""
        run_sync(self._close())

    def export(self, trainer: OnlineTrainer, iteration: int) -> None:
        """Write an iteration's initial weights to the folder where the readers' server looks for them."""
        self._begins(iteration, Phase.SYNC)
        folder = self.serving.policy_folder(iteration)
        self._logprobs = trainer.logprobs_of
        rank, merged = self._job.lora_rank, not self._job.serves_adapters
        save_policy(trainer, self._prepared.base, folder, lora_rank=rank, merged=merged)

    def groups_of(self, iteration: int) -> CollectedIteration:
        """Return the groups of an iteration: a `GroupSource`."""
        record = self.journal.of_iteration(iteration)
        if record is None and self._ahead is not None:
            record = self._during(iteration, Phase.COLLECT, self._await_result())
        follower = iteration + 1
        wants_follower = self._job.steps_behind and follower < self._job.iterations
        wants_follower = wants_follower and self.journal.of_iteration(follower) is None
        if record is None or wants_follower or self._is_due(iteration):
            self._serve(iteration)
        if self._is_due(iteration):
            self._during(iteration, Phase.MEASURE, self._measure(iteration))
        if record is None:
            record = self._during(iteration, Phase.COLLECT, self._collector.collect(iteration, iteration))
        check_rewards(self.journal.records)
        for each in self.journal.records[self._told :]:
            self._watcher.collected(each)
        self._told = len(self.journal.records)
        if wants_follower:
            run_sync(self._begun_ahead(follower, iteration))
        metrics = _metrics(record, self.journal.measurements_before(iteration), self._watcher.clock.times(iteration))
        records = self.journal.records[: record.number + 1]
        if (epochs := self._prepared.curriculum.epochs(records, record.stage)) is not None:
            metrics["collect/epoch"] = epochs
        self._begins(iteration, Phase.TRAIN)
        return CollectedIteration(
            groups=self._collector.groups(record),
            policy_versions=[self.serving.version(each) for each in range(max(iteration - 1, 0), iteration + 1)],
            metrics=metrics,
        )

    def measure_at_end(self, iteration: int) -> None:
        """Measure the finished weights, if measuring is on."""
        if self._job.measure.every and not self.journal.measurements_before(iteration):
            self._serve(iteration)
            self._during(iteration, Phase.MEASURE, self._measure(iteration))

    # One phase each

    def _serve(self, iteration: int) -> None:
        how = self._during(iteration, Phase.SYNC, self.serving.serve(iteration, self._logprobs))
        self._watcher.serves(iteration, self.serving.version(iteration), how)

    def _is_due(self, iteration: int) -> bool:
        every = self._job.measure.every
        return every > 0 and iteration % every == 0 and not self.journal.measurements_before(iteration)

    async def _measure(self, iteration: int) -> None:
        measurements = []
        temperatures = self._job.measure.temperatures
        ways = [(temperature, False) for temperature in temperatures]
        if self._prepared.has_guard:  # as it will be used decides, so it comes first
            ways.insert(0, (temperatures[0], True))
        for temperature, as_used in ways:
            reader = self.serving.reader(temperature, as_used=as_used)
            work = partial(measure, self._prepared, reader, iteration, temperature, as_used=as_used)
            measurements.append(await self.serving.reading(iteration, work))
        rivals = [each for each in self.journal.measurements if each.is_like(measurements[0])]
        if all(measurements[0].mean > each.mean for each in rivals):
            policy = self.serving.policy_folder(iteration)
            await asyncio.to_thread(self.best.keep, policy)  # before the journal says that this is done
        self.journal.measured(*measurements)  # together, so that a killed loop does not measure only half of them
        for measurement in measurements:
            self._watcher.measured(measurement)

    # Collecting while the trainer works

    async def _begun_ahead(self, iteration: int, version: int) -> None:
        self._ahead = asyncio.create_task(self._collector.collect(iteration, version))

    async def _await_result(self) -> CollectionRecord:
        assert self._ahead is not None  # noqa: S101  asked before
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def _close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)  # its reads release log and server first
        await self.serving.close()

    # Time

    def _begins(self, iteration: int, phase: Phase) -> None:
        if (iteration, phase) != (self._watcher.clock.iteration, self._watcher.clock.phase):
            self._watcher.begins(iteration, phase)

    def _during(self, iteration: int, phase: Phase, work: Coroutine[Any, Any, T]) -> T:
        self._begins(iteration, phase)
        return run_sync(work)


async def measure(
    prepared: PreparedLoop, agent: MemAgent, iteration: int, temperature: float, *, as_used: bool = False
) -> Measurement:
    """Read every held-out question once; a read that fails is wrong, and counted.

    Args:
        prepared: the questions, and how many.
        agent: reads with the weights to measure.
        iteration: the one that begins with these weights.
        temperature: the sampling temperature.
        as_used: whether the agent refuses invented memories as the policy's profile says.

    Raises:
        PolicyUnreachableError, PolicyAuthenticationError: the server is down, or refuses the key.
    """
    job = prepared.job
    slots = asyncio.Semaphore(job.collect.concurrency)
    profile = prepared.profile
    answer_format = profile.prompts.answer_format if profile else AnswerFormat.BOXED
    began = time.monotonic()

    async def score_of(sample: Sample) -> float | None:
        async with slots:
            try:
                text = await asyncio.to_thread(lambda: "".join(sample.text()))
                result = await agent.aread(text, sample.question)
                return score(sample, result.answer, result.raw_answer, answer_format=answer_format).strict
            except (PolicyUnreachableError, PolicyAuthenticationError):
                raise
            except MemAgentError:
                return None

    samples = [
        (length, sample)
        for length in prepared.measured_lengths
        for sample in prepared.curriculum.held_out(length, job.measure.count)
    ]
    reads = [asyncio.create_task(score_of(sample)) for _, sample in samples]
    try:
        found = await asyncio.gather(*reads)  # the first error unchanged; a TaskGroup would wrap it
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    scores: dict[int, list[float]] = {}
    for (length, _), right in zip(samples, found, strict=True):
        scores.setdefault(length, []).append(right or 0.0)
    return Measurement(
        iteration=iteration,
        temperature=temperature,
        accuracy={length: estimate(values) for length, values in scores.items()},
        failed=found.count(None),
        seconds=time.monotonic() - began,
        as_used=as_used,
    )


class _Told(TrainerCallback):
    """Passes on what the trainer logs."""

    def __init__(self, watcher: LoopStatus) -> None:
        self._watcher = watcher

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Metrics of a step."""
        if logs and "loss" in logs:
            self._watcher.trained(state.global_step, logs)
            check_metrics(logs, state.global_step)


def _metrics(
    record: CollectionRecord, measurements: list[Measurement], times: Mapping[Phase, float]
) -> dict[str, float]:
    """For the training log."""
    names = (
        "reward",
        "groups",
        "all_right",
        "other_uniform",
        "failed",
        "stage",
        "cached_fraction",
        "tokens_per_second",
    )
    metrics = {f"collect/{name}": getattr(record, name) for name in names}
    metrics |= {f"{phase}/seconds": seconds for phase, seconds in times.items() if seconds}
    for key, value in (*record.by_length.items(), *record.by_task.items()):
        metrics[f"collect/reward_{key}"] = value.reward
    for each in measurements:
        way = f"at_{each.temperature:g}{'_as_used' if each.as_used else ''}"
        for length, found in each.accuracy.items():
            metrics[f"measure/accuracy_{length}_{way}"] = found.mean
    return metrics
