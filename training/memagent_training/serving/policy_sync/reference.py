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
1. Called in a separate thread."""
RowLogProbs: TypeAlias = Callable[[Sequence[TokenRow]], list[list[float]]]
"""The same of weights that are in memory."""


def folder_logprobs(policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
    """`ReferenceLogProbs` of the policy's files, loaded with transformers in float32 on the CPU, and released again.

    Raises:
        TrainingError: the policy cannot be loaded.
    """
    try:
        model = _load(PolicyFolder.find(policy))
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{policy} cannot be loaded to verify it: {error}", hint="Check its files.") from error
    return model_logprobs(model, rows)


def model_logprobs(model: Any, rows: Sequence[TokenRow]) -> list[list[float]]:
    """Return a model's log-probs of rows' completion tokens, at temperature 1, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        micro_batch = lay_out(rows, "padded", pad_id=0, device=model.device)
        scored_BT = completion_logprobs(model, micro_batch).logprobs_BT.tolist()
    model.train(was_training)
    return [scores[: len(row.completion_ids_T)] for scores, row in zip(scored_BT, rows, strict=True)]


def _load(folder: PolicyFolder) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

    source = folder.path if folder.has_weights else folder.adapter_base
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    if folder.has_weights:
        return model
    from peft import PeftModel  # noqa: PLC0415  optional

    return PeftModel.from_pretrained(model, str(folder.adapter))
