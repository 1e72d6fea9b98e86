"""Writes the rows that a training run would learn from as a Parquet file: for other trainers, and for inspection.

A row is a conversation. A step's loss is the sum over its rows and over the tokens where `mask` is true of `weight`
times the loss of the token, which depends on `advantage`:

    -min(r * advantage, clip(r) * advantage),    r = p(token) / p_old(token)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from memagent_training.algorithm.schedule import Schedule

COLUMNS: Final[tuple[tuple[str, pa.DataType, str], ...]] = (
    ("step", pa.int32(), "the optimizer step of the first pass, from 0"),
    ("group", pa.string(), "the group: rollouts of one question on one document"),
    ("run_id", pa.string(), "the rollout"),
    ("conversation", pa.int32(), "the conversation's index in its rollout, from 0"),
    ("role", pa.string(), "update, answer, or another role of the strategy"),
    ("branch", pa.string(), "the branch of the run's graph; empty for the trunk"),
    ("slot", pa.int32(), "the index among the conversations of that role and branch, from 0"),
    ("policy_version", pa.string(), "the weights that wrote it; empty if unknown"),
    ("prompt_ids", pa.list_(pa.int32()), "token ids of the prompt, as the policy got them"),
    ("completion_ids", pa.list_(pa.int32()), "token ids of the completion, as the policy sampled them"),
    ("mask", pa.list_(pa.bool_()), "whether a completion token is learned"),
    ("logprobs", pa.list_(pa.float32()), "the sampler's natural log of each completion token's probability"),
    ("reward", pa.float64(), "the rollout's reward, before any penalty"),
    ("advantage", pa.float64(), "of each learned token: from the rewards of its group"),
    ("weight", pa.float64(), "the factor of each learned token's loss before the sum over the step"),
)
"""Name, type and meaning of each column."""


def write_rows(schedule: Schedule, path: Path) -> int:
    """Write the rows of a training run's first pass, one row group per optimizer step; return the number of rows.

    The file appears when it is complete.
    """
    schema = pa.schema([(name, data_type) for name, data_type, _ in COLUMNS])
    unfinished_path = path.with_name(f"{path.name}.unfinished")
    row_count = 0
    with pq.ParquetWriter(unfinished_path, schema) as writer:
        for step in range(schedule.steps_per_pass):
            rows = list(_iter_rows(schedule, step))
            row_count += len(rows)
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    unfinished_path.replace(path)
    return row_count


def _iter_rows(schedule: Schedule, step_index: int) -> Iterator[dict[str, Any]]:
    scheduled_step = schedule.get_step(step_index)
    for row in scheduled_step.batch.rows:
        conversation, group = row.conversation, scheduled_step.groups[row.group_index]
        mask = conversation.loss_mask_T
        yield {
            "step": step_index,
            "group": group.group_id,
            "run_id": row.run_id,
            "conversation": row.conversation_index,
            "role": conversation.role,
            "branch": conversation.branch,
            "slot": conversation.slot,
            "policy_version": conversation.policy_version,
            "prompt_ids": conversation.prompt_ids_P.tolist(),
            "completion_ids": conversation.completion_ids_T.tolist(),
            "mask": [True] * len(conversation.completion_ids_T) if mask is None else list(mask),
            "logprobs": conversation.logprobs_T.tolist(),
            "reward": group.rollouts_G[row.rollout_index].reward,
            "advantage": row.advantage,
            "weight": row.weight,
        }
