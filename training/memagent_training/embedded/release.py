"""Weights as the model folder that ships: in bfloat16, with the configuration that transformers and vLLM read.

python -m memagent_training.embedded.release --edition 1 --checkpoint last.pt --out memagent_graph/embedded
python -m memagent_training.embedded.release --edition 2 --policy rl-policy --out memagent_graph/embedded
python -m memagent_training.embedded.release --edition 2 --policy rl-policy --toward $FIRST --out ...

The last goes back a part of the way to the policy that a loop began with, in weights: what reinforcement learning
taught stays, and much of what it broke elsewhere heals (linear interpolation towards initialization, arXiv 2406.16768).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from memagent_training.embedded.policy_network import ModelShape, Policy
from memagent_training.embedded.tokenizer import SPECIAL_TOKENS, VOCABULARY

CONTEXT_WINDOW = 1024
BUDGETS = {
    "context_window": CONTEXT_WINDOW,
    "chunk_tokens": 256,
    "memory_tokens": 48,
    "question_tokens": 96,
    "answer_tokens": 48,
    "boundary": "sentence",
    "on_invented": "keep_previous",
    "empty_memory": "none",
}


def special_id(token: str) -> int:
    """The id of a special token: they stand last in the vocabulary."""
    return VOCABULARY - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(token)


def model_config(shape: ModelShape) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM of this shape.

    The architecture is Qwen2's, but it ships as a Llama with attention biases, which computes the same: for the model
    type "qwen2" transformers and vLLM put Qwen2's own pre-tokenizer in the place of tokenizer.json's.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": True,
        "mlp_bias": False,
        "max_position_embeddings": CONTEXT_WINDOW,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": special_id("<|end|>"),
        "pad_token_id": special_id("<|pad|>"),
        "torch_dtype": "bfloat16",
    }


def as_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under Llama's names: Qwen2 has no bias on the attention's output, so Llama gets zeros there."""
    output = "self_attn.o_proj.weight"
    biases = {
        name.replace("weight", "bias"): tensor.new_zeros(tensor.shape[0])
        for name, tensor in weights.items()
        if name.endswith(output)
    }
    return {**biases, **weights}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def release(shape: ModelShape, weights: dict[str, Tensor], out: Path, edition: str = "1") -> None:
    """Write weights and configuration into a folder that already holds tokenizer and templates."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in as_llama(weights).items()}
    partial = out / "model.safetensors.partial"
    save_file(stored, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    write_json(out / "config.json", model_config(shape))
    generation = {"do_sample": False, "eos_token_id": special_id("<|end|>"), "pad_token_id": special_id("<|pad|>")}
    write_json(out / "generation_config.json", generation)
    write_json(out / "memagent.json", {**BUDGETS, "edition": edition})
    print(f"{sum(tensor.numel() for tensor in stored.values()):,} parameters written to {out}")


def load_policy(folder: Path) -> Policy:
    """The policy in a released folder, or one that reinforcement learning made of it, in float32."""
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    vocabulary, width = weights["model.embed_tokens.weight"].shape
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    inner = weights["model.layers.0.mlp.gate_proj.weight"].shape[0]
    biased = any(name.endswith("o_proj.bias") for name in weights)
    policy = Policy(ModelShape(vocabulary, width, inner, layers, output_bias=biased))
    policy.load_state_dict(weights)
    return policy


def between(policy: Policy, toward: Policy, share: float) -> Policy:
    """The policy whose weights are (1 - share) times one's and share times another's of the same shape."""
    one, other = policy.model.shape, toward.model.shape
    if replace(one, output_bias=False) != replace(other, output_bias=False):
        raise SystemExit(f"{one} and {other} have no weights between them; name policies of one shape")
    mixed = Policy(replace(one, output_bias=one.output_bias or other.output_bias))
    begin, end = policy.state_dict(), toward.state_dict()
    weights: dict[str, Tensor] = {}
    for name, tensor in mixed.state_dict().items():
        nothing = torch.zeros_like(tensor)  # a bias that one of them has not
        weights[name] = torch.lerp(begin.get(name, nothing), end.get(name, nothing), share)
    mixed.load_state_dict(weights)
    return mixed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, help="of the supervised training; without a source, random weights")
    source.add_argument("--policy", type=Path, help="a policy's folder, as reinforcement learning leaves it")
    parser.add_argument("--toward", type=Path, help="with --policy: a policy's folder to go back to by --share")
    parser.add_argument("--share", type=float, default=0.3, help="0: not at all; 1: all the way")
    parser.add_argument("--edition", required=True, help="what memagent.json calls it")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.toward is not None and (given.policy is None or not 0 <= given.share <= 1):
        parser.error("--toward wants --policy, and a --share between 0 and 1")
    if not (given.out / "tokenizer.json").is_file() or not (given.out / "templates").is_dir():
        parser.error(
            f"{given.out} has no tokenizer.json and templates/, which weights alone do not bring; copy a policy's"
        )
    if given.policy is not None:
        policy = load_policy(given.policy)
        if given.toward is not None:
            policy = between(policy, load_policy(given.toward), given.share)
        shape, weights = policy.model.shape, policy.state_dict()
    elif given.checkpoint is not None:
        state = torch.load(given.checkpoint, map_location="cpu", weights_only=True)
        shape, weights = ModelShape(**state["shape"]), state["model"]
    else:
        shape = ModelShape(VOCABULARY, 256, 512, 4)
        weights = Policy(shape).state_dict()
    release(shape, weights, given.out, given.edition)


if __name__ == "__main__":
    main()
