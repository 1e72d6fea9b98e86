"""Unsupported package versions are refused before training starts, and TRL has the methods that training uses."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("trl")

from support.command_line import memagent
from trl import GRPOTrainer

from memagent_training import training_errors
from memagent_training.training_errors import TrainingError

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_unsupported_version_error_has_the_install_command() -> None:
    training_errors.require_version("packaging>=1")
    training_errors.require_version("memagent-no-such-package>=1")
    with pytest.raises(
        TrainingError, match=r"packaging \S+ is installed, and this was written for packaging<1"
    ) as refusal:
        training_errors.require_version("packaging<1")
    assert refusal.value.hint == 'Run: pip install "packaging<1"'


def test_commands_refuse_an_unsupported_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert '"trl>=1.16,<1.17"' in PYPROJECT.read_text("utf-8"), "the commands check for this one"
    original = importlib.metadata.version
    monkeypatch.setattr(training_errors, "version", lambda name: "9.0" if name == "trl" else original(name))
    for command in (["train", "runs.sqlite", "--model", "embedded", "--dry-run"], ["rl", "--model", "embedded"]):
        assert "trl 9.0 is installed" in memagent(*command, code=2).stderr


@pytest.mark.parametrize(("module", "package"), [("verl_agent_loop", "verl"), ("verifiers_environment", "verifiers")])
def test_engines_refuse_unsupported_versions(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_errors, "version", lambda name: "99.0")
    with pytest.raises(TrainingError, match=f"{package} 99.0 is installed"):
        importlib.import_module(f"memagent_training.engines.{module}")


# If a TRL release renames a method, the failing test has its name.


@pytest.mark.parametrize(
    "name", ["training_step", "get_train_dataloader", "create_optimizer", "_save_checkpoint",
             "_load_optimizer_and_scheduler", "floating_point_ops", "compute_loss_context_manager"],
)  # fmt: skip
def test_trl_has_the_methods_that_training_overrides_or_calls(name: str) -> None:
    assert callable(getattr(GRPOTrainer, name, None)), f"GRPOTrainer has no {name} any more"
