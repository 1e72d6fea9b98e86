"""The trainer's own log-probs of a policy, which a server of this policy must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from memagent_training.forward.layouts import TokenRow, lay_out
from memagent_training.forward.scoring import completion_logprobs
from memagent_training.serving.policy_sync.folders import PolicyFolder
from memagent_training.training_errors import TrainingError

ReferenceLogProbs: TypeAlias = Callable[[Path, Sequence[TokenRow]], list[list[float]]]
"""Log-probs of rows' completion tokens under a policy's weights: one list per row, one number per token, at temperature
1. Called in a separate thread. A trainer that still holds the weights can answer without loading them again."""


def folder_logprobs(policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
    """`ReferenceLogProbs` of the policy's files, loaded with transformers in float32 on the CPU, and released again.

    Raises:
        TrainingError: the policy cannot be loaded.
    """
    try:
        model = _load(PolicyFolder.find(policy)).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{policy} cannot be loaded to verify it: {error}", hint="Check its files.") from error
    with torch.no_grad():
        scored_BT = completion_logprobs(model, lay_out(rows, "padded", pad_id=0)).logprobs_BT.tolist()
    return [scores[: len(row.completion_ids_T)] for scores, row in zip(scored_BT, rows, strict=True)]


def _load(folder: PolicyFolder) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

    source = folder.path if folder.has_weights else folder.adapter_base
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if folder.has_weights:
        return model
    from peft import PeftModel  # noqa: PLC0415  optional

    return PeftModel.from_pretrained(model, str(folder.adapter))
