"""Measure the prefix cache and wall time of several questions in one pass, and of several passes, on a vLLM server.

    python -m benchmarks.shared_pass work/shared-pass

The embedded policy's weights are served with a longer window. Their text is then meaningless, but only the work of the
server is measured. Sections are first in the prompts, replies have at most 32 tokens, and the document fits in the
cache. Each figure has its own document.
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
MIN_CACHED_FRACTION, MAX_TIME_RATIO = 0.9, 2.0


def copy_with_window(folder: Path, window: int) -> Path:
    """Copy the embedded policy with another window, and return the copy's folder."""
    copy = folder / "policy"
    shutil.copytree(EMBEDDED_FOLDER, copy)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((copy / name).read_text())
        settings |= {"max_position_embeddings": window} if name == "config.json" else {"model_max_length": window}
        (copy / name).write_text(json.dumps(settings))
    return copy


def make_reader(server: VLLMServer, folder: Path, strategy: str, arguments: argparse.Namespace) -> MemAgent:
    """Return a reader whose memories and answers may be as long as replies."""
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


def generate_document(arguments: argparse.Namespace, seed: int) -> str:
    """Return a document of about `chunks` chunks with sentences in random order."""
    rng = random.Random(seed)
    colours = ("red", "green", "blue", "old", "new")
    sentences = range(arguments.chunks * arguments.chunk_tokens // 9)
    return " ".join(f"the {rng.choice(colours)} {rng.randrange(10**4)} is here." for _ in sentences)


def generate_questions(count: int) -> list[str]:
    """Return different questions."""
    return [f"Which colour does number {index} have?" for index in range(count)]


def compute_cached_fraction(results: Sequence[ReadResult]) -> float:
    """Return the mean share of the document's tokens that these reads found in the cache, at most 1."""
    shares = [min(1.0, result.usage.cached_tokens / result.usage.document_tokens) for result in results]
    return sum(shares) / len(shares)


def measure_server(arguments: argparse.Namespace) -> list[Figure]:
    """Start a server, and return the figures of all rounds."""
    figures = []
    policy_folder = copy_with_window(arguments.folder, arguments.chunk_tokens + 1000)
    options = ["--max-num-batched-tokens", str(arguments.chunk_tokens + 1000), "--enable-prompt-tokens-details"]
    with VLLMServer(policy_folder, log_file=arguments.folder / "server.log", options=options) as server:
        agent = make_reader(server, arguments.folder, "overwrite", arguments)
        # The first requests of a server are slow, so this read is not measured.
        agent.read(generate_document(arguments, 0), generate_questions(1)[0])
        for round_index in range(arguments.rounds):
            start_time = time.monotonic()
            agent.read(generate_document(arguments, 3 * round_index + 1), generate_questions(1)[0])
            one_question_seconds = time.monotonic() - start_time
            start_time = time.monotonic()
            results = agent.read(
                generate_document(arguments, 3 * round_index + 2), questions=generate_questions(arguments.questions)
            )
            all_questions_seconds = time.monotonic() - start_time
            first_result, *other_results = sorted(results, key=lambda result: result.usage.cached_tokens)
            cached_fraction = compute_cached_fraction(other_results)
            time_ratio = all_questions_seconds / one_question_seconds
            metric = f"{arguments.questions} questions : one, wall time"
            figures += [
                Figure.at_most(metric, time_ratio, "x", MAX_TIME_RATIO),
                Figure.at_least(
                    "question two on: section tokens from the cache", cached_fraction, "", MIN_CACHED_FRACTION
                ),
                Figure("question one: section tokens from the cache", compute_cached_fraction([first_result])),
            ]  # fmt: skip
            # Each pass is a separate read: the reader starts no second pass if the first one wrote nothing new.
            pass_reader = make_reader(server, arguments.folder, "parallel:passes=1", arguments)
            text = generate_document(arguments, 3 * round_index + 3)
            cached_fraction = compute_cached_fraction(
                [pass_reader.read(text, question) for question in generate_questions(2)][1:]
            )
            figures.append(
                Figure.at_least("pass two: section tokens from the cache", cached_fraction, "", MIN_CACHED_FRACTION)
            )
            pass_reader.close()
        agent.close()
    return figures


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--chunk-tokens", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    print_table(measure_server(arguments))


if __name__ == "__main__":
    main()
