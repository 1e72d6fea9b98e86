"""Pack a trained adapter for the package: in bfloat16, with the base that it belongs to.

    python -m memagent_training.language.pack_adapter --from work/smollm2 --base-file SmolLM2-135M-Instruct.Q4_1.gguf

Writes `adapter_model.safetensors` and `adapter_config.json` as PEFT does, and into `memagent.json` the SHA-256 of the
base's file: the adapter is useless on another base.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from memagent_training.language.supervised import SHIPPED, TARGETS

LARGEST_MB = 12


def release(source: Path, target: Path, base_file: Path) -> int:
    """Write the adapter of a training's newest checkpoint; its size in bytes.

    Raises:
        SystemExit: it is too large to ship.
    """
    state: dict[str, Any] = torch.load(source / "last.pt", map_location="cpu", weights_only=True)
    weights = {
        name.replace(".default", ""): value.to(torch.bfloat16).contiguous() for name, value in state["adapter"].items()
    }
    size: int = sum(value.nbytes for value in weights.values())
    if size > LARGEST_MB * 2**20:
        raise SystemExit(f"the adapter has {size / 2**20:.1f} MB, and at most {LARGEST_MB} are shipped: lower the rank")
    rank = next(value.shape[0] for name, value in weights.items() if ".lora_A." in name)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(TARGETS),
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    profile = target / "memagent.json"
    values = json.loads(profile.read_text("utf-8")) | {"bases": [hashlib.sha256(base_file.read_bytes()).hexdigest()]}
    profile.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="where the training wrote")
    parser.add_argument("--to", type=Path, default=SHIPPED)
    parser.add_argument("--base-file", type=Path, required=True, help="the base's GGUF")
    arguments = parser.parse_args()
    size = release(arguments.source, arguments.to, arguments.base_file)
    print(f"{size / 2**20:.1f} MB in {arguments.to}")


if __name__ == "__main__":
    main()
