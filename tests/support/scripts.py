"""Scripts for policies and fake servers: a perfect reader of facts such as "The key of harbor is 4711."."""

from __future__ import annotations

import re
from dataclasses import asdict

from memagent_graph import Budget, Completion, FinishReason
from memagent_graph.policy import TokenUsage

SMALL_BUDGET = Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
"""A budget that barely fits what the perfect reader writes."""
SMALL_OPTIONS = tuple(
    word for name, tokens in asdict(SMALL_BUDGET).items() for word in (f"--{name.replace('_', '-')}", str(tokens))
)
"""`SMALL_BUDGET` as command-line options; the last value of a repeated option counts."""
_FACT = re.compile(r"The key of (\w+) is (\d+)\.")


def extract(prompt: str, tag: str) -> str:
    """Return the text inside the last element `tag` of a prompt, "" if there is none."""
    matches = re.findall(rf"<{tag}>\s*(.*?)\s*</{tag}>", prompt, re.DOTALL)
    return matches[-1] if matches else ""


def read_perfectly(prompt: str) -> str:
    """Write each key that the problem asks for into the memory, one a line; answer with the last one."""
    problem, memory = extract(prompt, "problem"), extract(prompt, "memory")
    memory = "" if memory == "(empty)" else memory
    if "<section>" not in prompt:
        lines = memory.splitlines()
        return f"\\boxed{{{lines[-1].split()[-1]}}}" if lines else "\\boxed{unknown}"
    lines = [f"{name} {key}" for name, key in _FACT.findall(extract(prompt, "section")) if name in problem]
    return "\n".join(dict.fromkeys([*memory.splitlines(), *lines])) or "nothing yet"


def make_completion(prompt: str, text: str) -> Completion:
    """Return a completion with log-probs, whose token ids are bytes of the prompt and the text."""
    ids = list(text.encode())
    return Completion(
        text=text,
        finish_reason=FinishReason.STOP,
        model="scripted",
        usage=TokenUsage(len(prompt), len(ids)),
        prompt_token_ids=list(prompt.encode()),
        token_ids=ids,
        logprobs=[-0.25] * len(ids),
        policy_version="v7",
    )


def make_document(facts: dict[float, str], *, words: int = 4000) -> str:
    """Return about `words` words of filler, with each fact at its depth (0 to 1)."""
    filler = [f"word{index} and then" for index in range(words // 3)]
    for depth, sentence in sorted(facts.items(), reverse=True):
        filler.insert(int(depth * len(filler)), sentence)
    return " ".join(filler)
