"""Measure how well a policy learns with each order of the prompt's parts, from the same start and questions.

    python -m benchmarks.order_learning work/orders --first $FIRST --corpus work/corpus

One order has the section first, the other is the paper's (problem, memory, section). For each order:

1. supervise: train the weights of $FIRST, a release of the embedded policy, for some more steps with prompts in that
order, because $FIRST knows only one order;
2. loop: run `memagent rl` for some iterations, with a real vLLM server and the same tasks, seeds and numbers of reads;
3. measure: run `memagent eval` on held-out prose, before the loop and after it, greedily and at temperature 1.

At the end it prints the costs of the loops: seconds, and the prompt tokens that the server computed. The same command
continues an interrupted measurement.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.loop_phases import PHASES, load_iterations
from memagent_graph.prompts import PromptLayout

FIELDS: Final = ("{chunk}", "{memory}", "{prompt}")
LOOP_OPTIONS: Final = (
    "--task recipes.embedded.tasks:Alone --task recipes.embedded.tasks:AmongForeign --small "
    "--lengths 500,1000 --advance-at 0.5 --temperature 1.3 --rollouts 8 --groups 32 --max-questions 200 "
    "--measure-every 0 --set lr_scheduler_type=linear --set warmup_steps=3 --set groups_per_step=8 "
    "--set loss_weights=conversation_mean --set overlong_max_length=48 --set overlong_cache_length=32 "
    "--set old_logprobs=logged --set skip_certain=0.02 --set token_budget=8192 --set gradient_checkpointing=false "
    "--set learning_rate=5e-4 --set muon_learning_rate=2e-3"
)
"""The options of the loop that trained the second edition of the embedded policy."""


def reorder_template(template: str, order: PromptLayout) -> str:
    """Return the embedded policy's update prompt with its lines in an order.

    Args:
        template: the prompt, with one line each for section, memory and problem.
        order: the order of the lines.
    """
    lines = template.splitlines()
    if len(lines) != len(FIELDS) or not all(field in line for field, line in zip(FIELDS, lines, strict=True)):
        raise SystemExit("--first is not a release of the embedded policy: it has another update prompt")
    return template if order is PromptLayout.SECTION_FIRST else "\n".join(reversed(lines))


def run_module(module: str, *arguments: str | Path) -> None:
    """Run a module of the project as a command, and exit if it fails."""
    process = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=False)
    if process.returncode:
        raise SystemExit(f"{module} failed with exit code {process.returncode}; the same command continues the work")


def make_start(folder: Path, order: PromptLayout, arguments: argparse.Namespace) -> Path:
    """Return the folder of a policy that knows the order; train it if it does not exist."""
    start_folder, supervised_folder = folder / "start", folder / "supervised"
    partial_folder = folder / "start.partial"
    if start_folder.is_dir():
        return start_folder
    shutil.copytree(arguments.first, partial_folder, dirs_exist_ok=True)
    update_template = arguments.first / "templates" / "update.txt"
    (partial_folder / "templates" / "update.txt").write_text(
        reorder_template(update_template.read_text("utf-8"), order), encoding="utf-8"
    )
    schedule = ("--steps", str(arguments.steps), "--decay-steps", str(arguments.steps * 2 // 3), "--ramp-steps", "1")
    optimizer = ("--tokens", "6144", "--muon-lr", "0.003", "--adamw-lr", "0.0015", "--threads", str(arguments.threads))
    sources = ("--shipped", partial_folder, "--weights-from", arguments.first, "--corpus", arguments.corpus)
    run_module("recipes.embedded.train", *sources, "--out", supervised_folder, *schedule, *optimizer, "--resume")
    release = ("--checkpoint", supervised_folder / "last.pt", "--out", partial_folder)
    run_module("recipes.embedded.release", "--edition", f"1, {order.value}", *release)
    partial_folder.replace(start_folder)
    return start_folder


def train_in_loop(folder: Path, start: Path, arguments: argparse.Namespace) -> Path:
    """Return the folder of the policy after a loop; run or continue the loop if it has not ended."""
    out = folder / "loop"
    if not (out / "model.safetensors").is_file():
        loop_options = (
            "--model",
            start,
            "--out",
            out,
            "--iterations",
            str(arguments.iterations),
            "--seed",
            str(arguments.seed),
        )
        prose_option = ("--haystack", arguments.corpus / "train.txt")
        resume = ["--resume"] if out.exists() else []
        run_module("memagent_graph", "rl", *LOOP_OPTIONS.split(), *loop_options, *prose_option, *resume)
    return out


def format_cost(folder: Path) -> str:
    """Return the cost of a loop's iteration as a row of a Markdown table."""
    iterations = load_iterations(folder / "loop")
    total_seconds = fmean(sum(iteration[name] for name in PHASES) for iteration in iterations)
    collect_seconds, computed_tokens, prompt_tokens = (
        fmean(iteration[name] for iteration in iterations) for name in ("reading", "computed", "prompt")
    )
    cells = (folder.name, len(iterations), f"{total_seconds:.1f}", f"{collect_seconds:.1f}", f"{computed_tokens:,.0f}")
    return f"| {' | '.join(map(str, cells))} | {computed_tokens / prompt_tokens:.2f} |"


def main() -> None:
    """Train and measure the policy with each order, and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=Path, required=True, help="the policy to start from")
    parser.add_argument("--corpus", type=Path, required=True, help="the output folder of recipes.embedded.corpus")
    parser.add_argument("--steps", type=int, default=500, help="steps of supervised training")
    parser.add_argument("--iterations", type=int, default=30, help="iterations of the loop")
    parser.add_argument("--lengths", default="1k,8k", help="of the documents to measure on, in tokens")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=31)
    arguments = parser.parse_args()
    folders = [arguments.folder / order.value for order in PromptLayout]
    for order, folder in zip(PromptLayout, folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        start = make_start(folder, order, arguments)
        for stage, model in (("before", start), ("after", train_in_loop(folder, start, arguments))):
            for temperature in ("0", "1"):
                out = folder / f"{stage}-{temperature}"
                decoding = ("--temperature", temperature, "--on-invented", "accept", "--out", out)
                questions = ("--lengths", arguments.lengths, "--n", str(arguments.questions))
                resume = ["--resume"] if out.exists() else []
                reader = ("--small", "--model", model)
                run_module("memagent_graph", "eval", "niah_single_2", *reader, *questions, *decoding, *resume)
    print("| order | iterations | seconds each | collecting | prompt tokens computed | of those asked for |")
    print("|---|---|---|---|---|---|")
    print("\n".join(map(format_cost, folders)))


if __name__ == "__main__":
    main()
