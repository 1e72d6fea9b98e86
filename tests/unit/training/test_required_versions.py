"""Packages of other versions are refused before anything is trained."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest
from support.command_line import invoke

from memagent_training import required_versions
from memagent_training.training_errors import TrainingError

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_another_version_of_a_package_is_refused_with_the_command_that_installs_the_right_one() -> None:
    required_versions.require_version("packaging>=1")
    required_versions.require_version("memagent-no-such-package>=1")
    with pytest.raises(
        TrainingError, match=r"packaging \S+ is installed, and this was written for packaging<1"
    ) as raised:
        required_versions.require_version("packaging<1")
    assert raised.value.hint == 'Run: pip install "packaging<1"'


def test_the_commands_refuse_another_trl_than_is_installed_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert '"trl>=1.16,<1.17"' in PYPROJECT.read_text("utf-8"), "the commands check for this one"
    installed = importlib.metadata.version
    monkeypatch.setattr(required_versions, "version", lambda name: "9.0" if name == "trl" else installed(name))
    for command in (["train", "runs.sqlite", "--model", "embedded", "--dry-run"], ["rl", "--model", "embedded"]):
        done = invoke(*command)
        assert done.exit_code != 0 and "trl 9.0 is installed" in done.stderr, done.output


@pytest.mark.parametrize(("module", "package"), [("verl_agent_loop", "verl"), ("verifiers_environment", "verifiers")])
def test_the_engines_refuse_other_versions(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(required_versions, "version", lambda name: "99.0")
    with pytest.raises(TrainingError, match=f"{package} 99.0 is installed"):
        importlib.import_module(f"memagent_training.engines.{module}")
