"""Measure the time from a file of questions to a trained policy, without a server.

    python -m benchmarks.own_questions work/own

The questions have a wording that the embedded policy was not trained on: "Name the ATTRIBUTE of ENTITY." Each has its
own document of four paragraphs of prose, the fact, and a similar fact. `memagent rl` trains on `questions.jsonl`, and
`memagent eval` reads `held_out.jsonl` greedily before and after; the two files share no entities and numbers.
`seconds.json` has the wall time and the processor time of each command.
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
from memagent_evaluation.tasks.haystacks import iter_python_prose

FILLER_PARAGRAPHS = 4
MIN_PARAGRAPH_CHARACTERS, MAX_PARAGRAPH_CHARACTERS = 80, 600
LOOP_SETTINGS = (
    "learning_rate=3e-4", "muon_learning_rate=1e-3", "lr_scheduler_type=linear", "warmup_steps=2", "groups_per_step=8",
    "old_logprobs=logged", "skip_certain=0.02", "loss_weights=conversation_mean", "gradient_checkpointing=false",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """A question in the new wording, with its fact and its document."""

    text: str
    fact: Fact
    near_miss: Fact
    paragraphs: list[str]
    """Paragraphs of prose, with the statements of the two facts among them."""


def generate_questions(count: int, *, held_out: bool, seed: int = 0) -> Iterator[Question]:
    """Yield questions, each about its own fact."""
    rng = random.Random(f"{seed}/{held_out}")
    facts = PlantedFacts(rng, held_out=held_out, number_fraction=1.0)
    prose = [
        paragraph
        for paragraph in islice(iter_python_prose(), 3000)
        if MIN_PARAGRAPH_CHARACTERS < len(paragraph) < MAX_PARAGRAPH_CHARACTERS
    ]
    while count:
        fact = facts.draw_fact()
        if fact.attribute.startswith(MAGIC):
            continue
        filler = rng.sample(prose, FILLER_PARAGRAPHS)
        near_miss = facts.draw_near_miss(fact)
        paragraphs = [*filler, fact.statement, near_miss.statement]
        rng.shuffle(paragraphs)
        yield Question(f"Name the {fact.attribute} of {fact.entity}.", fact, near_miss, paragraphs)
        count -= 1


def generate_rows(count: int, *, held_out: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows with question, document and answers, as in a file of questions."""
    for question in generate_questions(count, held_out=held_out, seed=seed):
        document = "\n\n".join(question.paragraphs)
        yield {"question": question.text, "document": document, "answers": [question.fact.value]}


def build_commands(folder: Path, iterations: int, held_out: int) -> dict[str, list[str]]:
    """Return the arguments of the commands by name; training is the first."""
    training = ["rl", "--data", str(folder / "questions.jsonl"), "--model", "embedded", "--engine", "local"]
    training += ["--out", str(folder / "policy"), "--iterations", str(iterations), "--rollouts", "8", "--groups", "16"]
    training += ["--max-questions", "32", "--advance-at", "0", "--measure-every", "0"]
    training += [argument for setting in LOOP_SETTINGS for argument in ("--set", setting)]
    evaluation = ["eval", "qa_files", "--data", str(folder / "held_out.jsonl"), "--n", str(held_out)]
    evaluation += ["--systems", "memagent"]
    return {
        "rl": training,
        "before": [*evaluation, "--model", "embedded", "--out", str(folder / "before")],
        "after": [*evaluation, "--model", str(folder / "policy"), "--out", str(folder / "after")],
        "comparison": ["eval-report", str(folder / "after"), str(folder / "before")],
    }


def run_command(command: list[str]) -> tuple[float, float]:
    """Run a command of memagent, and return its wall seconds and its processor seconds."""
    start_time, usage_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "memagent_graph", *command], check=True)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.monotonic() - start_time,
        usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime,
    )


def run_commands(commands: dict[str, list[str]], folder: Path) -> None:
    """Run commands of memagent one after the other, and write their seconds to seconds.json."""
    seconds = {}
    for name, command in commands.items():
        seconds[name] = run_command(command)
        (folder / "seconds.json").write_text(json.dumps(seconds, indent=1) + "\n")


def main() -> None:
    """Write the questions, and run the commands in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=6)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("questions", arguments.train), ("held_out", arguments.held_out)):
        rows = generate_rows(count, held_out=name == "held_out")
        (arguments.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    run_commands(build_commands(arguments.out, arguments.iterations, arguments.held_out), arguments.out)


if __name__ == "__main__":
    main()
