"""Adapters that are packed for the package change the base as the trained ones do together."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memagent_graph.policies.lora import load_adapter
from recipes.language import pack_adapter
from recipes.language.pack_adapter import approximated, release

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def adapter_in(folder: Path, rank: int, alpha: float) -> Path:
    """An adapter as PEFT saves one."""
    folder.mkdir()
    weights = {}
    for name in NAMES:
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, 24)
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(40, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "memagent.json").write_text('{"edition": "9"}')
    return folder


@pytest.fixture
def base_file(tmp_path):
    (tmp_path / "base.gguf").write_bytes(b"weights")
    return tmp_path / "base.gguf"


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are equal but for bfloat16."""
    return bool((found - expected).norm() < 0.01 * expected.norm())


def test_the_sum_of_adapters_is_shipped_with_its_base(tmp_path, target, base_file):
    torch.manual_seed(0)
    sources = [adapter_in(tmp_path / "first", 4, 8), adapter_in(tmp_path / "loop", 2, 6)]
    release(sources, target, base_file)
    packed, parts = load_adapter(target), [load_adapter(each) for each in sources]
    for name in NAMES:
        expected = sum(part.delta(f"{name}.weight") for part in parts)
        assert close(packed.delta(f"{name}.weight"), expected)
    assert json.loads((target / "adapter_config.json").read_text())["r"] == 6
    profile = json.loads((target / "memagent.json").read_text())
    assert profile == {"edition": "9", "bases": [hashlib.sha256(b"weights").hexdigest()]}


def test_only_a_part_of_an_adapter_can_be_added(tmp_path, target, base_file):
    torch.manual_seed(4)
    sources = [adapter_in(tmp_path / "first", 4, 8), adapter_in(tmp_path / "loop", 2, 6)]
    release(sources, target, base_file, scales=[1, 0.25])
    packed, first, loop = (load_adapter(each) for each in (target, *sources))
    for name in NAMES:
        assert close(packed.delta(f"{name}.weight"), first.delta(f"{name}.weight") + loop.delta(f"{name}.weight") / 4)


def test_scales_without_an_adapter_are_refused(tmp_path, target, base_file):
    with pytest.raises(SystemExit, match="2 scales for 1 adapters: give one for each"):
        release([adapter_in(tmp_path / "first", 4, 8)], target, base_file, scales=[1, 0.5])


def test_a_folder_without_a_profile_is_refused(tmp_path, base_file):
    with pytest.raises(SystemExit, match=r"has no memagent\.json: copy one"):
        release([adapter_in(tmp_path / "first", 4, 8)], tmp_path / "elsewhere", base_file)
    assert not (tmp_path / "elsewhere").exists()


def test_a_shipped_adapter_that_is_packed_again_stays_the_same(tmp_path, target, base_file):
    release([adapter_in(tmp_path / "first", 4, 8)], target, base_file)
    before = (target / "adapter_model.safetensors").read_bytes()
    release([target], target, base_file)
    assert (target / "adapter_model.safetensors").read_bytes() == before


def test_a_trainings_newest_checkpoint_is_packed(tmp_path, target, base_file):
    torch.manual_seed(1)
    a, b = torch.randn(4, 24), torch.randn(40, 4)
    name = f"base_model.model.{NAMES[0]}"
    state = {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
    torch.save({"adapter": state}, tmp_path / "last.pt")
    release([tmp_path], target, base_file)
    assert close(load_adapter(target).delta(f"{NAMES[0]}.weight"), 2 * b @ a)


def test_of_a_lower_rank_the_nearest_is_shipped(tmp_path, target, base_file):
    torch.manual_seed(2)
    sources = [adapter_in(tmp_path / "first", 4, 8), adapter_in(tmp_path / "loop", 2, 4)]
    release(sources, target, base_file, rank=5)
    packed = load_adapter(target)
    for name in NAMES:
        whole = sum(load_adapter(each).delta(f"{name}.weight") for each in sources)
        u, sizes, v = torch.linalg.svd(whole, full_matrices=False)
        assert close(packed.delta(f"{name}.weight"), u[:, :5] * sizes[:5] @ v[:5])
        assert packed.factors[f"{name}.weight"][0].shape == (5, 24)


def test_an_approximation_of_the_full_rank_is_exact():
    torch.manual_seed(3)
    a, b = torch.randn(6, 24, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    left, right = approximated(a, b, 6)
    assert torch.allclose(right @ left, b @ a)


def test_what_is_too_large_is_not_shipped(tmp_path, target, base_file, monkeypatch):
    monkeypatch.setattr(pack_adapter, "LARGEST_MB", 0.001)
    with pytest.raises(SystemExit, match=r"MB, and at most 0.001 are shipped: lower the rank"):
        release([adapter_in(tmp_path / "first", 8, 16)], target, base_file)
    assert not (target / "adapter_model.safetensors").exists()
