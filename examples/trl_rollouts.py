"""Use the reader as a rollout worker of TRL: `AsyncGRPOTrainer(rollout_worker=ReaderRollouts(...))`.

Each conversation is a sample with the advantage of its rollout. The trainer pauses the server, but not the reads, when
it sends new weights; a group gets the version at its start.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import numpy
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from memagent_evaluation.samples import Sample
from memagent_graph import MemAgent, MemAgentError, RunLog
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_training.algorithm.advantages import AdvantageSettings, TrainingRow, prepare_batch
from memagent_training.data.replay import load_groups
from memagent_training.data.reward_functions import RewardFunction
from memagent_training.job.collect import CollectedGroup, CollectSettings, collect
from memagent_training.rewards.reward_names import resolve_reward
from memagent_training.training_errors import RewardError, TrainingError

log = logging.getLogger(__name__)

_MAX_QUEUED_SAMPLES: Final = 1024
"""The number of samples in the queue above which reading pauses."""


class ReaderRollouts:
    """Reads questions in a thread, and queues their conversations: a `RolloutWorkerProtocol`.

    Args:
        agent: a reader with a run log, the temperature to train at, and `on_invented` accept, as for `collect`.
        samples: the questions, taken one at a time; after the last one, no more samples are queued.
        settings: the number of reads of each question (`rollouts`), and of reads in flight.
        reward: the name of a built-in reward, or a function, as for `collect`.
        advantage: the settings of advantages.
    """

    def __init__(
        self,
        agent: MemAgent,
        samples: Iterable[Sample],
        settings: CollectSettings,
        *,
        reward: str | RewardFunction = "exact_match",
        advantage: AdvantageSettings | None = None,
    ) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._agent, self._samples, self._settings = agent, samples, settings
        self._reward, self._advantage = reward, advantage or AdvantageSettings(drop_zero_variance=True)
        self._version = 0
        self._name = f"trl-{uuid.uuid4().hex[:8]}"  # collect() would continue a collection of the same name
        self._error: Exception | None = None
        self._last_sample_time = time.monotonic()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader-rollouts", daemon=True)

    def start(self) -> None:
        """Start reading in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the groups that are being read, and stop."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Set the version of the server's weights."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the reading, or TrainingError after `stale_after_s` seconds without a sample."""
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() or time.monotonic() - self._last_sample_time > stale_after_s:
            reason = f"have given nothing to learn for {stale_after_s:g} s" if self._thread.is_alive() else "are read"
            raise TrainingError(f"All questions {reason}", hint="Ask more or others, or train for fewer steps.")

    def _run(self) -> None:
        try:
            asyncio.run(self._read())
        except Exception as error:  # noqa: BLE001  the trainer raises the error
            self._error = error

    async def _read(self) -> None:
        samples, tasks = enumerate(self._samples), set[asyncio.Task[None]]()
        while not self._stop_event.is_set():
            free_groups = -(-self._settings.concurrency // self._settings.rollouts) - len(tasks)
            tasks |= {asyncio.create_task(self._read_group(*question)) for question in islice(samples, free_groups)}
            if not tasks:
                break
            finished, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        await asyncio.gather(*tasks)

    async def _read_group(self, question_index: int, sample: Sample) -> None:
        version, settings = self._version, self._settings
        group_settings = CollectSettings(settings.rollouts, 1, 1, settings.concurrency)
        try:
            collection = await collect(
                self._agent, [sample], group_settings, name=f"{self._name}-{question_index}", reward=self._reward
            )
        except (PolicyUnreachableError, PolicyAuthenticationError, RewardError):
            raise
        except MemAgentError as error:
            log.warning("question %d was not read: %s", question_index, error)
            self.metrics_queue.put({"rollout/failed_groups_total": 1.0})
            return
        self.metrics_queue.put({"rollout/uniform_groups_total": float(len(collection.uniform_groups))})
        for group in collection.groups:
            for row in await asyncio.to_thread(self._prepare_rows, group):
                await asyncio.to_thread(self._queue_sample, _make_sample(row, question_index, version, group))

    def _prepare_rows(self, group: CollectedGroup) -> tuple[TrainingRow, ...]:
        run_log, (reward_name, _) = self._agent.run_log, resolve_reward(self._reward)
        assert isinstance(run_log, RunLog)  # noqa: S101  collect() checked it
        groups = dict.fromkeys(group.run_ids, group.name)
        return tuple(
            prepare_batch(load_groups(run_log, reward=reward_name, groups=groups).groups, self._advantage).rows
        )

    def _queue_sample(self, sample: RolloutSample) -> None:
        while self.rollout_buffer.qsize() > _MAX_QUEUED_SAMPLES and not self._stop_event.is_set():
            time.sleep(0.1)
        self.rollout_buffer.put(sample)
        self._last_sample_time = time.monotonic()


def _make_sample(row: TrainingRow, group_id: int, version: int, collected_group: CollectedGroup) -> RolloutSample:
    conversation = row.conversation
    prompt, completion = conversation.prompt_ids_P, conversation.completion_ids_T
    mask = conversation.loss_mask_T or [True] * len(completion)
    prompt_zeros = numpy.zeros(len(prompt))
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=numpy.array([*prompt, *completion], dtype=numpy.int64),
        completion_mask=numpy.concatenate([prompt_zeros, mask]).astype(numpy.int64),
        old_log_probs=numpy.concatenate([prompt_zeros, conversation.logprobs_T]).astype(numpy.float32),
        advantage=row.advantage,
        model_version=version,
        group_id=group_id,
        metrics={"reward": collected_group.rewards[collected_group.run_ids.index(row.run_id)]},
        enqueued_at=time.time(),
    )
