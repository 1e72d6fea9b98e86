"""The trainer's loss and gradients equal those of the plain-torch example for every layout, split and rank count.

test_every_strategy_is_trained_on.py compares them on runs with branches and with rewards of conversations.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs import run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import multi_conv_dapo  # noqa: E402
from made_rollouts import make_example_settings  # noqa: E402
from support import training_world  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from memagent_training.algorithm.planner import Layout  # noqa: E402
from memagent_training.algorithm.schedule import Schedule  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.job.config import MultiConvDAPOConfig  # noqa: E402
from memagent_training.job.job_settings import list_presets, load_preset  # noqa: E402

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-6

PRESETS = ("memagent-paper", "dapo")
SPLITS = [
    {"layout": "padded", "token_budget": 40, "gradient_checkpointing": False},
    {"layout": "padded", "token_budget": 4000, "gradient_checkpointing": True},
    {"layout": "packed", "token_budget": 90, "gradient_checkpointing": False},
    {"layout": "packed", "token_budget": 40, "gradient_checkpointing": True},
    {"layout": "prefix_tree", "token_budget": 90, "gradient_checkpointing": False},
    {"layout": "prefix_tree", "token_budget": 40, "gradient_checkpointing": True},
]
"""Every layout with two budgets, with and without checkpointing. test_packing.py checks that layouts and splits do not
change log-probs and gradients."""
VARIANTS: list[dict[str, Any]] = [
    {"loss_weights": "conversation_mean", "importance_cap": 1.1, "mask_truncated_completions": True, "delta": 1.3},
    {"importance_sampling_level": "sequence", "old_logprobs": "logged", "temperature": 1.3,
     "logged_after_temperature": True},
    {"importance_sampling_level": "sequence", "loss_weights": "rollout_mean", "entropy_coef": 0.01},
    {"baseline": "leave_one_out", "overlong_max_length": 8, "overlong_cache_length": 4, "old_logprobs": "logged"},
    {"temperature": 0.7, "importance_cap": None, "drop_zero_variance": True},
    {"temperature": 1.3, "importance_cap": 1.5, "logged_after_temperature": True, "beta": 0.01, "kl_clamp": 1e-4},
]  # fmt: skip
SPLIT_CASES = [
    {"preset": PRESETS[(number // 2 + number // 3) % 2], "changes": split} for number, split in enumerate(SPLITS)
]
"""Both presets with every layout, and both choices of checkpointing."""
VARIANT_CASES = [
    {"preset": preset, "changes": {"layout": layout, "token_budget": 60} | variant}
    for preset, variant, layout in zip(
        itertools.cycle(PRESETS), VARIANTS, itertools.cycle(["padded", "packed", "prefix_tree"]), strict=False
    )
]
CASES = [*SPLIT_CASES, *VARIANT_CASES]
# A trainer takes a second to make, so the tests with 2 and 3 ranks share the cases.
CASES_OF_RANKS = {2: [*SPLIT_CASES[::2], *VARIANT_CASES], 3: SPLIT_CASES[1::2]}


def convert_settings(config: MultiConvDAPOConfig) -> multi_conv_dapo.Settings:
    """Convert the trainer's settings to those of the example."""
    return make_example_settings(
        config.advantage_settings,
        clip_low=config.epsilon,
        clip_high=config.epsilon_high,
        dual_clip=config.delta,
        importance_level=config.importance_sampling_level,
        importance_cap=config.importance_cap,
        kl_coef=config.beta,
        kl_clamp=math.inf if config.kl_clamp is None else config.kl_clamp,
        entropy_coef=config.entropy_coef,
        temperature=config.temperature,
    )


@pytest.mark.parametrize("preset", list_presets())
def test_presets_of_the_example_equal_those_of_the_trainer(preset: str, tmp_path: Path) -> None:
    config = load_preset(preset, output_dir=str(tmp_path), use_cpu=True, bf16=False, importance_cap=None)
    assert multi_conv_dapo.PRESETS[preset] == convert_settings(config)


class Reference:
    """The example on the groups of a step, at given weights."""

    def __init__(self, folder: Path, groups: list[RolloutGroup]) -> None:
        self.groups = groups
        self.initial = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        self._old_logprobs: dict[tuple[str, float], dict[tuple[str, int], Any]] = {}

    def get_old_logprobs(self, config: MultiConvDAPOConfig) -> dict[tuple[str, int], Any]:
        """Return each conversation's log-probs before the step, computed once for all cases with equal settings."""
        key = (config.old_logprobs, config.temperature)
        if key not in self._old_logprobs:
            self._old_logprobs[key] = self._compute_old_logprobs(config)
        return self._old_logprobs[key]

    def _compute_old_logprobs(self, config: MultiConvDAPOConfig) -> dict[tuple[str, int], Any]:
        conversations = {
            (rollout.run_id, k): row
            for group in self.groups
            for rollout in group.rollouts_G
            for k, row in enumerate(rollout.conversations_K)
        }
        if config.old_logprobs == "logged":
            return {key: torch.tensor(row.logprobs_T) for key, row in conversations.items()}
        with torch.no_grad():
            return {
                key: multi_conv_dapo.forward(self.initial, row, config.temperature)[0]
                for key, row in conversations.items()
            }

    def compute(self, config: MultiConvDAPOConfig, step: int, weights: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return loss and gradients of the groups that the schedule puts into the step."""
        schedule = Schedule(
            self.groups, config.advantage_settings, config.groups_per_step, config.seed, Layout.PADDED, 4000, 1
        )
        names = {row.group_index for row in schedule.get_step(step).rows}
        order = schedule.split_pass(step // schedule.steps_per_pass)[step % schedule.steps_per_pass]
        assert names
        model = copy.deepcopy(self.initial)
        model.load_state_dict(weights, strict=True)
        loss = multi_conv_dapo.compute_step_loss(
            model,
            order,
            convert_settings(config),
            old=self.get_old_logprobs(config),
            reference=self.initial if config.beta else None,
        )
        loss.backward()
        return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def reference(world) -> Reference:
    return Reference(*world)


def assert_equal(
    reference: Reference,
    case: dict[str, Any],
    steps: list[dict[str, Any]],
    tmp_path: Path,
    tolerance: float = TOLERANCE,
) -> None:
    config = training_world.make_config(case, tmp_path)
    assert len(steps) == 2
    for number, step in enumerate(steps):
        loss, gradients = reference.compute(config, number, step["weights"])
        assert step["loss"] == pytest.approx(loss, abs=tolerance), (case, number)
        assert step["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = (step["gradients"][name] - gradient).abs().max().item()
            assert difference <= tolerance, (case, number, name)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(map(str, [case["preset"], *case["changes"].values()]))
)
def test_loss_and_gradients_of_one_process_equal_the_example(
    case: dict[str, Any], world, reference: Reference, tmp_path: Path
) -> None:
    assert_equal(reference, case, training_world.run_case(world[0], case, tmp_path), tmp_path)


def test_cases_exceed_the_clip_bounds(world, tmp_path: Path) -> None:
    """Ratios exceed the clip bounds, and rollouts have different numbers of conversations."""
    case = {"preset": "memagent-paper", "changes": {"delta": 1.3}}
    steps = training_world.run_case(world[0], case, tmp_path)
    assert steps[1]["log"]["clip_ratio/low_mean"] > 0 < steps[1]["log"]["clip_ratio/high_mean"]
    assert steps[1]["log"]["clip_ratio/dual_mean"] > 0 < steps[1]["log"]["kl"]
    conversation_counts = {len(rollout.conversations_K) for group in world[1] for rollout in group.rollouts_G}
    assert conversation_counts >= {1, 2, 3, 4}


def run_on_ranks(ranks: int, folder: Path, output: Path, cases: list[dict[str, Any]], **environment: str) -> None:
    """Run the cases on several gloo ranks."""
    script = ROOT / "tests" / "support" / "training_world.py"
    for rank in run_ranks([sys.executable, script, folder, output, *map(json.dumps, cases)], ranks, **environment):
        assert rank.returncode == 0, rank.stderr[-4000:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_of_several_ranks_equal_the_example(
    ranks: int, world, reference: Reference, tmp_path: Path, size: Callable[[int, int], int]
) -> None:
    """All ranks end with equal gradients, which are those of the complete step."""
    cases = CASES_OF_RANKS[ranks][:: size(5, 1)]
    run_on_ranks(ranks, world[0], tmp_path, cases)
    steps_of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for case in cases:
        case_key = json.dumps(case)
        assert_equal(reference, case, steps_of_ranks[0][case_key], tmp_path)
        for other in steps_of_ranks[1:]:
            for step, other_step in zip(steps_of_ranks[0][case_key], other[case_key], strict=True):
                assert all(
                    torch.equal(gradient, other_step["gradients"][name]) for name, gradient in step["gradients"].items()
                )


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def test_loss_and_gradients_with_fsdp2_equal_the_example(
    world, reference: Reference, tmp_path: Path, size: Callable[[int, int], int]
) -> None:
    """Weights, gradients and the reference model are sharded over two ranks."""
    cases = [
        {"preset": preset, "changes": {"layout": layout.value, "token_budget": 90}}
        for preset, layout in itertools.product(PRESETS, Layout)
    ][:: size(3, 1)]
    run_on_ranks(2, world[0], tmp_path, cases, **FSDP2)
    steps_of_cases = torch.load(tmp_path / "0.pt", weights_only=False)
    for case in cases:
        steps = steps_of_cases[json.dumps(case)]
        assert all(step["is_sharded"] for step in steps)
        assert_equal(reference, case, steps, tmp_path, tolerance=1e-4)
