"""The trainer's own log-probs of a policy: what a server that serves it must say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from memagent_training.forward.layouts import TokenRow, lay_out
from memagent_training.serving.policy_sync.folders import PolicyFolder
from memagent_training.training_errors import TrainingError


class ReferenceLogProbs(Protocol):
    """Log-probs of rows' completion tokens under a policy's weights.

    Called in a thread of its own. A trainer that still holds the weights can answer without loading them again.
    """

    def __call__(self, policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
        """One list per row, one number per completion token, at temperature 1."""
        ...


class FolderLogProbs:
    """Loads the policy with transformers, scores, and lets it go again.

    Args:
        dtype: a torch dtype's name; float32, since weights are rounded otherwise.
        device: a torch device.
    """

    def __init__(self, *, dtype: str = "float32", device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = device

    def __call__(self, policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
        """The log-probs of `rows`.

        Raises:
            TrainingError: the policy cannot be loaded.
        """
        import torch  # noqa: PLC0415  slow to import

        from memagent_training.forward.scoring import completion_logprobs  # noqa: PLC0415  imports torch

        try:
            model = self._load(PolicyFolder.find(policy)).to(self.device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise TrainingError(f"{policy} cannot be loaded to verify it: {error}", hint="Check its files.") from error
        with torch.no_grad():
            micro_batch = lay_out(rows, "padded", pad_id=0, device=self.device)
            scored_BT = completion_logprobs(model, micro_batch).logprobs_BT.tolist()
        return [scores[: len(row.completion_ids_T)] for scores, row in zip(scored_BT, rows, strict=True)]

    def _load(self, folder: PolicyFolder) -> Any:
        import torch  # noqa: PLC0415  slow to import
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

        source = folder.path if folder.has_weights else folder.adapter_base
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, self.dtype))
        if folder.has_weights:
            return model
        from peft import PeftModel  # noqa: PLC0415  optional

        return PeftModel.from_pretrained(model, str(folder.adapter))
