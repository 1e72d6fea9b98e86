"""The scripts that rebuild the policies: full and small runs use only existing commands and options."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUBS = {"python": 'echo "$@" >> "$COMMANDS"', "sha256sum": ":"}
"""Stub programs: an interpreter that records its arguments, and a checksum command that accepts every file."""


def record_commands(tmp_path: Path, script: str, *, small: bool) -> list[list[str]]:
    """Run a script, and return the commands that it gave to Python."""
    tmp_path.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    commands = tmp_path / "commands"
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"),
        "COMMANDS": str(commands), "SMALL": "1" if small else "",
    }  # fmt: skip
    (tmp_path / "made" / "corpus").mkdir(parents=True)
    (tmp_path / "made" / "corpus" / "train.txt").touch()
    command = [ROOT / "training/recipes" / script, tmp_path / "made", "1"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return [line.split()[1:] for line in commands.read_text().splitlines()]


@pytest.mark.parametrize(
    ("script", "has_loops"), [("embedded/make.sh", True), ("english/make.sh", False), ("english/loop.sh", True)]
)
def test_commands_and_options_exist_and_a_small_run_has_the_same_steps(
    script: str, has_loops: bool, tmp_path: Path
) -> None:
    command_reference = (ROOT / "docs/commands.md").read_text("utf-8")
    full, small = (record_commands(tmp_path / name, script, small=name == "small") for name in ("full", "small"))
    assert len(full) > 1
    for module, *arguments in [*full, *small]:
        if module == "memagent_graph":
            options = set(re.findall(r"--[\w-]+", command_reference))
        else:
            source = (ROOT / "training" / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
            options = set(re.findall(r'"(--[\w-]+)"', source))
        assert {argument for argument in arguments if argument.startswith("--")} <= options, (module, arguments)
    assert [command[:2] for command in full] == [command[:2] for command in small]
    rl_commands = [command for command in small if command[1] == "rl"]
    assert bool(rl_commands) == has_loops
    assert all(command[command.index("--engine") + 1] == "local" for command in rl_commands)
