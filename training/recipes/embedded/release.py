"""Writes the model folder that ships: weights in bfloat16, with the configuration for transformers and vLLM.

python -m recipes.embedded.release --edition 1 --checkpoint last.pt --out memagent_graph/embedded
python -m recipes.embedded.release --edition 2 --policy rl-policy --out memagent_graph/embedded
python -m recipes.embedded.release --edition 2 --policy rl-policy --toward $FIRST --out ...

The last command moves the weights back toward the policy from which the loop started. This keeps what reinforcement
learning taught, and undoes much of the damage to other abilities (linear interpolation toward initialisation, arXiv
2406.16768).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from recipes.embedded.policy_network import CONTEXT_WINDOW, Network, find_special_id, load_policy, make_policy

PROFILE = {
    "context_window": CONTEXT_WINDOW,
    "chunk_tokens": 256,
    "memory_tokens": 48,
    "question_tokens": 96,
    "answer_tokens": 48,
    "boundary": "sentence",
    "on_invented": "keep_previous",
    "empty_memory": "none",
}
"""The settings of the profile with which the policy reads."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def release(policy: Network, out: Path, edition: str = "1") -> None:
    """Write weights and configuration into a folder that already holds tokenizer and templates."""
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in policy.state_dict().items()}
    partial_path = out / "model.safetensors.partial"
    save_file(tensors, partial_path, metadata={"format": "pt"})
    partial_path.chmod(0o644)
    partial_path.replace(out / "model.safetensors")
    config = json.loads(policy.config.to_json_string())
    legacy_keys = {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    write_json(out / "config.json", {**config, "dtype": "bfloat16", **legacy_keys})  # for older transformers
    generation = {
        "do_sample": False,
        "eos_token_id": find_special_id("<|end|>"),
        "pad_token_id": find_special_id("<|pad|>"),
    }
    write_json(out / "generation_config.json", generation)
    write_json(out / "memagent.json", {**PROFILE, "edition": edition})
    print(f"{policy.num_parameters():,} parameters written to {out}")


@torch.no_grad()
def move_toward(policy: Network, target: Network, fraction: float) -> None:
    """Move the policy's weights by a fraction (0 to 1) toward another policy of the same shape."""
    target_state = target.state_dict()
    if {name: tensor.shape for name, tensor in target_state.items()} != {
        name: tensor.shape for name, tensor in policy.state_dict().items()
    }:
        raise SystemExit("the two policies have different shapes, so their weights cannot be interpolated")
    for name, tensor in policy.state_dict().items():
        tensor.lerp_(target_state[name], fraction)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--checkpoint", type=Path, help="checkpoint of the supervised training; without a source, random weights"
    )
    sources.add_argument("--policy", type=Path, help="policy folder that reinforcement learning wrote")
    parser.add_argument("--toward", type=Path, help="policy folder to interpolate --policy toward")
    parser.add_argument("--share", type=float, default=0.3, help="weight of --toward in the interpolation, 0 to 1")
    parser.add_argument("--edition", required=True, help="edition name to write into memagent.json")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.toward is not None and (arguments.policy is None or not 0 <= arguments.share <= 1):
        parser.error("--toward needs --policy, and a --share between 0 and 1")
    if not (arguments.out / "tokenizer.json").is_file() or not (arguments.out / "templates").is_dir():
        parser.error(f"{arguments.out} has no tokenizer.json and templates/: copy them from a policy folder first")
    source = arguments.policy or arguments.checkpoint
    policy = make_policy() if source is None else load_policy(source)
    if arguments.toward is not None:
        move_toward(policy, load_policy(arguments.toward), arguments.share)
    release(policy, arguments.out, arguments.edition)


if __name__ == "__main__":
    main()
