"""How right the served policy answers held-out questions, by length."""

from __future__ import annotations

import asyncio
import time

from memagent_graph import MemAgent, MemAgentError
from memagent_graph.errors import PolicyUnreachableError
from memagent_graph.evaluation.samples import Sample
from memagent_graph.evaluation.statistics import estimate
from memagent_training.collect import strict_reward
from memagent_training.rl.curriculum import HELD_OUT
from memagent_training.rl.job import PreparedLoop
from memagent_training.rl.journal import Measurement


async def measure(prepared: PreparedLoop, agent: MemAgent, iteration: int, temperature: float) -> Measurement:
    """Read every held-out question once; a read that fails is wrong, and counted.

    Args:
        prepared: which questions, and how many.
        agent: reads with the weights to measure.
        iteration: that begins with these weights.
        temperature: at which it reads.

    Raises:
        PolicyUnreachableError: the server is gone.
    """
    job = prepared.job
    slots = asyncio.Semaphore(job.collect.concurrency)
    began = time.monotonic()

    async def score_of(sample: Sample) -> float | None:
        async with slots:
            try:
                text = await asyncio.to_thread(lambda: "".join(sample.text()))
                return strict_reward(sample, await agent.aread(text, sample.question))
            except PolicyUnreachableError:
                raise
            except MemAgentError:
                return None

    tasks = prepared.curriculum.tasks
    asked = [
        (length, tasks[number % len(tasks)].sample(length, HELD_OUT + number))
        for length in prepared.measured_lengths
        for number in range(job.measure.count)
    ]
    async with asyncio.TaskGroup() as group:
        reads = [(length, group.create_task(score_of(sample))) for length, sample in asked]
    scores: dict[int, list[float]] = {}
    for length, read in reads:
        scores.setdefault(length, []).append(read.result() or 0.0)
    return Measurement(
        iteration=iteration,
        temperature=temperature,
        accuracy={length: estimate(values) for length, values in scores.items()},
        failed=sum(read.result() is None for _, read in reads),
        seconds=time.monotonic() - began,
    )
