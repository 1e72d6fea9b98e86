"""The cost of several questions in one pass, and of several passes, on a real vLLM server: prefix cache and wall time.

    python -m benchmarks.shared_pass work/shared-pass

The embedded policy's weights are served with a longer window, with which their text is meaningless: only the server's
work is measured. Sections are first in the prompts, replies have at most 32 tokens, and the document fits in the cache.
Each figure has its own document.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, print_table
from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, ReadResult
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_graph.prompts import PromptLayout, load_prompts
from memagent_training.serving.vllm_server import VLLMServer

REPLY_TOKENS = 32
SHARE_GOAL, TIME_GOAL = 0.9, 2.0


def served_folder(folder: Path, window: int) -> Path:
    """The embedded policy's files with another window."""
    copy = folder / "policy"
    shutil.copytree(EMBEDDED_FOLDER, copy)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((copy / name).read_text())
        settings |= {"max_position_embeddings": window} if name == "config.json" else {"model_max_length": window}
        (copy / name).write_text(json.dumps(settings))
    return copy


def reader(server: VLLMServer, folder: Path, strategy: str, arguments: argparse.Namespace) -> MemAgent:
    """A budget with memories and answers as long as replies may be."""
    return MemAgent(
        OpenAICompatiblePolicy(base_url=server.base_url, model=server.model_name),
        tokenizer=EMBEDDED_FOLDER,
        budget=Budget(
            context_window=arguments.chunk_tokens + 1000,
            question_tokens=64,
            memory_tokens=REPLY_TOKENS,
            chunk_tokens=arguments.chunk_tokens,
            answer_tokens=REPLY_TOKENS,
        ),
        prompts=load_prompts(PromptLayout.SECTION_FIRST),
        strategy=strategy,
        store=folder / "documents",
        run_log=False,
    )


def document(arguments: argparse.Namespace, seed: int) -> str:
    """Words in a unique order, about `chunks` chunks long."""
    order = random.Random(seed)
    colours = ("red", "green", "blue", "old", "new")
    sentences = range(arguments.chunks * arguments.chunk_tokens // 9)
    return " ".join(f"the {order.choice(colours)} {order.randrange(10**4)} is here." for _ in sentences)


def questions(number: int) -> list[str]:
    """Different ones."""
    return [f"Which colour does number {index} have?" for index in range(number)]


def cached_share(results: Sequence[ReadResult]) -> float:
    """The share of the document's tokens that these reads found in the cache, at most 1."""
    shares = [min(1.0, result.usage.cached_tokens / result.usage.document_tokens) for result in results]
    return sum(shares) / len(shares)


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """The figures of one server."""
    figures = []
    policy_folder = served_folder(arguments.folder, arguments.chunk_tokens + 1000)
    options = ["--max-num-batched-tokens", str(arguments.chunk_tokens + 1000), "--enable-prompt-tokens-details"]
    with VLLMServer(policy_folder, log_file=arguments.folder / "server.log", options=options) as server:
        agent = reader(server, arguments.folder, "overwrite", arguments)
        agent.read(document(arguments, 0), questions(1)[0])  # the server's first requests are slow
        for number in range(arguments.rounds):
            start_time = time.monotonic()
            agent.read(document(arguments, 3 * number + 1), questions(1)[0])
            one_seconds = time.monotonic() - start_time
            start_time = time.monotonic()
            results = agent.read(document(arguments, 3 * number + 2), questions=questions(arguments.questions))
            all_seconds = time.monotonic() - start_time
            first_result, *other_results = sorted(results, key=lambda result: result.usage.cached_tokens)
            share = cached_share(other_results)
            figures += [
                Figure(f"{arguments.questions} questions : one, wall time", all_seconds / one_seconds, "x", f"<= {TIME_GOAL:g}",
                       all_seconds / one_seconds <= TIME_GOAL),
                Figure("question two on: section tokens from the cache", share, "", f">= {SHARE_GOAL}",
                       share >= SHARE_GOAL),
                Figure("question one: section tokens from the cache", cached_share([first_result])),
            ]  # fmt: skip
            # Started explicitly: the weights write nothing new here, so no second pass would follow.
            passes = reader(server, arguments.folder, "parallel:passes=1", arguments)
            text = document(arguments, 3 * number + 3)
            share = cached_share([passes.read(text, question) for question in questions(2)][1:])
            figures.append(
                Figure("pass two: section tokens from the cache", share, "", f">= {SHARE_GOAL}", share >= SHARE_GOAL)
            )
            passes.close()
        agent.close()
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--chunk-tokens", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    print_table(measure(arguments))


if __name__ == "__main__":
    main()
