"""The trainer's loss and gradients are those of the plain-torch example, however the step is split and laid out.

On runs that branch and merge, and with rewards of single conversations: test_every_strategy_is_trained_on.py.
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
"""Every layout with two budgets, with checkpointing and without. That a layout gives the log-probs and gradients of one
row at a time and that splitting changes nothing is in test_packing.py."""
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
# Trainers take a second each to make, so ranks share the cases out.
CASES_OF_RANKS = {2: [*SPLIT_CASES[::2], *VARIANT_CASES], 3: SPLIT_CASES[1::2]}


def settings_in_the_example(config: MultiConvDAPOConfig) -> multi_conv_dapo.Settings:
    """The trainer's settings, as the example has them."""
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
def test_the_examples_presets_are_the_trainers(preset: str, tmp_path: Path) -> None:
    theirs = load_preset(preset, output_dir=str(tmp_path), use_cpu=True, bf16=False, importance_cap=None)
    assert multi_conv_dapo.PRESETS[preset] == settings_in_the_example(theirs)


class Reference:
    """The example on the groups of a step, at given weights."""

    def __init__(self, folder: Path, groups: list[RolloutGroup]) -> None:
        self.groups = groups
        self.initial = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        self._old: dict[tuple[str, float], dict[tuple[str, int], Any]] = {}

    def old(self, config: MultiConvDAPOConfig) -> dict[tuple[str, int], Any]:
        """Each conversation's log-probs before the step; computed once for all cases that share them."""
        which = (config.old_logprobs, config.temperature)
        if which not in self._old:
            self._old[which] = self._compute_old(config)
        return self._old[which]

    def _compute_old(self, config: MultiConvDAPOConfig) -> dict[tuple[str, int], Any]:
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

    def step(self, config: MultiConvDAPOConfig, number: int, weights: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Loss and gradients of the groups that the schedule puts into the step."""
        schedule = Schedule(
            self.groups, config.advantage_settings, config.groups_per_step, config.seed, Layout.PADDED, 4000, 1
        )
        names = {row.group_index for row in schedule.get_step(number).rows}
        order = schedule.split_pass(number // schedule.steps_per_pass)[number % schedule.steps_per_pass]
        assert names
        model = copy.deepcopy(self.initial)
        model.load_state_dict(weights, strict=True)
        loss = multi_conv_dapo.compute_step_loss(
            model,
            order,
            settings_in_the_example(config),
            old=self.old(config),
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
        loss, gradients = reference.step(config, number, step["weights"])
        assert step["loss"] == pytest.approx(loss, abs=tolerance), (case, number)
        assert step["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = (step["gradients"][name] - gradient).abs().max().item()
            assert difference <= tolerance, (case, number, name)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(map(str, [case["preset"], *case["changes"].values()]))
)
def test_loss_and_gradients_of_one_process_are_the_examples(
    case: dict[str, Any], world, reference: Reference, tmp_path: Path
) -> None:
    assert_equal(reference, case, training_world.run_case(world[0], case, tmp_path), tmp_path)


def test_the_cases_reach_the_clip_bounds(world, tmp_path: Path) -> None:
    """Otherwise equality would say little: ratios leave the clip's bounds, micro-batches are many, groups differ."""
    case = {"preset": "memagent-paper", "changes": {"delta": 1.3}}
    steps = training_world.run_case(world[0], case, tmp_path)
    assert steps[1]["log"]["clip_ratio/low_mean"] > 0 < steps[1]["log"]["clip_ratio/high_mean"]
    assert steps[1]["log"]["clip_ratio/dual_mean"] > 0 < steps[1]["log"]["kl"]
    turns = {len(rollout.conversations_K) for group in world[1] for rollout in group.rollouts_G}
    assert turns >= {1, 2, 3, 4}


def launch(processes: int, folder: Path, output: Path, cases: list[dict[str, Any]], **more: str) -> None:
    """Run the cases on several gloo ranks."""
    script = ROOT / "tests" / "support" / "training_world.py"
    for rank in run_ranks([sys.executable, script, folder, output, *map(json.dumps, cases)], processes, **more):
        assert rank.returncode == 0, rank.stderr[-4000:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks(
    ranks: int,
    world,
    reference: Reference,
    tmp_path: Path,
    size: Callable[[int, int], int],
) -> None:
    """Every rank ends up with the gradients of the whole step, and with the same ones."""
    cases = CASES_OF_RANKS[ranks][:: size(5, 1)]
    launch(ranks, world[0], tmp_path, cases)
    steps_of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for case in cases:
        text = json.dumps(case)
        assert_equal(reference, case, steps_of_ranks[0][text], tmp_path)
        for other in steps_of_ranks[1:]:
            for ours, theirs in zip(steps_of_ranks[0][text], other[text], strict=True):
                assert all(
                    torch.equal(gradient, theirs["gradients"][name]) for name, gradient in ours["gradients"].items()
                )


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def test_loss_and_gradients_with_fsdp2_are_the_examples(
    world, reference: Reference, tmp_path: Path, size: Callable[[int, int], int]
) -> None:
    """Weights, gradients and the reference model lie in halves on two ranks."""
    cases = [
        {"preset": preset, "changes": {"layout": layout.value, "token_budget": 90}}
        for preset, layout in itertools.product(PRESETS, Layout)
    ][:: size(3, 1)]
    launch(2, world[0], tmp_path, cases, **FSDP2)
    steps_of_cases = torch.load(tmp_path / "0.pt", weights_only=False)
    for case in cases:
        steps = steps_of_cases[json.dumps(case)]
        assert all(step["is_sharded"] for step in steps)
        assert_equal(reference, case, steps, tmp_path, tolerance=1e-4)
