"""Modules that import no heavy package that they do not need, so that they load quickly."""

from __future__ import annotations

import json
import subprocess
import sys

UNNEEDED = (
    ("memagent_graph", "memagent_graph.timeline rich langgraph openai tiktoken torch"),
    ("memagent_training.commands.rl_command memagent_training.commands.train_command", "torch transformers trl"),
    (
        "memagent_graph.tokenizers memagent_graph.documents memagent_graph.documents.chunking",
        "huggingface_hub pypdfium2 torch transformers",
    ),
    ("memagent_training.data.replay memagent_training.rewards.reward_names",
     "torch transformers trl"),
    ("memagent_graph.reader memagent_graph.policies.openai_compatible", "torch transformers"),
)  # fmt: skip
"""Modules, and the packages that they must not import. The rows are checked in order in one process."""
PROGRAM = """
import importlib, json, sys
heavy = {}
for names, packages in json.loads(sys.argv[1]):
    for name in names.split():
        importlib.import_module(name)
    heavy[names] = sorted(set(packages.split()) & set(sys.modules))
print(json.dumps(heavy))
"""


def test_modules_do_not_import_heavy_packages() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(UNNEEDED)], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {names: [] for names, _ in UNNEEDED}
