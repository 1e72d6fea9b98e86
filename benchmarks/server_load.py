"""Does an evaluation keep its server busy? vLLM's running requests, as a share of their limit, during `memagent eval`.

    python -m benchmarks.server_load work/server-load

The gauge counts the requests that a scheduler step leaves unfinished. The embedded policy's replies have 2 to 8
tokens, so that up to half of a step's requests are finished by it, and no client could bring the gauge to its limit:
for that policy the figure is how often requests waited, which means that the server was fully busy. The gauge itself is
compared with the limit with replies as long as the memory may be, 48 tokens: by a copy of the policy without its end
token. That copy's answers are meaningless.
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

GOAL = 0.9


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the server's metrics."""

    running: float
    waiting: float


def endless_copy(folder: Path) -> Path:
    """The embedded policy with another end token, which it never writes."""
    copy = folder / "endless"
    shutil.copytree(EMBEDDED_FOLDER, copy, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(config | {"eos_token_id": config["pad_token_id"]}))
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": tokenizer["pad_token"]}))
    return copy


def sampled_during(server: VLLMServer, command: list[str]) -> list[Sample]:
    """Readings while a command runs, twice a second, from the first request on."""
    samples: list[Sample] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.5):
            read = server.metrics()
            samples.append(Sample(read["vllm:num_requests_running"], read["vllm:num_requests_waiting"]))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        subprocess.run(command, check=True)
    finally:
        over.set()
        thread.join()
    busy = [index for index, sample in enumerate(samples) if sample.running or sample.waiting]
    return samples[busy[0] : busy[-1] + 1]


def measure(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> list[Sample]:
    """An evaluation of one policy on its own server."""
    from memagent_training.serving.vllm_server import VLLMServer

    options = ["--max-num-seqs", str(arguments.limit)]
    with VLLMServer(model, log_file=folder / "server.log", dtype="bfloat16", options=options) as server:
        command = [
            sys.executable, "-m", "memagent_graph", "eval", "niah_single_2", "--small", "--lengths", str(arguments.length),
            "--n", str(arguments.questions), "--systems", "memagent", "--concurrency", str(arguments.in_flight),
            "--base-url", server.base_url, "--tokenizer", "embedded", "--profile", "embedded",
            "--out", str(folder / name), "--no-checkpoints", "--quiet",
        ]  # fmt: skip
        return sampled_during(server, command)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--limit", type=int, default=64, help="requests that the server runs at once")
    parser.add_argument("--in-flight", type=int, default=128, help="documents read at once")
    parser.add_argument("--questions", type=int, default=640)
    parser.add_argument("--length", type=int, default=2400)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    figures: list[Figure] = []
    for name, model in (
        ("48 tokens a reply", endless_copy(arguments.folder)),
        ("the policy's own replies", EMBEDDED_FOLDER),
    ):
        samples = measure(name.replace(" ", "-").replace("'", ""), model, arguments.folder, arguments)
        share = fmean(sample.running for sample in samples) / arguments.limit
        waiting_share = fmean(sample.waiting > 0 for sample in samples)
        has_goal = name.startswith("48")
        goal = f">= {GOAL}" if has_goal else ""
        figures.append(Figure(f"running requests : limit, {name}", share, "", goal, not has_goal or share >= GOAL))
        figures.append(Figure(f"share of the time with requests waiting, {name}", waiting_share))
    print_table(figures)


if __name__ == "__main__":
    main()
