"""A newcomer's path, timed: own questions in a file, reads, rewards, training without a server, a policy.

    python -m benchmarks.own_questions work/own

The questions are in a wording that the embedded policy was not trained on: "Name the ATTRIBUTE of ENTITY.", each on a
text of its own of four paragraphs, the fact, and a foreign fact. `questions.jsonl` is to train on; the entities and
numbers of `held_out.jsonl` are in none of its questions. `memagent rl` then trains on the first, and `memagent eval`
reads the second before and after, greedily. `seconds.json` has each command's time, and its processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from memagent_evaluation.planted_facts import MAGIC, Fact, PlantedFacts
from memagent_evaluation.tasks.haystacks import python_prose

PARAGRAPHS = 4
SHORTEST, LONGEST = 80, 600
"""Characters of a paragraph."""
SETTINGS = (
    "learning_rate=3e-4", "muon_learning_rate=1e-3", "lr_scheduler_type=linear", "warmup_steps=2", "groups_per_step=8",
    "old_logprobs=logged", "skip_certain=0.02", "loss_weights=conversation_mean", "gradient_checkpointing=false",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AskedFact:
    """A fact with its question in the new wording, and its document."""

    question: str
    fact: Fact
    near_miss: Fact
    paragraphs: list[str]
    """The two statements among prose."""


def asked_facts(number: int, *, held_out: bool, seed: int = 0) -> Iterator[AskedFact]:
    """Yield questions on facts of their own."""
    rng = random.Random(f"{seed}/{held_out}")
    facts = PlantedFacts(rng, held_out=held_out, number_share=1.0)
    prose = [part for part in islice(python_prose(), 3000) if SHORTEST < len(part) < LONGEST]
    while number:
        fact = facts.fact()
        if fact.attribute.startswith(MAGIC):
            continue
        filler = rng.sample(prose, PARAGRAPHS)
        near_miss = facts.near_miss(fact)
        paragraphs = [*filler, fact.statement, near_miss.statement]
        rng.shuffle(paragraphs)
        yield AskedFact(f"Name the {fact.attribute} of {fact.entity}.", fact, near_miss, paragraphs)
        number -= 1


def questions(number: int, *, held_out: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows of question, document and answers."""
    for question in asked_facts(number, held_out=held_out, seed=seed):
        document = "\n\n".join(question.paragraphs)
        yield {"question": question.question, "document": document, "answers": [question.fact.value]}


def commands(folder: Path, iterations: int) -> dict[str, list[str]]:
    """Return the path's commands, the training first."""
    train = ["rl", "--data", str(folder / "questions.jsonl"), "--model", "embedded", "--engine", "local"]
    train += ["--out", str(folder / "policy"), "--iterations", str(iterations), "--rollouts", "8", "--groups", "16"]
    train += ["--max-questions", "32", "--advance-at", "0", "--measure-every", "0"]
    train += [word for setting in SETTINGS for word in ("--set", setting)]
    reads = ["eval", "qa_files", "--data", str(folder / "held_out.jsonl"), "--n", "200", "--systems", "memagent"]
    return {
        "rl": train,
        "before": [*reads, "--model", "embedded", "--out", str(folder / "before")],
        "after": [*reads, "--model", str(folder / "policy"), "--out", str(folder / "after")],
        "compared": ["eval-report", str(folder / "after"), str(folder / "before")],
    }


def timed(command: list[str]) -> tuple[float, float]:
    """Run a command of memagent; return its seconds and its processor seconds."""
    start_time, usage_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "memagent_graph", *command], check=True)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.monotonic() - start_time,
        usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime,
    )


def run_timed(commands: dict[str, list[str]], folder: Path) -> None:
    """Run commands of memagent one after the other, and keep what each took."""
    seconds = {}
    for name, command in commands.items():
        seconds[name] = timed(command)
        (folder / "seconds.json").write_text(json.dumps(seconds, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=6)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, number in (("questions", arguments.train), ("held_out", arguments.held_out)):
        rows = questions(number, held_out=name == "held_out")
        (arguments.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    run_timed(commands(arguments.out, arguments.iterations), arguments.out)


if __name__ == "__main__":
    main()
