"""Groups of `training_world` as a run log, the input of `memagent train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memagent_graph.run_log import Conversation, LoggedRun, Reward, RunLog, RunRecord
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.data.rollouts import Rollout, RolloutGroup
from support.conversations import DOCUMENT, make_conversation


def write_log(
    path: Path,
    groups: Sequence[RolloutGroup],
    model: Path,
    *,
    changes_by_run: Mapping[str, Mapping[str, Any]] | None = None,
    rewards: Mapping[str, float] | None = None,
    **changes: Any,
) -> Path:
    """Write the runs of all groups, with `changes` to all conversations and `changes_by_run` to those of some runs."""
    tokenizer = load_tokenizer(model).fingerprint
    log = RunLog(path)
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    for number, (group, rollout) in enumerate(rollouts):
        record = RunRecord(
            rollout.run_id, float(number), 2.0, f"What is in {group.group_id}?", DOCUMENT, {}, "answered", "so"
        )
        fields = {"tokenizer": tokenizer, **changes, **(changes_by_run or {}).get(rollout.run_id, {})}
        reward = (rewards or {}).get(rollout.run_id, rollout.reward)
        log.add(LoggedRun(record, _make_conversations(rollout, fields), rewards=[_make_reward(rollout, reward)]))
    log.close()
    return path


def select_comparable(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Drop rollouts that read no chunk, which no reader makes, and then groups of fewer than two rollouts."""
    reading_groups = [
        replace(group, rollouts_G=tuple(rollout for rollout in group.rollouts_G if len(rollout.conversations_K) > 1))
        for group in groups
    ]
    return [group for group in reading_groups if len(group.rollouts_G) > 1]


def _make_reward(rollout: Rollout, value: float) -> Reward:
    return Reward(rollout.run_id, "reward", value, "test", 5.0)


def _make_conversations(rollout: Rollout, changes: Mapping[str, Any]) -> list[Conversation]:
    answer_position = len(rollout.conversations_K) - 1
    rows = []
    for position, row in enumerate(rollout.conversations_K):
        values: dict[str, Any] = {
            "run_id": rollout.run_id,
            "policy_version": row.policy_version,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "seed": None, "max_tokens": 9},
            "prompt_tokens": len(row.prompt_ids_P),
            "completion_tokens": len(row.completion_ids_T),
            "finish_reason": "length" if row.truncated else "stop",
            "prompt_token_ids": list(row.prompt_ids_P),
            "token_ids": list(row.completion_ids_T),
            "logprobs": list(row.logprobs_T),
        }
        rows.append(make_conversation(position, answers=position == answer_position, **(values | dict(changes))))
    return rows
