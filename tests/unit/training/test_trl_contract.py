"""What the trainer takes for granted of TRL. When TRL moves, the test that fails is named after what moved."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from memagent_training.job.config import _FIXED, MultiConvDAPOConfig
from memagent_training.job.trainer import MultiConvDAPOTrainer

LOSS = inspect.getsource(GRPOTrainer._compute_loss)
INIT = inspect.getsource(GRPOTrainer.__init__)


def keys_read(source: str) -> tuple[set[str], set[str]]:
    """The inputs that a method needs, and those that it takes where they are given."""
    optional = set(re.findall(r'inputs\.get\("(\w+)"', source)) | set(re.findall(r'"(\w+)" not in inputs', source))
    return set(re.findall(r'inputs\["(\w+)"\]', source)) - optional, optional


def test_the_loss_needs_no_other_inputs() -> None:
    needed, _ = keys_read(LOSS)
    conditional = {"ref_per_token_logps", "importance_sampling_ratio"}  # with beta, and with vLLM in the trainer
    given = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    assert needed - conditional == given, f"TRL's loss needs other inputs: {needed ^ (given | conditional)}"


@pytest.mark.parametrize("name", ["tool_mask", "old_per_token_logps"])
def test_the_loss_takes_what_carries_our_weights_and_ratios(name: str) -> None:
    assert name in keys_read(LOSS)[1], f"TRL's loss reads no {name} any more"


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the mask is a product with tool_mask", r'completion_mask \* inputs\["tool_mask"\]'),
        ("advantages may be (B, T)", r"if advantages\.dim\(\) == 1"),
        (
            "the dapo loss is a masked sum over a denominator",
            r"loss = \(per_token_loss \* mask\)\.sum\(\) / normalizer",
        ),
        (
            "the denominator is num_items_in_batch over processes",
            r'normalizer = inputs\["num_items_in_batch"\]\.clamp\(min=1\.0\) / self\.accelerator\.num_processes',
        ),
        (
            "the denominator is otherwise scaled by what is 1 here",
            r"normalizer \* self\.current_gradient_accumulation_steps / self\.args\.steps_per_generation",
        ),
        ("delta is a cap on the ratio", r"coef_1 = torch\.clamp\(coef_1, max=self\.args\.delta\)"),
        ("k3 is what beta multiplies", r"torch\.exp\(ref_per_token_logps - per_token_logps\) - \(ref_per_token_logps"),
        ("a conversation's ratio divides by its mask's sum", r"mask\.sum\(-1\)\.clamp\(min=1\.0\)"),
        ("the entropy bonus can be switched off", r"if self\._entropy_bonus_enabled:"),
    ],
)
def test_the_loss_is_written_as_it_was(what: str, pattern: str) -> None:
    assert re.search(pattern, LOSS), f"No longer so in TRL's _compute_loss: {what}"


@pytest.mark.parametrize(
    "name", ["training_step", "get_train_dataloader", "_get_per_token_logps_and_entropies", "_save_checkpoint",
             "_load_optimizer_and_scheduler", "floating_point_ops", "_compute_loss", "compute_loss"],
)  # fmt: skip
def test_the_methods_that_are_replaced_or_called_exist(name: str) -> None:
    assert callable(getattr(GRPOTrainer, name, None)), f"GRPOTrainer has no {name} any more"


@pytest.mark.parametrize("name", ["_compute_loss", "compute_loss", "_prepare_inputs", "log"])
def test_the_rest_is_left_to_trl(name: str) -> None:
    assert name not in vars(MultiConvDAPOTrainer)


@pytest.mark.parametrize(
    "name", ["_entropy_bonus_enabled", "_metrics", "_tokenizer", "beta", "epsilon_low", "epsilon_high",
             "importance_sampling_level", "ref_model"],
)  # fmt: skip
def test_the_attributes_that_are_read_exist(name: str) -> None:
    assert f"self.{name} = " in INIT, f"GRPOTrainer.__init__ sets no {name} any more"


@pytest.mark.parametrize(("name", "position"), [("model", 0), ("logits_to_keep", 3)], ids=["model", "logits_to_keep"])
def test_log_probs_are_asked_for_by_position(name: str, position: int) -> None:
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)[1:]
    assert parameters[position] == name


def test_log_probs_entropies_and_an_auxiliary_loss_are_expected_back() -> None:
    assert re.search(r"per_token_logps, entropies, aux_loss = self\._get_per_token_logps_and_entropies\(", LOSS)


@pytest.mark.parametrize("name", sorted(_FIXED))
def test_options_that_are_fixed_exist(name: str) -> None:
    """A renamed option would be silently on."""
    assert name in {each.name for each in dataclasses.fields(GRPOConfig)}, f"GRPOConfig has no {name} any more"


def test_every_option_that_changes_the_loss_is_set_here_or_fixed() -> None:
    """TRL's defaults drift; an option that the loss reads must not be one of them."""
    fields = {each.name for each in dataclasses.fields(GRPOConfig)}
    of_other_losses = {
        name for name in fields if name.startswith(("sapo_", "vespo_", "entropy_coef_", "entropy_target"))
    }
    of_generation = {name for name in fields if name.startswith("vllm_")}
    read = set(re.findall(r"self\.args\.(\w+)", LOSS)) | set(re.findall(r"self\.(\w+)", LOSS)) & fields
    unset = read - set(MultiConvDAPOConfig.__annotations__) - set(_FIXED) - of_other_losses - of_generation
    # The window of a mixture's balancing loss is the model's own; max_completion_length is of another loss.
    assert unset <= {"router_aux_loss_coef", "max_completion_length", "epsilon_high"}, f"new in TRL's loss: {unset}"
