"""Count the prompt tokens of a collection that a server computes, for each order of the prompt's parts.

    python -m benchmarks.prompt_order work/prompt-order

The rollouts of a question read the same chunks. If the section is before problem and memory, they share the section's
keys and values; in the paper's order, problem and memory come first, so the prompts differ before the section. The same
questions are collected in both orders, each on a new vLLM server, whose counters show the tokens that it computed. The
embedded policy was not trained on the paper's order, but its answers do not matter here.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.figures import Figure, print_table
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph import MemAgent, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER, load_profile
from memagent_graph.prompts import PromptLayout, load_prompts
from memagent_graph.tokenizers import load_tokenizer

MAX_RATIO = 1 / 3


def collect_in_order(order: PromptLayout, folder: Path, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Collect all questions in one order; return prompt tokens, computed prompt tokens, and turns."""
    from memagent_training.job.collect import CollectSettings, collect
    from memagent_training.serving.vllm_server import VLLMServer

    task = load_task(arguments.task, TaskSettings(load_tokenizer(EMBEDDED_FOLDER), small=True))
    samples = [task.sample(arguments.length, index) for index in range(arguments.questions)]
    profile = load_profile(EMBEDDED_FOLDER)
    assert profile is not None
    policy_prompts = profile.prompts
    prompts = load_prompts(order, policy_prompts.answer_format, empty_memory=policy_prompts.empty_memory)
    settings = CollectSettings(
        rollouts=arguments.rollouts,
        groups=arguments.questions,
        max_questions=arguments.questions,
        concurrency=arguments.concurrency,
    )
    with VLLMServer(EMBEDDED_FOLDER, log_file=folder / "server.log") as server:
        agent = MemAgent(
            OpenAICompatiblePolicy(base_url=server.base_url, model=server.model_name),
            tokenizer=EMBEDDED_FOLDER,
            budget=profile.budget,
            prompts=policy_prompts if order is PromptLayout.SECTION_FIRST else prompts,
            boundary=profile.boundary,
            sampling=SamplingParams(temperature=1.0),
            run_log=folder / f"{order.value}.sqlite",
            store=folder / "documents",
        )
        metrics_before = server.read_metrics()
        collection = asyncio.run(collect(agent, samples, settings, name="collected"))
        metrics_after = server.read_metrics()
    prompt_tokens, cached_tokens = (
        metrics_after[name] - metrics_before.get(name, 0.0)
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    )
    return prompt_tokens, prompt_tokens - cached_tokens, collection.usage.turns


def main() -> None:
    """Collect in both orders, and print the prompt tokens per turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--task", default="niah_multikey_2")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=128)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    figures: list[Figure] = []
    computed_per_turn: dict[PromptLayout, float] = {}
    for order in PromptLayout:
        prompt_tokens, computed_tokens, turns = collect_in_order(order, arguments.folder, arguments)
        computed_per_turn[order] = computed_tokens / turns
        figures.append(Figure(f"{order.value}: prompt tokens a turn", prompt_tokens / turns))
        figures.append(Figure(f"{order.value}: of them computed", computed_tokens / turns))
    ratio = computed_per_turn[PromptLayout.SECTION_FIRST] / computed_per_turn[PromptLayout.PAPER]
    figures.append(Figure("computed a turn, section_first : paper", ratio, "x", "<= 1/3", ratio <= MAX_RATIO))
    print_table(figures)


if __name__ == "__main__":
    main()
