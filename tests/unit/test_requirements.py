"""What the constraints file pins, as it is installed here."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def test_what_is_installed_runs_on_the_oldest_python_that_is_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    needs = {each.metadata["Name"]: each.metadata.get("Requires-Python") or "" for each in distributions()}
    assert {name: need for name, need in needs.items() if oldest not in SpecifierSet(need)} == {}
