"""Does a policy keep what is in its memory? One overwrite at a time, of many values on many chunks.

    python -m benchmarks.keeping --model first=$FIRST --model second=memagent_graph/embedded

A table of one line per model: the mean probability that sampling at temperature 1 writes something else, its median and
its 99th percentile, and how often the greedy choice is something else, with the number of different values concerned.
Losses that happen once in thousands of chunks are found here in a minute. Chunks are cut from held-out prose, values
and questions are held out too; a third of the values belong to another question.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from statistics import fmean, quantiles

VALUES_PER_CHUNK = 30
OTHER_QUESTION = 1 / 3


def main() -> None:
    """Command line."""
    import torch

    from memagent_evaluation.planted_facts import PlantedFacts
    from memagent_graph.policies.profile import load_profile
    from recipes.embedded.batched_reader import Reader, ReplyRequest, default_prose
    from recipes.embedded.documents import Setting, cut, prose_from

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER", help="repeatable")
    parser.add_argument("--prose", type=Path, help="a text file; default: pydoc_data.topics")
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    prose = given.prose.read_text(encoding="utf-8") if given.prose else default_prose()
    print("| model | overwrites | not kept at T=1: mean | median | 99th percentile | not kept greedily | values |")
    print("|---|---|---|---|---|---|---|")
    for name, _, model in (pair.partition("=") for pair in given.model):
        profile = load_profile(model)
        if profile is None:
            raise SystemExit(f"{model} has no memagent.json, and so no chunks of a known length")
        rng = random.Random(given.seed)
        reader = Reader(Path(model), given.seed)
        setting = Setting(1, False, profile.budget.chunk_tokens, 1.0, profile.boundary)
        facts = PlantedFacts(rng, held_out=True, number_share=1.0)
        risks: list[float] = []
        lost: list[str] = []
        for _ in range(given.chunks):
            (chunk,) = cut(reader.tokenizer, prose_from(prose, rng, setting.chunk_tokens * 10), setting)
            kept = [facts.fact() for _ in range(VALUES_PER_CHUNK)]
            asked = []
            for fact in kept:
                question = facts.fact().question if rng.random() < OTHER_QUESTION else fact.question
                prompt = reader.form.question(fact.value, question)
                asked.append(ReplyRequest(prompt, reader.form.reply(fact.value), 0.0))
            for fact, (reply, score) in zip(kept, reader.complete(reader.form.trunk(chunk), asked), strict=True):
                risks.append(-math.expm1(min(score, 0.0)))
                lost += [fact.value] if reply != fact.value else []
        _, *_, high = quantiles(risks, n=100)
        middle = sorted(risks)[len(risks) // 2]
        counts = f"{len(lost)} | {len(set(lost))}"
        print(f"| {name} | {len(risks):,} | {fmean(risks):.1e} | {middle:.1e} | {high:.1e} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
