"""What a step's rollouts and conversations tell, for the training log."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from memagent_training.algorithm.advantages import AdvantageBatch
from memagent_training.data.rollouts import RolloutGroup


def row_metrics(
    groups: Sequence[RolloutGroup], batch: AdvantageBatch, policy_versions: Sequence[str]
) -> dict[str, float]:
    """Rewards, lengths and ages of a step.

    Args:
        groups: The step's groups.
        batch: What is learned from them.
        policy_versions: Names of weights, oldest first; staleness is how many lie after the one that wrote a row.
    """
    report, rows = batch.report, batch.rows
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    conversations = [each for rollout in rollouts for each in rollout.conversations_K]
    lengths = [len(each.completion_ids_T) for each in conversations]
    memories = [len(each.completion_ids_T) for each in conversations if each.role != "answer"]
    metrics = {
        "reward": report.reward_mean,
        "reward_std": report.reward_std,
        "advantage/abs_mean": fmean(abs(row.advantage) for row in rows),
        "rollouts": len(rollouts),
        "conversations": len(conversations),
        "conversations/learned": report.conversations,
        "conversations/per_rollout": len(conversations) / len(rollouts),
        "completions/mean_length": fmean(lengths),
        "completions/max_length": max(lengths),
        "completions/truncated_fraction": fmean(each.truncated for each in conversations),
        "prompts/mean_length": fmean(len(each.prompt_ids_P) for each in conversations),
        "tokens/learned": report.learned_tokens,
        "penalised_fraction": report.penalised_rollouts / len(rollouts),
    }
    if memories:
        metrics["memory_tokens/mean"] = fmean(memories)
        metrics["memory_tokens/max"] = max(memories)
    newest_first = list(policy_versions)[::-1]
    ages = [newest_first.index(each.policy_version) for each in conversations if each.policy_version in newest_first]
    if ages:
        metrics["staleness/mean"] = fmean(ages)
        metrics["staleness/max"] = max(ages)
    return metrics
