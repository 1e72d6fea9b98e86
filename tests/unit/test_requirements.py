"""The installed dependencies, and the commands that install extras."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from memagent_graph.errors import make_install_command

ROOT = Path(__file__).parents[2]


def test_installed_dependencies_support_the_oldest_promised_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    requirements = {
        distribution.metadata["Name"]: distribution.metadata.get("Requires-Python") or ""
        for distribution in distributions()
    }
    assert {name: need for name, need in requirements.items() if oldest not in SpecifierSet(need)} == {}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "mine[serve]"'),
        ({"url": "file:///src/mine", "dir_info": {"editable": True}}, 'pip install -e ".[serve]", in the folder'),
        ({"url": "file:///src/mine", "dir_info": {}}, 'pip install ".[serve]", in the folder'),
        ({"url": "file:///a%20b/mine-1.whl", "archive_info": {}}, 'pip install "mine-1.whl[serve]"'),
        ({"url": "https://host/m", "vcs_info": {"vcs": "git"}}, 'pip install "mine[serve] @ git+https://host/m"'),
    ],
)
def test_an_extra_is_installed_from_the_origin_of_the_package(origin: Any, command: str, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "mine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert make_install_command("serve", "mine").startswith(command)
