"""Groups of `training_world` as a run log: what `memagent train` is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memagent_graph.calls import Span, Writes
from memagent_graph.run_log import Conversation, LoggedRun, Outcome, Reward, RunLog, RunRecord
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.data.rollouts import Rollout, RolloutGroup

DOCUMENT = {"key": "sha256:" + "0" * 64, "name": "book.txt", "size": 10, "media_type": "text/plain"}


def write_log(
    path: Path,
    groups: Sequence[RolloutGroup],
    model: Path,
    *,
    of_run: Mapping[str, Mapping[str, Any]] | None = None,
    rewards: Mapping[str, float] | None = None,
    **changes: Any,
) -> Path:
    """Write each group's runs, asked one question; `changes` are of every conversation, `of_run` of one run's."""
    tokenizer = load_tokenizer(model).fingerprint
    log = RunLog(path)
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts_G]
    for number, (group, rollout) in enumerate(rollouts):
        record = RunRecord(
            rollout.run_id, float(number), 2.0, f"What is in {group.group_id}?", DOCUMENT, {}, "answered", "so"
        )
        of_this = {"tokenizer": tokenizer, **changes, **(of_run or {}).get(rollout.run_id, {})}
        reward = (rewards or {}).get(rollout.run_id, rollout.reward)
        log.add(LoggedRun(record, _conversations(rollout, of_this), rewards=[_reward(rollout, reward)]))
    log.close()
    return path


def comparable(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Those with two rollouts or more that read at least one chunk, as a reader's always do."""
    kept = [
        replace(group, rollouts_G=tuple(each for each in group.rollouts_G if len(each.conversations_K) > 1))
        for group in groups
    ]
    return [group for group in kept if len(group.rollouts_G) > 1]


def _reward(rollout: Rollout, value: float) -> Reward:
    return Reward(rollout.run_id, "reward", value, "test", 5.0)


def _conversations(rollout: Rollout, changes: Mapping[str, Any]) -> list[Conversation]:
    last = len(rollout.conversations_K) - 1
    rows = []
    for position, each in enumerate(rollout.conversations_K):
        values: dict[str, Any] = {
            "run_id": rollout.run_id, "position": position,
            "node": "n", "branch": "", "role": "answer" if position == last else "update",
            "slot": 0 if position == last else position,
            "writes": Writes.ANSWER if position == last else Writes.MEMORY,
            "parents": (f"s{position - 1}",) if position else (),
            "step": f"s{position}", "attempt": 0, "outcome": Outcome.ACCEPTED, "began": 1.0 + position, "seconds": 0.5,
            "policy": "p", "policy_version": each.policy_version, "template": "w",
            "sampling": {"temperature": 1.0, "top_p": 1.0, "seed": None, "max_tokens": 9},
            "prompt_tokens": len(each.prompt_ids_P), "completion_tokens": len(each.completion_ids_T),
            "cached_tokens": 0, "finish_reason": "length" if each.truncated else "stop", "text": f"memory {position}",
            "prompt_token_ids": list(each.prompt_ids_P), "token_ids": list(each.completion_ids_T),
            "logprobs": list(each.logprobs_T),
            "reads": () if position == last else (Span(position, 0, 10, 0, 10, 4),),
        }  # fmt: skip
        rows.append(Conversation(**(values | dict(changes))))
    return rows
