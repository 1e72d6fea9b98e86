"""Runs a loop, which collects groups, trains on them and serves the new weights in each iteration.

A loop that was killed continues from its journal and its newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from accelerate import PartialState
from transformers import PrinterCallback

from memagent_evaluation.samples import Sample
from memagent_evaluation.score_statistics import estimate
from memagent_evaluation.scorers import score
from memagent_graph import MemAgent, MemAgentError
from memagent_graph.concurrency.background import run_sync
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_graph.events import UpdateRule
from memagent_graph.grouping import group_values
from memagent_graph.plain_text import format_count
from memagent_graph.prompts import AnswerFormat
from memagent_graph.storage.journal import open_journal
from memagent_training.data.reward_functions import get_reward_name
from memagent_training.job import training_output
from memagent_training.job.base_model import make_lora_config
from memagent_training.job.job_options import Engine
from memagent_training.job.saved_policy import merge_adapter, save_policy, write_card
from memagent_training.rl.collector import Collector, refuse_collapse
from memagent_training.rl.loop_journal import CollectionRecord, LoopJournal, Measurement
from memagent_training.rl.loop_status import LoopStatus, Phase
from memagent_training.rl.online_trainer import EndOfLoop, IterationGroups, OnlineTrainer
from memagent_training.rl.policy_serving import LocalBackend, PolicyBackend, ServerBackend
from memagent_training.rl.rl_job import BEST, JOURNAL, PreparedLoop, RLJob, prepare
from memagent_training.serving.policy_sync.probe import RowScorer
from memagent_training.serving.vllm_server import find_vllm_python
from memagent_training.training_errors import TrainingError

T = TypeVar("T")
_LOCK: Final = ".lock"
"""The file that is locked while a process works on the loop."""
_PREVIOUS_BEST: Final = f"{BEST}.before"
"""The folder of the previous best policy while a better one replaces it."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The result of a loop."""

    policy: Path
    """The finished policy's folder."""
    steps: int
    reason: str
    """The reason why it ended."""
    measurements: tuple[Measurement, ...]
    best: Path | None
    """The folder of the policy with the best measurement; None without measurements."""


def run(job: RLJob, status: LoopStatus | None = None) -> LoopResult:
    """Run a loop to its end, or continue one. Call it on every rank.

    Raises:
        TrainingError: an input is missing, another process works on the loop, or the policy collapsed
            (`CollapsedError`); checkpoints, journal, and the best policy are kept.
        VLLMNotInstalledError: the loop has to start its own server, and vLLM is not installed.
        PolicyError: a server that is not ours is down. The loop can be resumed.
    """
    prepared = prepare(job)
    job = prepared.job
    if job.base_url is None and job.engine is Engine.VLLM:
        find_vllm_python()  # to fail before the model is loaded
    status = status or LoopStatus(job.iterations, quiet=True)
    job.out.mkdir(parents=True, exist_ok=True)
    is_main = PartialState().is_main_process
    with contextlib.ExitStack() as stack:
        if is_main:
            stack.enter_context(open_journal(job.out / _LOCK, error=TrainingError))
        checkpoints = training_output.find_checkpoints(job.out)
        backend = LocalBackend(prepared) if job.engine is Engine.LOCAL else ServerBackend(prepared)
        source = _IterationSource(prepared, backend, LoopJournal(job.out / JOURNAL), status)
        stack.callback(source.close)
        trainer = OnlineTrainer(
            prepared.base.source,
            source.provide_groups,
            prepared.config,
            steps_per_iteration=prepared.steps_per_iteration,
            save_policy=source.export_policy,
            callbacks=[status],
            peft_config=make_lora_config(job.lora_rank),
        )
        trainer.remove_callback(PrinterCallback)
        if is_main:
            training_output.write_record(job.out, prepared.decisive_inputs)
        reason = f"all {job.iterations} iterations are done"
        checkpoint = checkpoints.newest
        status.on_resume(checkpoint, checkpoints.incomplete)
        for measurement in source.journal.measurements:  # of an earlier call
            status.on_measurement(measurement)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except EndOfLoop as end:
            reason = str(end)
        iteration_count = trainer.state.global_step // prepared.steps_per_iteration
        source.export_policy(trainer, iteration_count)
        if is_main:
            source.measure_at_end(iteration_count)
        save_policy(trainer, prepared.base, job.out, lora_rank=job.lora_rank)
        if is_main:
            write_card(
                job.out,
                prepared.base,
                _list_card_facts(prepared, source.journal, iteration_count),
                trainer.state.log_history,
            )
    status.on_end(reason)
    return LoopResult(
        job.out, trainer.state.global_step, reason, tuple(source.journal.measurements), source.best.find_folder()
    )


def _list_card_facts(prepared: PreparedLoop, journal: LoopJournal, iteration_count: int) -> dict[str, str]:
    """Return the facts for the card of the policy after `iteration_count` iterations."""
    job = prepared.job
    run_count = sum(len(record.group_of) for record in journal.records)
    facts = {
        "questions": f"{', '.join(job.tasks)}{f' of {job.data}' if job.data else ''}, at lengths {list(job.lengths)}",
        "runs": f"{run_count:,} in {format_count(iteration_count, 'iteration')}",
        "reward": get_reward_name(job.reward),
        "preset": str(job.preset),
        **({"strategy": job.strategy} if job.strategy else {}),
    }
    for measurement in journal.measurements:
        if measurement.iteration in {0, iteration_count}:
            conditions = (
                f"at temperature {measurement.temperature:g}{', as deployed' if measurement.as_deployed else ''}"
            )
            name = (
                f"accuracy on held-out questions after {format_count(measurement.iteration, 'iteration')}, {conditions}"
            )
            facts[name] = ", ".join(f"{length:,}: {accuracy}" for length, accuracy in measurement.accuracy.items())
    return facts


class _BestPolicy:
    """Keeps a copy of the best policy; restores the previous one if a kill interrupted its replacement."""

    def __init__(self, prepared: PreparedLoop) -> None:
        self._prepared = prepared
        self._folder = prepared.job.out / BEST
        self._previous_folder = self._folder.with_name(_PREVIOUS_BEST)
        if self._previous_folder.is_dir() and not self._folder.exists():
            self._previous_folder.rename(self._folder)

    def find_folder(self) -> Path | None:
        """Return the folder of the best policy; None before the first measurement."""
        return self._folder if self._folder.is_dir() else None

    def replace(self, policy: Path) -> None:
        """Replace the best policy by a copy of this folder; the copy appears when it is complete."""
        unfinished_folder = self._folder.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished_folder, ignore_errors=True)
        shutil.copytree(policy, unfinished_folder)
        if self._prepared.job.serves_adapters:  # adapters alone are not a policy to start from
            adapter = unfinished_folder / training_output.ADAPTER_FOLDER
            merge_adapter(self._prepared.base, adapter, unfinished_folder, self._prepared.config)
        shutil.rmtree(self._previous_folder, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(self._previous_folder)
        unfinished_folder.rename(self._folder)
        shutil.rmtree(self._previous_folder, ignore_errors=True)


class _IterationSource:
    """Provides the trainer with groups, and does everything else in an iteration except the training."""

    def __init__(
        self, prepared: PreparedLoop, backend: PolicyBackend, journal: LoopJournal, status: LoopStatus
    ) -> None:
        self.backend = backend
        self.journal = journal
        self._prepared = prepared
        self._job = prepared.job
        self._status = status
        self._next_collection: asyncio.Task[CollectionRecord] | None = None
        """The next iteration's collection, on the background loop."""
        self._reported_record_count = 0
        self._score_rows: RowScorer | None = None
        """The trainer's log-probs, with the weights that were exported last."""
        self._collector = Collector(prepared, backend, journal)
        self.best = _BestPolicy(prepared)

    def close(self) -> None:
        """Cancel running work, and close the server."""
        run_sync(self._close())

    def export_policy(self, trainer: OnlineTrainer, iteration: int) -> None:
        """Write an iteration's initial weights to the folder from which they are served."""
        self._status.on_phase(iteration, Phase.SYNC)
        folder = self.backend.get_policy_folder(iteration)
        self._score_rows = trainer.row_scorer
        rank, with_merged = self._job.lora_rank, not self._job.serves_adapters
        save_policy(trainer, self._prepared.base, folder, lora_rank=rank, with_merged=with_merged)

    def provide_groups(self, iteration: int) -> IterationGroups:
        """Return the groups of an iteration; this is a `GroupSource`."""
        record = self.journal.find_collection(iteration)
        if record is None and self._next_collection is not None:
            record = self._run_phase(iteration, Phase.COLLECT, self._await_collection())
        is_next_missing = (
            self._job.steps_behind > 0
            and iteration + 1 < self._job.iterations
            and self.journal.find_collection(iteration + 1) is None
        )
        if record is None or is_next_missing or self._is_measurement_due(iteration):
            self._run_phase(iteration, Phase.SYNC, self.backend.serve(iteration, self._score_rows))
        if self._is_measurement_due(iteration):
            self._run_phase(iteration, Phase.MEASURE, self._measure(iteration))
        if record is None:
            record = self._run_phase(iteration, Phase.COLLECT, self._collector.collect(iteration, iteration))
        refuse_collapse(self.journal.records)
        for new_record in self.journal.records[self._reported_record_count :]:
            self._status.on_collection(new_record)
        self._reported_record_count = len(self.journal.records)
        if is_next_missing:
            run_sync(self._start_collection(iteration + 1, iteration))
        measurements = self.journal.find_measurements(iteration)
        metrics = _compute_iteration_metrics(record, measurements, self._status.phase_clock.get_times(iteration))
        records = self.journal.records[: record.number + 1]
        if (epochs := self._prepared.curriculum.compute_epochs(records, record.stage)) is not None:
            metrics["collect/epoch"] = epochs
        self._status.on_phase(iteration, Phase.TRAIN)
        return IterationGroups(
            groups=self._collector.get_groups(record),
            policy_versions=[
                self.backend.format_version(index) for index in range(max(iteration - 1, 0), iteration + 1)
            ],
            metrics=metrics,
        )

    def measure_at_end(self, iteration: int) -> None:
        """Measure the final weights, unless measuring is turned off."""
        if self._job.measure_every and not self.journal.find_measurements(iteration):
            self._run_phase(iteration, Phase.SYNC, self.backend.serve(iteration, self._score_rows))
            self._run_phase(iteration, Phase.MEASURE, self._measure(iteration))

    # Phases

    def _is_measurement_due(self, iteration: int) -> bool:
        interval = self._job.measure_every
        return interval > 0 and iteration % interval == 0 and not self.journal.find_measurements(iteration)

    async def _measure(self, iteration: int) -> None:
        measurements = []
        temperatures = self._job.measure_temperatures
        conditions = [(temperature, False) for temperature in temperatures]
        profile = self._prepared.profile
        if profile is not None and profile.on_invented is not UpdateRule.ACCEPT:
            # Unlike in training. First, because the first measurement decides which policy is best.
            conditions.insert(0, (temperatures[0], True))
        for temperature, as_deployed in conditions:
            reader = self.backend.make_reader(temperature, as_deployed=as_deployed)
            measure_reader = partial(measure, self._prepared, reader, iteration, temperature, as_deployed=as_deployed)
            measurements.append(await self.backend.run_with_weights(iteration, measure_reader))
        comparable_measurements = [
            previous for previous in self.journal.measurements if previous.conditions == measurements[0].conditions
        ]
        if all(measurements[0].mean > previous.mean for previous in comparable_measurements):
            policy = self.backend.get_policy_folder(iteration)
            await asyncio.to_thread(self.best.replace, policy)  # before the journal records the measurements
        self.journal.add(*measurements)  # in one write: after a kill all of them are recorded, or none
        for measurement in measurements:
            self._status.on_measurement(measurement)

    # Collecting while the trainer works

    async def _start_collection(self, iteration: int, version: int) -> None:
        self._next_collection = asyncio.create_task(self._collector.collect(iteration, version))

    async def _await_collection(self) -> CollectionRecord:
        assert self._next_collection is not None  # noqa: S101  the caller checks
        collection, self._next_collection = self._next_collection, None
        return await collection

    async def _close(self) -> None:
        if self._next_collection is not None:
            self._next_collection.cancel()
            # Its reads must release the log and the server first.
            await asyncio.gather(self._next_collection, return_exceptions=True)
        await self.backend.close()

    # Time

    def _run_phase(self, iteration: int, phase: Phase, work: Coroutine[Any, Any, T]) -> T:
        clock = self._status.phase_clock
        if (iteration, phase) != (clock.iteration, clock.phase):  # unless the export has begun it
            self._status.on_phase(iteration, phase)
        return run_sync(work)


async def measure(
    prepared: PreparedLoop, agent: MemAgent, iteration: int, temperature: float, *, as_deployed: bool = False
) -> Measurement:
    """Read every held-out question once; a read that fails counts as wrong.

    Args:
        prepared: the loop, with the held-out questions.
        agent: the reader with the weights to measure.
        iteration: the iteration that begins with these weights.
        temperature: the sampling temperature.
        as_deployed: whether the agent refuses invented memories as the policy's profile says.

    Raises:
        PolicyUnreachableError, PolicyAuthenticationError: the server is down, or refuses the key.
    """
    job = prepared.job
    read_slots = asyncio.Semaphore(job.collect_settings.concurrency)
    profile = prepared.profile
    answer_format = profile.prompts.answer_format if profile else AnswerFormat.BOXED
    started_at = time.monotonic()

    async def read_and_score(sample: Sample) -> float | None:
        async with read_slots:
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
        for sample in prepared.curriculum.list_held_out_samples(length, job.measure_count)
    ]
    read_tasks = [asyncio.create_task(read_and_score(sample)) for _, sample in samples]
    try:
        read_scores = await asyncio.gather(*read_tasks)  # raises the first error unchanged; a TaskGroup would wrap it
    finally:
        for read_task in read_tasks:
            read_task.cancel()
        await asyncio.gather(*read_tasks, return_exceptions=True)
    lengths = (length for length, _ in samples)
    scores = group_values(zip(lengths, (read_score or 0.0 for read_score in read_scores), strict=True))
    return Measurement(
        iteration=iteration,
        temperature=temperature,
        accuracy={length: estimate(values) for length, values in scores.items()},
        failed=read_scores.count(None),
        seconds=time.monotonic() - started_at,
        as_deployed=as_deployed,
    )


def _compute_iteration_metrics(
    record: CollectionRecord, measurements: list[Measurement], times: Mapping[Phase, float]
) -> dict[str, float]:
    """Return the metrics of an iteration for the training log."""
    names = (
        "reward", "groups", "solved_groups", "uniform_groups", "failed_groups", "stage", "cached_fraction",
        "tokens_per_second",
    )  # fmt: skip
    metrics = {f"collect/{name}": getattr(record, name) for name in names}
    metrics |= {f"{phase}/seconds": seconds for phase, seconds in times.items() if seconds}
    for key, value in (*record.by_length.items(), *record.by_task.items()):
        metrics[f"collect/reward_{key}"] = value.reward
    for measurement in measurements:
        conditions = f"at_{measurement.temperature:g}{'_as_deployed' if measurement.as_deployed else ''}"
        for length, accuracy in measurement.accuracy.items():
            metrics[f"measure/accuracy_{length}_{conditions}"] = accuracy.mean
    return metrics
