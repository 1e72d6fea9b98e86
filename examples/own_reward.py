"""A reward of your own for right answers from short memories.

memagent rl --data questions.jsonl --model MODEL --reward examples/own_reward.py:reward ...
memagent train runs.sqlite --model MODEL --gold gold.jsonl --reward examples/own_reward.py:reward ...
"""

from __future__ import annotations

from memagent_training.data.training_runs import TrainingRun

FREE_MEMORY_CHARACTERS = 500
"""The length of a memory, in characters, without a penalty."""


def reward(run: TrainingRun) -> float | None:
    """Return 1 for a right answer, minus up to 0.5 for long memories; None if the right answer is unknown."""
    if run.answer is None or run.gold is None:
        return None
    longest_memory = max(len(memory or "") for memory in run.memories)
    return float(run.answer in run.gold.answers) - min(0.5, max(0, longest_memory - FREE_MEMORY_CHARACTERS) / 10_000)
