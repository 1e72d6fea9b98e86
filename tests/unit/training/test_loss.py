"""Token loss and gradient equal TRL's for all presets, and the formulas for what TRL does not have."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from trl import GRPOTrainer  # noqa: E402

from memagent_training.algorithm.loss import TokenLoss  # noqa: E402
from memagent_training.job.job_settings import list_presets, load_preset  # noqa: E402

B, T = 6, 11
VARIANTS: list[dict[str, Any]] = [
    {}, {"delta": 1.3}, {"delta": None}, {"beta": 0.1}, {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "delta": 1.5, "beta": 0.1, "importance_cap": 1.2},
]  # fmt: skip


def make_random_inputs(seed: int) -> dict[str, Any]:
    """Ratios beyond every bound, advantages of both signs, rows of different lengths, one with no learned token."""
    generator = torch.Generator().manual_seed(seed)

    def draw_normal(*shape: int, scale: float = 1.0) -> Any:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs_BT = -draw_normal(B, T).abs()
    loss_mask_BT = torch.arange(T) < torch.tensor([T, 7, 5, 3, 1, 0])[:, None]
    loss_mask_BT[0, ::3] = False
    return {
        "logprobs_BT": logprobs_BT.requires_grad_(),
        "old_BT": (logprobs_BT + draw_normal(B, T, scale=0.5)).detach(),
        "logged_BT": (logprobs_BT + draw_normal(B, T, scale=0.5)).detach(),
        "reference_BT": (logprobs_BT + draw_normal(B, T, scale=0.7)).detach(),
        "advantages_BT": draw_normal(B, 1).expand(B, T),
        "loss_mask_BT": loss_mask_BT,
    }


def compute_trl_loss(loss: TokenLoss, inputs: dict[str, Any], weights_BT: Any) -> Any:
    """Compute TRL's loss, with the loss weights as its mask and importance weights in its advantages."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs["logprobs_BT"], torch.zeros(B, T), None),
        args=SimpleNamespace(delta=loss.dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
        importance_sampling_level="sequence" if loss.per_conversation else "token",
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda tensor, **_: tensor, gather=lambda tensor: tensor),
        model=SimpleNamespace(training=True), loss_type="dapo", beta=loss.kl_coef, use_vllm=False,
        epsilon_low=loss.clip_low, epsilon_high=loss.clip_high, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    importance_BT = 1.0
    if loss.importance_cap is not None:
        importance_BT = (inputs["old_BT"] - inputs["logged_BT"]).exp().clamp(max=loss.importance_cap)
    scale = 1e6  # TRL clamps mask sums and denominators to at least 1
    empty_ids = torch.zeros(B, 0, dtype=torch.long)
    return GRPOTrainer._compute_loss(trainer, None, {
        "prompt_ids": empty_ids, "prompt_mask": empty_ids, "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T), "tool_mask": weights_BT * scale,
        "advantages": inputs["advantages_BT"] * importance_BT, "old_per_token_logps": inputs["old_BT"],
        "ref_per_token_logps": inputs["reference_BT"], "num_items_in_batch": torch.tensor(scale),
    })  # fmt: skip


@pytest.mark.parametrize("preset", list_presets())
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trl(preset: str, changes: dict[str, Any], seed: int, tmp_path: Any) -> None:
    options = {"report_to": "none", "use_cpu": True, "bf16": False}
    loss = load_preset(preset, output_dir=str(tmp_path), **options, **changes).token_loss
    inputs = make_random_inputs(seed)
    logprobs_BT, loss_mask_BT = inputs["logprobs_BT"], inputs["loss_mask_BT"]
    weights_BT = loss_mask_BT / loss_mask_BT.sum()
    trl_loss = compute_trl_loss(loss, inputs, weights_BT)
    (trl_gradient,) = torch.autograd.grad(trl_loss, logprobs_BT)
    our_loss = (loss(**inputs | ({} if loss.kl_coef else {"reference_BT": None})) * weights_BT).sum()
    (our_gradient,) = torch.autograd.grad(our_loss, logprobs_BT)
    assert our_loss.item() == pytest.approx(trl_loss.item(), abs=1e-6)
    assert torch.allclose(our_gradient, trl_gradient, rtol=0, atol=1e-6)
    assert our_gradient.abs().max() > 1e-3


def make_row(*values: float) -> Any:
    return torch.tensor([values], dtype=torch.float64)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    loss_mask_BT = torch.tensor([[True, True]])
    loss = TokenLoss(kl_coef=0.0)(
        make_row(5.0, 0.1), make_row(0.0, 0.0), make_row(0.0, 0.0), None, make_row(-2.0, -2.0), loss_mask_BT
    )
    assert loss.tolist() == [pytest.approx([6.0, 2 * math.exp(0.1)])]


def test_kl_is_bounded_only_with_kl_clamp() -> None:
    logprobs_BT, reference_BT = make_row(-9.0, -1.0), make_row(-1.0, -1.5)
    exact = [math.exp(8) - 8 - 1, math.exp(-0.5) + 0.5 - 1]
    assert TokenLoss(kl_clamp=None).compute_kl(logprobs_BT, reference_BT).tolist() == [pytest.approx(exact)]
    assert TokenLoss(kl_clamp=10.0).compute_kl(logprobs_BT, reference_BT).tolist() == [pytest.approx([10.0, exact[1]])]


@pytest.mark.parametrize("per_conversation", [False, True])
def test_masked_tokens_pass_no_gradient(per_conversation: bool) -> None:
    """Not even NaN, which a weight of 0 would not remove."""
    logprobs_BT = make_row(-1.0, 900.0).requires_grad_()
    loss = TokenLoss(kl_coef=0.0, dual_clip=None, per_conversation=per_conversation)
    loss_mask_BT = torch.tensor([[True, False]])
    loss(logprobs_BT, make_row(-1.0, -1.0), make_row(0.0, 0.0), None, make_row(-1.0, -1.0), loss_mask_BT)[
        :, 0
    ].sum().backward()
    assert logprobs_BT.grad.tolist() == [[1.0, 0.0]]
