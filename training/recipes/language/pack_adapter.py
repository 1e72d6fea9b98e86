"""Pack trained adapters for the package: their sum, in bfloat16, with the base that it belongs to.

    python -m recipes.language.pack_adapter --from work/smollm2 --base-file SmolLM2-135M-Instruct.Q4_1.gguf \
        --to work/packed
    python -m recipes.language.pack_adapter --from memagent_graph/smollm2 work/loop/adapter \
        --scales 1 0.5 --rank 19 ...

A loop's adapter changes the policy that the loop started from, which has the shipped adapter merged: the policy after
the loop is the base with both. A scale below 1 goes only a part of the loop's way (arXiv 2406.16768 calls it linear
interpolation towards initialization).

Writes `adapter_model.safetensors` and `adapter_config.json` as PEFT does, and into `memagent.json` the SHA-256 of the
base's file: the adapter is useless on another base.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import save_file

from memagent_graph.policies.lora import load_adapter
from recipes.language.supervised import TARGETS

LARGEST_MB: Final = 12
_SCALE: Final = 2
"""What B A is multiplied with: `lora_alpha` over the rank."""
_PREFIX: Final = "base_model.model."
Factors: TypeAlias = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A (rank, in) and B (out, rank) of each weight's change, `_SCALE` B A."""


def release(
    sources: Sequence[Path], target: Path, base_file: Path, rank: int | None = None, scales: Sequence[float] = ()
) -> int:
    """Write the sum of adapters; its size in bytes.

    Args:
        sources: trainings' folders, whose newest checkpoint counts, or adapters as PEFT saves them.
        target: the package's folder, with `memagent.json`.
        base_file: the base's GGUF.
        rank: the sum is approximated by one of this rank; by default it is exact, of the sum of their ranks.
        scales: what each adapter is multiplied with; 1 if there are none.

    Raises:
        SystemExit: it is too large to ship, the target has no `memagent.json`, or the scales are not as many as the
            sources.
        PolicyError: an adapter cannot be read.
    """
    scales = scales or [1.0] * len(sources)
    if len(scales) != len(sources):
        raise SystemExit(f"{len(scales)} scales for {len(sources)} adapters: give one for each, in their order")
    profile = target / "memagent.json"
    if not profile.is_file():
        raise SystemExit(f"{target} has no memagent.json: copy one with the policy's budgets and templates there")
    factors = added([_factors(source, scale) for source, scale in zip(sources, scales, strict=True)])
    if rank is not None:
        factors = {name: approximated(a, b, rank) for name, (a, b) in factors.items()}
    rank = max(a.shape[0] for a, _ in factors.values())
    weights = {
        f"{_PREFIX}{name.removesuffix('.weight')}.lora_{half}.weight": value.to(torch.bfloat16).contiguous()
        for name, pair in factors.items()
        for half, value in zip("AB", pair, strict=True)
    }
    size: int = sum(value.nbytes for value in weights.values())
    if size > LARGEST_MB * 10**6:
        raise SystemExit(f"the adapter has {size / 1e6:.1f} MB, and at most {LARGEST_MB} are shipped: lower the rank")
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": rank, "lora_alpha": _SCALE * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(TARGETS),
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    values = json.loads(profile.read_text("utf-8")) | {"bases": [hashlib.sha256(base_file.read_bytes()).hexdigest()]}
    profile.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return size


def added(adapters: Sequence[Factors]) -> Factors:
    """Return the sum of adapters, exactly: the rank of each weight's change is the sum of theirs."""
    pairs_by_name: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for adapter in adapters:
        for name, pair in adapter.items():
            pairs_by_name.setdefault(name, []).append(pair)
    return {
        name: (torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], dim=1))
        for name, pairs in pairs_by_name.items()
    }


def approximated(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the nearest matrix to B A of at most this rank."""
    left, upper_b = torch.linalg.qr(b)
    right, upper_a = torch.linalg.qr(a.T)
    u, sizes, v = torch.linalg.svd(upper_b @ upper_a.T)
    roots = sizes[:rank].sqrt()
    return roots[:, None] * (v[:rank] @ right.T), left @ u[:, :rank] * roots


def _factors(source: Path, scale: float) -> Factors:
    """In float32, times `scale`, for multiplication with `_SCALE`."""
    if (source / "adapter_config.json").is_file():
        adapter = load_adapter(source)
        return {
            name: (a.float(), b.float() * (scale * adapter.scale / _SCALE)) for name, (a, b) in adapter.factors.items()
        }
    state: dict[str, Any] = torch.load(source / "last.pt", map_location="cpu", weights_only=True)
    halves = {name.replace(".default", "").removeprefix(_PREFIX): value for name, value in state["adapter"].items()}
    return {
        name.replace(".lora_A.", "."): (value.float(), halves[name.replace(".lora_A.", ".lora_B.")].float() * scale)
        for name, value in halves.items()
        if ".lora_A." in name
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", required=True, help="trainings, or adapters")
    parser.add_argument("--to", type=Path, required=True, help="the policy's folder, with memagent.json")
    parser.add_argument("--base-file", type=Path, required=True, help="the base's GGUF")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[], help="what each is multiplied with; 1 if left out"
    )
    parser.add_argument("--rank", type=int, help="of the result, if it is to be smaller than the sum of all")
    arguments = parser.parse_args()
    size = release(arguments.sources, arguments.to, arguments.base_file, arguments.rank, arguments.scales)
    print(f"{size / 1e6:.1f} MB in {arguments.to}")


if __name__ == "__main__":
    main()
