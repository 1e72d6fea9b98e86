"""Questions in a wording that the embedded policy was not trained on, as files for `memagent rl --data` and `eval`.

    python -m benchmarks.own_questions work/own

writes `questions.jsonl`, to train on, and `held_out.jsonl`, whose entities and numbers are in no question of the first.
Each asks "Name the ATTRIBUTE of ENTITY.", on a text of its own: four paragraphs, the fact, and a foreign fact.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from memagent_evaluation.planted_facts import MAGIC, PlantedFacts
from memagent_evaluation.tasks.haystacks import python_prose

PARAGRAPHS = 4
SHORTEST, LONGEST = 80, 600
"""Characters of a paragraph."""


def questions(number: int, *, held_out: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows of question, document and answers."""
    chance = random.Random(f"{seed}/{held_out}")
    facts = PlantedFacts(chance, held_out=held_out, number_share=1.0)
    prose = [part for part in islice(python_prose(), 3000) if SHORTEST < len(part) < LONGEST]
    while number:
        fact = facts.fact()
        if fact.attribute.startswith(MAGIC):
            continue
        parts = [*chance.sample(prose, PARAGRAPHS), fact.statement, facts.near_miss(fact).statement]
        chance.shuffle(parts)
        question = f"Name the {fact.attribute} of {fact.entity}."
        yield {"question": question, "document": "\n\n".join(parts), "answers": [fact.value]}
        number -= 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=200)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, number in (("questions", arguments.train), ("held_out", arguments.held_out)):
        rows = questions(number, held_out=name == "held_out")
        (arguments.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
