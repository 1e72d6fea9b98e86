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


def asked(tmp_path: Path, recipe: str, *, small: bool) -> list[list[str]]:
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
    script = ROOT / "training/recipes" / recipe / "make.sh"
    subprocess.run([script, tmp_path / "made"], env=environment, check=True, capture_output=True)
    return [line.split()[1:] for line in commands.read_text().splitlines()]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("recipe", ["embedded", "english"])
def test_every_command_of_a_recipe_and_each_of_its_options_are_there(recipe: str, small: bool, tmp_path: Path) -> None:
    reference = (ROOT / "docs/commands.md").read_text("utf-8")
    commands = asked(tmp_path, recipe, small=small)
    assert len(commands) > 1
    for module, *words in commands:
        if module == "memagent_graph":
            known = set(re.findall(r"--[\w-]+", reference))
        else:
            source = (ROOT / "training" / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
            known = set(re.findall(r'"(--[\w-]+)"', source))
        assert {word for word in words if word.startswith("--")} <= known, (module, words)


@pytest.mark.parametrize(("recipe", "has_loops"), [("embedded", True), ("english", False)])
def test_a_rehearsal_takes_the_same_steps_without_a_server(recipe: str, has_loops: bool, tmp_path: Path) -> None:
    whole, small = (asked(tmp_path / name, recipe, small=name == "small") for name in ("whole", "small"))
    assert [command[:2] for command in whole] == [command[:2] for command in small]
    loops = [command for command in small if command[1] == "rl"]
    assert bool(loops) == has_loops
    assert all(command[command.index("--engine") + 1] == "local" for command in loops)
