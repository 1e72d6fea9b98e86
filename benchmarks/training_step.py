"""Measure one optimizer step on logged rollouts: forwarded tokens and time, by layout and against TRL's trainer.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --device cuda --model-size 0.5B --dtype bf16 --repeats 5

prints a table and writes it to benchmarks/RESULTS.md, which has a table for a CPU and one for a GPU.

**The rows** are those of one group of 16 rollouts with 8 conversations each. Token ids and weights are random, from a
seed. A prompt has a header, a section of the document and the memory. The 16 rollouts share the section. The memory is
the previous completion of the same rollout, so it differs between rollouts; the first conversation has none. There are
two orders: the section before the memory, and the paper's, the memory before the section. All completions have the same
length, and so have all prompts except the first. Therefore there is almost no padding; with real rows the padded layout
would cost more.

**The contenders** are `MultiConvDAPOTrainer` in its three layouts, and TRL's own `GRPOTrainer`, which gets rows instead
of generating them and is otherwise unchanged: one row at a time, and the 16 rows of a conversation at once. Each trains
its own model, made from the same seed, with `train()`. The time of a step includes planning, laying out, forward,
backward, clipping of gradients, AdamW and metrics. An untimed step with the same number of short rows comes first.

**The same work.** A step's loss and gradient norm must agree between all contenders of an order, otherwise there is no
table. The old log-probs of the ratio are the logged ones, so that some tokens are clipped and the loss is not zero.

**Times** are compared by processor seconds on a CPU, because other work on the machine affects them less than wall
time, and by wall time on a GPU. The two contenders with a goal run first and, in the opposite order, again last.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.figures import Figure
from benchmarks.training_contenders import (
    DTYPES,
    ROLLOUTS,
    SIZES,
    TOKEN_BUDGET,
    Contender,
    Lengths,
    PromptOrder,
    Step,
    Workload,
    compare,
    make_group,
    make_model_config,
)
from memagent_training.algorithm.planner import Layout

RESULTS = Path(__file__).with_name("RESULTS.md")
PADDED = Contender(PromptOrder.SECTION_FIRST, Layout.PADDED)
PREFIX_TREE = Contender(PromptOrder.SECTION_FIRST, Layout.PREFIX_TREE)
OTHER_CONTENDERS = (
    Contender(PromptOrder.SECTION_FIRST, Layout.PACKED),
    Contender(PromptOrder.SECTION_FIRST, None),
    Contender(PromptOrder.SECTION_FIRST, None, batch_size=ROLLOUTS),
    Contender(PromptOrder.SECTION_FIRST, Layout.PADDED, checkpointing=True),
    Contender(PromptOrder.SECTION_FIRST, Layout.PREFIX_TREE, checkpointing=True),
    *(Contender(PromptOrder.PAPER, layout) for layout in Layout),
)
MAX_TOKEN_SHARE, MIN_SPEEDUP = 1 / 3, 2.5
COLUMNS = (
    "prompts", "trainer or layout", "tokens forwarded", "share of padded", "step, s: best", "median",
    "processor s: best", "speedup over padded", "rows' tokens/s", "peak memory, GiB",
)  # fmt: skip
_HEADINGS = {"cpu": "CPU", "cuda": "GPU"}
_TITLE = (
    "# An optimizer step, by layout and against TRL's trainer\n\n`benchmarks/training_step.py` says what is measured."
)
_PLACEHOLDERS = {"cpu": "Not measured.", "cuda": "Not measured: no GPU was available."}


def measure() -> list[Figure]:
    """Return the figures with a goal, for the full step."""
    workload = Workload()
    steps = compare((PADDED, PREFIX_TREE, PREFIX_TREE, PADDED), workload)
    return make_goal_figures(steps, workload)


def make_goal_figures(steps: Mapping[Contender, Sequence[Step]], workload: Workload) -> list[Figure]:
    """Return the figures that compare prefix_tree with padded, with sections first."""
    padded_steps, tree_steps = steps[PADDED], steps[PREFIX_TREE]
    token_share = tree_steps[0].cost.forwarded_tokens / padded_steps[0].cost.forwarded_tokens
    speedup = _find_best_seconds(padded_steps, workload) / _find_best_seconds(tree_steps, workload)
    metric_prefix = "training step, section first, prefix_tree"
    # The goal for speed is for a CPU.
    goal = f"at least {MIN_SPEEDUP}" if workload.device == "cpu" else ""
    return [
        Figure(
            f"{metric_prefix}: tokens forwarded, share of padded",
            token_share,
            "",
            "at most 1/3",
            token_share <= MAX_TOKEN_SHARE,
        ),
        Figure(f"{metric_prefix}: speedup over padded", speedup, "x", goal, not goal or speedup >= MIN_SPEEDUP),
    ]


def format_table(steps: Mapping[Contender, Sequence[Step]], workload: Workload) -> str:
    """Return the measured steps as a Markdown table."""
    lines = [COLUMNS, tuple("---" if index < 2 else "---:" for index in range(len(COLUMNS)))]
    for contender, contender_steps in steps.items():
        padded_steps = steps[Contender(contender.order, Layout.PADDED)]
        best = min(step.cost.wall_seconds for step in contender_steps)
        peaks = [step.cost.peak_bytes for step in contender_steps if step.cost.peak_bytes is not None]
        lines.append((
            contender.order,
            contender.name,
            f"{contender_steps[0].cost.forwarded_tokens:,}",
            f"{contender_steps[0].cost.forwarded_tokens / padded_steps[0].cost.forwarded_tokens:.2f}",
            f"{best:.3g}",
            f"{median(step.cost.wall_seconds for step in contender_steps):.3g}",
            f"{min(step.cost.processor_seconds for step in contender_steps):.3g}",
            f"{_find_best_seconds(padded_steps, workload) / _find_best_seconds(contender_steps, workload):.2f}",
            f"{_count_row_tokens(workload) / best:,.0f}",
            f"{max(peaks) / 2**30:.2f}" if peaks else "not measured",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_section(steps: Mapping[Contender, Sequence[Step]], workload: Workload, command: str) -> str:
    """Return the table with everything that is needed to measure it again."""
    lengths = workload.lengths
    threads = torch.get_num_threads()
    device = f"{read_device_name(workload.device)}, {threads} thread{'s' * (threads > 1)}"
    lengths_text = (
        f"{lengths.header} tokens of header, {lengths.section} of section, {lengths.completion} of memory and answer"
    )
    figures = [
        f"- {figure.metric}: {figure.value:.3g}"
        + (f" (goal: {figure.goal}; {'met' if figure.met else 'MISSED'})" if figure.goal else "")
        for figure in make_goal_figures(steps, workload)
    ]
    text = (
        f"`{command}` on {device}, torch {torch.__version__}: model {workload.model_size}, {workload.dtype}, "
        f"{lengths_text}, {TOKEN_BUDGET:,} tokens forwarded at once. Rows' tokens count what is shared "
        "for each row, so that they are the same for all."
    )
    return "\n\n".join([text, format_table(steps, workload), "\n".join(figures)])


def write_section(path: Path, device: str, text: str) -> None:
    """Replace the section of a kind of device in the results, and keep the other section."""
    section_texts = dict(_PLACEHOLDERS)
    if path.is_file():
        sections = dict(re.findall(r"^## (\w+)\n\n(.*?)\n*(?=^## |\Z)", path.read_text("utf-8"), re.M | re.S))
        section_texts = {kind: sections.get(heading, section_texts[kind]) for kind, heading in _HEADINGS.items()}
    section_texts[device] = text
    parts = [f"## {heading}\n\n{section_texts[kind]}" for kind, heading in _HEADINGS.items()]
    path.write_text("\n\n".join([_TITLE, *parts]) + "\n", "utf-8")


def read_device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpu_info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", cpu_info.read_text(), re.M) if cpu_info.is_file() else None
    return f"{match[1] if match else platform.machine()} ({os.cpu_count()} cores)"


def _find_best_seconds(steps: Sequence[Step], workload: Workload) -> float:
    """Return the seconds by which steps are compared: the best processor time on a CPU, the best wall time on a GPU."""
    return min(step.cost.processor_seconds if workload.device == "cpu" else step.cost.wall_seconds for step in steps)


def _count_row_tokens(workload: Workload) -> int:
    group = make_group("timed-0", PromptOrder.PAPER, workload, 2)
    conversations = [conversation for rollout in group.rollouts_G for conversation in rollout.conversations_K]
    return sum(len(conversation.prompt_ids_P) + len(conversation.completion_ids_T) for conversation in conversations)


def main(arguments: Sequence[str]) -> None:
    """Measure all contenders, write the table, and exit with status 1 if a goal is missed."""
    description = "Measure an optimizer step, by layout and against TRL's trainer."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=description)
    parser.add_argument("--device", choices=sorted(_HEADINGS), default="cpu")
    parser.add_argument("--model-size", choices=SIZES, default="embedded", help="random weights of that size")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the arithmetic; weights are float32")
    lengths_help = "tokens of HEADER, SECTION and COMPLETION; the paper's are 200 5000 1024"
    parser.add_argument("--lengths", nargs=3, type=int, metavar="TOKENS", default=[40, 500, 60], help=lengths_help)
    parser.add_argument("--repeats", type=int, default=1, help="timed steps each time a contender runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to write to")
    options = parser.parse_args(arguments)
    workload = Workload(options.device, options.model_size, options.dtype, Lengths(*options.lengths), options.repeats)
    if workload.repeats < 1 or min(options.lengths) < 1:
        parser.error("--repeats and --lengths must be 1 or more")
    max_row_tokens = workload.lengths.header + workload.lengths.section + 2 * workload.lengths.completion
    window = make_model_config(workload.model_size).max_position_embeddings
    if max_row_tokens > min(window, TOKEN_BUDGET):
        parser.error(
            f"--lengths: rows of {max_row_tokens} tokens, and {min(window, TOKEN_BUDGET)} is the most; give less"
        )
    if workload.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; leave it out to measure on the CPU")
    steps = compare((PADDED, PREFIX_TREE, *OTHER_CONTENDERS, PREFIX_TREE, PADDED), workload)
    text = format_section(steps, workload, shlex.join(["python", "-m", "benchmarks.training_step", *arguments]))
    write_section(options.results, workload.device, text)
    print(text)
    sys.exit(not all(figure.met for figure in make_goal_figures(steps, workload)))


if __name__ == "__main__":
    main(sys.argv[1:])
