"""Layouts of a training step: tokens forwarded, and time forward and backward, of padded, packed and prefix_tree.

One group of 16 rollouts with 8 conversations each, in two orders of the prompt: the section before the memory, which
the rollouts of a group then share, and the paper's, the memory before the section. At the first conversation of a
rollout there is no memory yet, so that in both orders all 16 prompts are the same. The 16 rows of one conversation are
a micro-batch; the first and one of the other seven are timed, and the seven counted as equal, because they are.

The model is the embedded policy's, with random weights, on one thread of a CPU in float32; times are processor
seconds, the best of two.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.figures import Figure, print_table
from memagent_graph.profile import EMBEDDED_FOLDER

ROLLOUTS = 16
CONVERSATIONS = 8
HEADER, SECTION, MEMORY, COMPLETION = 40, 500, 60, 60
ROUNDS = 2
LAYOUTS = ("padded", "packed", "prefix_tree")
ORDERS = ("section first", "paper's order")


@dataclass(frozen=True, slots=True)
class Row:
    prompt_ids_P: list[int]  # noqa: N815
    completion_ids_T: list[int]  # noqa: N815


@dataclass(frozen=True, slots=True)
class Cost:
    tokens: int
    seconds: float


def rows(order: str, first: bool) -> list[Row]:
    """The group's rows at its first conversation, or at a later one."""
    source = random.Random(0)

    def some(length: int) -> list[int]:
        return [source.randrange(5000) for _ in range(length)]

    header, section = some(HEADER), some(SECTION)
    made = []
    for _ in range(ROLLOUTS):
        memory = [] if first else some(MEMORY)
        body = [*section, *memory] if order == ORDERS[0] else [*memory, *section]
        made.append(Row([*header, *body], some(COMPLETION)))
    return made


def measure() -> list[Figure]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memagent_training.packing import lay_out
    from memagent_training.scoring import completion_logprobs, dense_pair_cost

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(EMBEDDED_FOLDER)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()  # type: ignore[no-untyped-call]
    pair_cost = dense_pair_cost(model)

    def cost(order: str, layout: str, first: bool) -> Cost:
        """Of one micro-batch, laying it out included: the best of the rounds, each by itself."""
        seconds = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            batch = lay_out(rows(order, first), layout, pad_id=0, pair_cost=pair_cost)
            completion_logprobs(model, batch).logprobs_BT.sum().backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            seconds.append(time.process_time() - begun)
        return Cost(batch.forwarded_tokens, min(seconds))

    steps: dict[tuple[str, str], Cost] = {}
    for order in ORDERS:
        for layout in LAYOUTS:
            first, later = cost(order, layout, True), cost(order, layout, False)
            repeats = CONVERSATIONS - 1
            steps[order, layout] = Cost(first.tokens + repeats * later.tokens, first.seconds + repeats * later.seconds)
    torch.set_num_threads(threads)

    figures = []
    for order in ORDERS:
        padded = steps[order, "padded"]
        for layout in LAYOUTS:
            step = steps[order, layout]
            share, speed = step.tokens / padded.tokens, padded.seconds / step.seconds
            name = f"{layout}, {order}"
            figures += [
                Figure(f"{name}: tokens forwarded", step.tokens, "tokens", "", True),
                Figure(f"{name}: forward and backward", step.seconds, "s", "", True),
            ]
            if (order, layout) == (ORDERS[0], "prefix_tree"):
                figures += [
                    Figure(f"{name}: of padded's tokens", share, "", "at most 1/3", share <= 1 / 3),
                    Figure(f"{name}: padded's time over its", speed, "x", "at least 2.5", speed >= 2.5),
                ]
            elif layout != "padded":
                figures += [
                    Figure(f"{name}: of padded's tokens", share, "", "", True),
                    Figure(f"{name}: padded's time over its", speed, "x", "", True),
                ]
    return figures


if __name__ == "__main__":
    print_table(measure())
