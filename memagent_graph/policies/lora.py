"""A LoRA adapter, as PEFT saves one, added to the weights of its base: W + scale * B A.

That takes a few lines, so a reader does not need peft. Other kinds of adapters are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memagent_graph.errors import PolicyError
from memagent_graph.storage.bounded_files import json_file

if TYPE_CHECKING:
    import torch

_PREFIX: Final = "base_model.model."
_UNSUPPORTED: Final = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "layer_replication",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank changes, by the name of the weight that each changes: A is (rank, in), B is (out, rank)."""

    folder: Path
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def delta(self, name: str) -> torch.Tensor | None:
        """Return what is added to the weight of this name, (out, in) in float32; None if it does not change."""
        if name not in self.factors:
            return None
        a, b = self.factors[name]
        return self.scale * (b.float() @ a.float())

    def merge_into(self, weights: dict[str, torch.Tensor]) -> None:
        """Add all changes to these weights, in place.

        Raises:
            PolicyError: a weight is missing, or has another shape.
        """
        for name in self.factors:
            delta = self.delta(name)
            if name not in weights or delta is None or weights[name].shape != delta.shape:
                raise PolicyError(
                    f"the adapter in {self.folder} changes {name}, which its base does not have in that shape",
                    hint="Name an adapter that was trained on this base.",
                )
            weights[name] += delta


def load_adapter(folder: Path) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        PolicyError: they are missing, damaged, or of an unsupported kind.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  an optional dependency
    from safetensors.torch import load_file  # noqa: PLC0415  an optional dependency

    try:
        config = json_file(folder / "adapter_config.json")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PolicyError(
            f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}",
            hint="Name a folder that PEFT saved: adapter_config.json and adapter_model.safetensors.",
        ) from error
    odd = [name for name in _UNSUPPORTED if config.get(name)]
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    factors = {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        a, b = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."), None)
        if b is not None:
            factors[key.removeprefix(_PREFIX).replace(".lora_A.", ".")] = (a, b)
    if odd or tensors or not factors or config.get("peft_type", "LORA") != "LORA":
        what = ", ".join([*odd, *list(tensors)[:3]]) or "no pairs of lora_A and lora_B"
        raise PolicyError(
            f"the adapter in {folder} is not plain LoRA: {what}",
            hint="Merge it with peft (merge_and_unload), and name the merged folder with --model.",
        )
    return Adapter(folder, factors, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
