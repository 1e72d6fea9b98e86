"""A reward of one's own: the answer is right, and the memories that led to it are short.

memagent rl --data questions.jsonl --model MODEL --reward examples/own_reward.py:reward ...
memagent train runs.sqlite --model MODEL --gold gold.jsonl --reward examples/own_reward.py:reward ...
"""

from __future__ import annotations

from memagent_training.data.training_runs import TrainingRun

LONGEST = 500
"""Characters of a memory that cost nothing."""


def reward(run: TrainingRun) -> float | None:
    """Return 1 for a right answer, less up to 0.5 for long memories; None if the right answer is unknown."""
    if run.answer is None or run.gold is None:
        return None
    longest = max(len(memory or "") for memory in run.memories)
    return float(run.answer in run.gold.answers) - min(0.5, max(0, longest - LONGEST) / 10_000)
