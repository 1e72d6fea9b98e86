"""Parts of the packages that import nothing that they can do without, so that they begin at once."""

from __future__ import annotations

import json
import subprocess
import sys

PARTS = (
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
"""Modules, and what they do without; the later ones may import all that those before them do."""
CODE = """
import importlib, json, sys
heavy = {}
for names, others in json.loads(sys.argv[1]):
    for name in names.split():
        importlib.import_module(name)
    heavy[names] = sorted(set(others.split()) & set(sys.modules))
print(json.dumps(heavy))
"""


def test_parts_do_without_what_takes_long_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(PARTS)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {names: [] for names, _ in PARTS}
