"""The names of all shipped strategies and of the example strategy, and a script that is perfect in their roles."""

from __future__ import annotations

import re
from pathlib import Path

from support.scripts import extract, read_perfectly

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'own_strategy.py'}:OwnGate"
ALL_STRATEGIES = (
    "overwrite",
    "gated:stop=yes",
    "gated:passes=2",
    "refine",
    "map_reduce",
    "parallel",
    "segments:count=3",
    "reread",
    "recall",
    EXAMPLE,
)


def short_name(name: str) -> str:
    """Return a strategy's name without the folder of its file."""
    return name.rpartition("/")[2]


_FACT = re.compile(r"The key of (\w+) is (\d+)\.|^(\w+) (\d+)$", re.MULTILINE)


def answer_perfectly(prompt: str) -> str:
    """Reply correctly in the role that a prompt asks for."""
    problem = extract(prompt, "problem")
    if prompt.rstrip().endswith(("KEEP or REWRITE:", "KEEP, REWRITE or STOP:")):
        memory = read_perfectly(prompt)
        return "KEEP" if memory in {extract(prompt, "memory"), "nothing yet"} else f"REWRITE\n{memory}"
    if "RECALL:" in prompt:
        memory, facts = read_perfectly(prompt), _FACT.findall(extract(prompt, "section"))
        return f"{memory}\nRECALL: key of harbor" if any("castle" in fact for fact in facts) else memory
    if prompt.rstrip().endswith("ANSWER or ASK:"):
        return "ANSWER" if "castle" in extract(prompt, "memory") + problem else "ASK\nWhat is the key of castle?"
    if "<found>" in prompt:
        lines = [*extract(prompt, "found").splitlines(), *extract(prompt, "memory").splitlines()]
        return "\n".join(line for line in lines if line not in {"nothing yet", "(empty)"}) or "nothing yet"
    if "<findings>" in prompt or "one of many parts" in prompt:
        matches = _FACT.finditer(extract(prompt, "findings") + extract(prompt, "section"))
        facts = [[text for text in match.groups() if text] for match in matches]
        lines = [f"{name} {key}" for name, key in facts if name in problem]
        return "\n".join(line for line in dict.fromkeys(lines) if line not in extract(prompt, "memory")) or "none"
    if "Reply with yes or no" in prompt:
        return "yes" if any(name in problem for name, *_ in _FACT.findall(extract(prompt, "section"))) else "no"
    prompt = prompt.replace("draft>", "memory>")
    memory = extract(prompt, "memory")
    lines = [line for line in memory.splitlines() if line != "nothing yet"]
    if "<section>" not in prompt and lines:  # some of several joined memories may be empty
        prompt = prompt.replace(memory, "\n".join(lines))
    return read_perfectly(prompt)
