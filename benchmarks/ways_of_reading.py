"""Measure the cost of each strategy on one document: wall time, turns in a row, tokens written, tokens shown.

    python -m benchmarks.ways_of_reading --chunks 700

The policy is scripted, so accuracy is not measured. It finds one planted fact, writes memories of about 100 tokens, and
takes a fixed time for each token that it writes, like a server with capacity for all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, print_table
from benchmarks.text import make_prose
from memagent_graph import Budget, Completion, FinishReason, MemAgent, ReadResult, Trace, load_tokenizer
from memagent_graph.policy import Messages, SamplingParams, TokenUsage
from memagent_graph.prompts import load_prompts

STRATEGIES = (
    "overwrite", "gated", "gated:stop=yes", "refine", "map_reduce:width=128", "parallel:width=128",
    "segments:count=128", "reread", "recall",
)  # fmt: skip
IN_FLIGHT = 128
FACT, QUESTION = "The code of the lighthouse is 48213.", "What is the code of the lighthouse?"
FILLER_NOTES = " ".join(f"detail {number}" for number in range(40))
"""The text of every memory besides the fact."""
_MEMORY = re.compile(r"<memory>(.*?)</memory>", re.DOTALL)
MAX_TIME_RATIO, MAX_TOKEN_RATIO = 1 / 8, 1 / 10


def write_reply(prompt: str) -> str:
    """Return the reply of a policy that follows the instructions of each role."""
    section = "".join(re.findall(r"<section>(.*?)</section>", prompt, re.DOTALL))
    has_fact = "48213" in prompt
    memory = f"{FILLER_NOTES}{' code 48213' if has_fact else ''}"
    if prompt.rstrip().endswith(("KEEP or REWRITE:", "KEEP, REWRITE or STOP:")):
        return f"REWRITE\n{memory}" if "48213" in section or "(empty)" in prompt else "KEEP"
    if prompt.rstrip().endswith("ANSWER or ASK:"):
        return "ASK\nWhere does the lighthouse stand?" if "lighthouse" not in memory else "ANSWER"
    if "one of many parts" in prompt:
        return memory if "48213" in section and "48213" not in "".join(re.findall(_MEMORY, prompt)) else "none"
    if not section and not prompt.rstrip().endswith(("The whole new memory:", "Together:")):
        return f"\\boxed{{{'48213' if has_fact else 'unknown'}}}"
    return memory


@dataclass
class TimedPolicy:
    """A scripted policy that takes `ms` milliseconds for each token that it writes."""

    ms: float
    name: str = "timed"

    def __post_init__(self) -> None:
        self._count = load_tokenizer("embedded").count

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return the scripted reply after the time for its tokens."""
        text = prompt[0]["content"]
        reply_text = write_reply(text)
        tokens = self._count(reply_text)
        await asyncio.sleep(tokens * self.ms / 1000)
        usage = TokenUsage(len(text) // 4, tokens)
        return Completion(
            reply_text, FinishReason.STOP, self.name, usage, token_ids=list(range(tokens)), logprobs=[0.0] * tokens
        )


def count_turns_in_a_row(trace: Trace) -> int:
    """Return the length of the longest chain of calls, each of which needs the one before it."""
    depth: dict[str, int] = {}
    for call in trace.calls:
        depth[call.id] = 1 + max((depth[parent] for parent in call.parents), default=0)
    return max(depth.values())


def compute_idle_tokens(result: ReadResult) -> float:
    """Return the mean number of tokens written at chunks that did not change the memory; NaN if there were none."""
    token_counts = [
        update.completion_tokens for update in result.updates if update.chunk_index is not None and not update.changed
    ]
    return sum(token_counts) / len(token_counts) if token_counts else float("nan")


@dataclass(frozen=True)
class Cost:
    """The cost of one read."""

    strategy: str
    seconds: float
    turns_in_a_row: int
    turns: int
    completion_tokens: int
    prompt_tokens: int
    idle_tokens: float
    """Mean tokens written at a chunk that did not change the memory."""


def measure_costs(strategies: Sequence[str], chunks: int, ms: float) -> list[Cost]:
    """Read the same document with each strategy, and return the costs.

    Raises:
        SystemExit: a strategy does not answer with the fact.
    """
    budget = Budget(context_window=3000, question_tokens=64, memory_tokens=200, chunk_tokens=500, answer_tokens=64)
    prose = make_prose(chunks * budget.chunk_tokens)
    position = prose.index(" ", int(len(prose) * 0.6))
    text = f"{prose[:position]} {FACT}{prose[position:]}"
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        reader = MemAgent(
            TimedPolicy(ms),
            tokenizer="embedded",
            budget=budget,
            prompts=load_prompts(),
            store=Path(folder),
            run_log=False,
            branches=IN_FLIGHT,
        )
        for strategy in strategies:
            start_time = time.monotonic()
            result = reader.copy(strategy=strategy).read(text, QUESTION)
            seconds, usage = time.monotonic() - start_time, result.usage
            if result.answer != "48213":
                raise SystemExit(
                    f"{strategy} answered {result.answer!r}: the scripted policy does not support this strategy"
                )
            turns_in_a_row, idle_tokens = count_turns_in_a_row(result.trace), compute_idle_tokens(result)
            tokens = usage.completion_tokens, usage.prompt_tokens
            costs.append(Cost(strategy, seconds, turns_in_a_row, usage.turns, *tokens, idle_tokens))
    return costs


def make_goal_figures(costs: Sequence[Cost]) -> list[Figure]:
    """Return the figures with a goal, of the strategies that were measured."""
    cost_by_strategy = {cost.strategy: cost for cost in costs}
    if "overwrite" not in cost_by_strategy:
        return []
    overwrite_cost, figures = cost_by_strategy["overwrite"], list[Figure]()
    for strategy in sorted(cost_by_strategy.keys() & {"parallel:width=128", "segments:count=128"}):
        ratio = cost_by_strategy[strategy].seconds / overwrite_cost.seconds
        figures.append(Figure(f"{strategy} : overwrite, wall time", ratio, "x", "<= 1/8", ratio <= MAX_TIME_RATIO))
    if "gated" in cost_by_strategy:
        ratio = cost_by_strategy["gated"].idle_tokens / overwrite_cost.idle_tokens
        metric = "gated : overwrite, tokens written at a chunk without news"
        figures.append(Figure(metric, ratio, "x", "<= 1/10", ratio <= MAX_TOKEN_RATIO))
    return figures


def print_costs(costs: Sequence[Cost]) -> None:
    """Print a Markdown table with a row for each strategy."""
    print("| way | seconds | turns in a row | turns | tokens written | without news | tokens shown |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for cost in costs:
        idle_text = "" if math.isnan(cost.idle_tokens) else f"{cost.idle_tokens:.0f}"
        counts = f"{cost.turns_in_a_row:,} | {cost.turns:,} | {cost.completion_tokens:,}"
        print(f"| `{cost.strategy}` | {cost.seconds:.1f} | {counts} | {idle_text} | {cost.prompt_tokens:,} |")
    print()


def main() -> None:
    """Measure the strategies that the command line names, and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=700)
    parser.add_argument("--ms", type=float, default=1.0, help="milliseconds for a token that is written")
    parser.add_argument("--ways", default=",".join(STRATEGIES))
    arguments = parser.parse_args()
    costs = measure_costs(arguments.ways.split(","), arguments.chunks, arguments.ms)
    print_costs(costs)
    print_table(make_goal_figures(costs))


if __name__ == "__main__":
    main()
