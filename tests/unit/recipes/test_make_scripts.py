"""The scripts that make the policies again: each step of a whole run and of a rehearsal is a command that there is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUBS = {"python": 'echo "$@" >> "$COMMANDS"', "sha256sum": ":"}
"""Instead of the interpreter, one that writes down what it is asked to do; the corpus is there."""


def commands_of(tmp_path: Path, script: str, *, small: bool) -> list[list[str]]:
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
def test_every_command_and_option_is_there_and_a_rehearsal_takes_the_same_steps_without_a_server(
    script: str, has_loops: bool, tmp_path: Path
) -> None:
    reference = (ROOT / "docs/commands.md").read_text("utf-8")
    whole, small = (commands_of(tmp_path / name, script, small=name == "small") for name in ("whole", "small"))
    assert len(whole) > 1
    for module, *words in [*whole, *small]:
        if module == "memagent_graph":
            options = set(re.findall(r"--[\w-]+", reference))
        else:
            source = (ROOT / "training" / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
            options = set(re.findall(r'"(--[\w-]+)"', source))
        assert {word for word in words if word.startswith("--")} <= options, (module, words)
    assert [command[:2] for command in whole] == [command[:2] for command in small]
    loops = [command for command in small if command[1] == "rl"]
    assert bool(loops) == has_loops
    assert all(command[command.index("--engine") + 1] == "local" for command in loops)
