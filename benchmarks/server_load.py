"""Measure how busy `memagent eval` keeps its vLLM server: running requests as a share of their limit.

    python -m benchmarks.server_load work/server-load

The server's gauge counts the requests that a scheduler step leaves unfinished. The replies of the embedded policy have
2 to 8 tokens, so up to half of the requests end with a step, and no client could bring the gauge to its limit. For this
policy the figure is how often requests waited, which means that the server was fully busy. The gauge itself is compared
with the limit for replies of 48 tokens, the length of the memory. They are written by a copy of the policy without its
end token, whose answers are meaningless.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, print_table
from memagent_graph.policies.profile import EMBEDDED_FOLDER

if TYPE_CHECKING:
    from memagent_training.serving.vllm_server import VLLMServer

MIN_RUNNING_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of running and waiting requests at one moment."""

    running: float
    waiting: float


def copy_without_end_token(folder: Path) -> Path:
    """Copy the embedded policy, and give the copy an end token that it never writes."""
    copy = folder / "endless"
    shutil.copytree(EMBEDDED_FOLDER, copy, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(config | {"eos_token_id": config["pad_token_id"]}))
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": tokenizer["pad_token"]}))
    return copy


def sample_during(server: VLLMServer, command: list[str]) -> list[Sample]:
    """Run a command, and return two samples a second from its first request to its last."""
    samples: list[Sample] = []
    has_ended = threading.Event()

    def collect_samples() -> None:
        while not has_ended.wait(0.5):
            metrics = server.read_metrics()
            samples.append(Sample(metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]))

    thread = threading.Thread(target=collect_samples)
    thread.start()
    try:
        subprocess.run(command, check=True)
    finally:
        has_ended.set()
        thread.join()
    busy_indices = [index for index, sample in enumerate(samples) if sample.running or sample.waiting]
    return samples[busy_indices[0] : busy_indices[-1] + 1]


def measure_evaluation(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> list[Sample]:
    """Evaluate one policy on its own server, and return samples of the server's load."""
    from memagent_training.serving.vllm_server import VLLMServer

    options = ["--dtype", "bfloat16", "--max-num-seqs", str(arguments.limit)]
    with VLLMServer(model, log_file=folder / "server.log", options=options) as server:
        command = [
            sys.executable, "-m", "memagent_graph", "eval", "niah_single_2", "--small",
            "--lengths", str(arguments.length), "--n", str(arguments.questions), "--systems", "memagent",
            "--concurrency", str(arguments.in_flight), "--base-url", server.base_url,
            "--tokenizer", "embedded", "--profile", "embedded",
            "--out", str(folder / name), "--no-checkpoints", "--quiet",
        ]  # fmt: skip
        return sample_during(server, command)


def main() -> None:
    """Measure both policies, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--limit", type=int, default=64, help="requests that the server runs at once")
    parser.add_argument("--in-flight", type=int, default=128, help="documents read at once")
    parser.add_argument("--questions", type=int, default=640)
    parser.add_argument("--length", type=int, default=2400)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    figures: list[Figure] = []
    for name, model in (
        ("48 tokens a reply", copy_without_end_token(arguments.folder)),
        ("the policy's own replies", EMBEDDED_FOLDER),
    ):
        samples = measure_evaluation(name.replace(" ", "-").replace("'", ""), model, arguments.folder, arguments)
        running_share = fmean(sample.running for sample in samples) / arguments.limit
        waiting_share = fmean(sample.waiting > 0 for sample in samples)
        has_goal = name.startswith("48")
        goal = f">= {MIN_RUNNING_SHARE}" if has_goal else ""
        is_met = not has_goal or running_share >= MIN_RUNNING_SHARE
        figures.append(Figure(f"running requests : limit, {name}", running_share, "", goal, is_met))
        figures.append(Figure(f"share of the time with requests waiting, {name}", waiting_share))
    print_table(figures)


if __name__ == "__main__":
    main()
