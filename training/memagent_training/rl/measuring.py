"""Measures the served policy's accuracy on held-out questions, by length."""

from __future__ import annotations

import asyncio
import time

from memagent_evaluation.samples import Sample
from memagent_evaluation.scorers import score
from memagent_evaluation.statistics import estimate
from memagent_graph import MemAgent, MemAgentError
from memagent_graph.errors import PolicyAuthenticationError, PolicyUnreachableError
from memagent_graph.prompts import AnswerFormat
from memagent_training.rl.loop_journal import Measurement
from memagent_training.rl.rl_job import PreparedLoop


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
