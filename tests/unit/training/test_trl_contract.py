"""What the trainer takes for granted of TRL. When TRL moves, the test that fails is named after what moved."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from memagent_training.job.config import FIXED


@pytest.mark.parametrize(
    "name", ["training_step", "get_train_dataloader", "create_optimizer", "_save_checkpoint",
             "_load_optimizer_and_scheduler", "floating_point_ops", "compute_loss_context_manager"],
)  # fmt: skip
def test_the_methods_that_are_replaced_or_called_exist(name: str) -> None:
    assert callable(getattr(GRPOTrainer, name, None)), f"GRPOTrainer has no {name} any more"


@pytest.mark.parametrize("name", sorted(FIXED))
def test_options_that_are_fixed_exist(name: str) -> None:
    """A renamed option would be silently on."""
    assert name in {field.name for field in dataclasses.fields(GRPOConfig)}, f"GRPOConfig has no {name} any more"
