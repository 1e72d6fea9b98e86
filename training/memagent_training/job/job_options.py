"""Options that a job shares with its command, each declared once: type, help and default.

Options whose types take long to import are declared in the jobs: a command's help needs neither PyTorch nor TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from memagent_graph.cli.options import HaystackOption, SmallOption

_PRESETS: Final = (
    "memagent-paper, dapo, gru-mem (GRU-Mem, arXiv 2602.10560: gate and exit; constants ours), rememr1 (ReMemR1, arXiv "
    "2509.23040: 0.8 outcome and 0.2 steps), longrlvr (LongRLVR, arXiv 2603.02146: evidence F2), or a YAML file of "
    "settings."
)
_LoRARank = Annotated[int | None, typer.Option("--lora", min=1, help="Train adapters of this rank, not all weights.")]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a training run from logged runs."""

    model: Annotated[str, typer.Option(help='The policy that wrote the runs: a folder, a hub id, or "embedded".')]
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the trained policy.")] = Path("trained-policy")
    preset: Annotated[str, typer.Option(help=_PRESETS)] = "memagent-paper"
    partial_groups: Annotated[
        bool, typer.Option("--partial-groups", help="Keep the rest of a group if one of its runs is refused.")
    ] = False
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out runs with a longer conversation.", show_default="the window")
    ] = None
    tokenizer: Annotated[str | None, typer.Option(help="The fingerprint to train on, if the runs have several.")] = None
    template: Annotated[
        str | None, typer.Option(help="The prompts' fingerprint to train on, if the runs have several.")
    ] = None
    trust_tokenizer: Annotated[
        bool, typer.Option("--trust-tokenizer", help="Accept runs whose tokenizer fingerprint is not the model's.")
    ] = False
    lora_rank: _LoRARank = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint in --out.")] = (
        False
    )


class Engine(StrEnum):
    """The engine with which a loop's policy reads."""

    VLLM = "vllm"
    LOCAL = "local"
    """The policy reads in the training process: for small policies, and for a rehearsal without a server."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of a closed loop."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="Questions of your own: a JSONL, CSV or Parquet file, or a dataset's folder, with question, document "
            "(or documents) and answers; or MemAgent's, HotpotQA's, SQuAD's or LongBench's file as published."
        ),
    ] = None
    held_out: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Fraction of the questions of --data to measure with, never trained on."),
    ] = 0.1
    drop_answered_without: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            help="Leave out questions that are answered right without the document, by the results of "
            "`memagent eval TASK --data FILE --systems no_document --out RESULTS`.",
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the loop's files and the policy.")] = Path("rl-policy")
    preset: Annotated[str, typer.Option(help=_PRESETS)] = "dapo"
    iterations: Annotated[int, typer.Option(min=1, help="Number of rounds of collecting and training.")] = 100
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature of rollouts; above 0.")] = 1.0
    steps_behind: Annotated[
        int, typer.Option(min=0, max=1, help="1 collects rollouts during training, with weights one iteration old.")
    ] = 0
    advance_at: Annotated[
        float, typer.Option(help="Add the next length when the mean reward at the longest one so far reaches this.")
    ] = 0.8
    small: SmallOption = False
    haystack: HaystackOption = None
    seed: Annotated[int, typer.Option(help="Seed of the questions and of the training.")] = 0
    measure_every: Annotated[int, typer.Option(min=0, help="Iterations between measurements; 0 for none.")] = 10
    measure_count: Annotated[int, typer.Option(min=1, help="Number of questions to measure with, per length.")] = 32
    engine: Annotated[
        Engine, typer.Option(help="Where the policy reads: vllm, or local, in this process, for small policies.")
    ] = Engine.VLLM
    base_url: Annotated[
        str | None,
        typer.Option(
            help="A running vLLM server with the model's weights in float32, on this file system, started "
            "with VLLM_SERVER_DEV_MODE=1 (for --lora: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora) and "
            "--generation-config vllm.",
            show_default="starts its own",
        ),
    ] = None
    served_name: Annotated[str, typer.Option(help="The model's name on the server of --base-url.")] = "policy"
    api_key: Annotated[str | None, typer.Option(help="API key for --base-url.", show_default="$OPENAI_API_KEY")] = None
    server_gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of the server that the loop starts, as in 6,7.",
            show_default="shared with the trainer",
        ),
    ] = None
    chat_template_kwargs: str | None = None
    server_timeout: Annotated[float, typer.Option(min=1, help="Maximum seconds for the server to start.")] = 600.0
    sync_tolerance: Annotated[
        float | None,
        typer.Option(
            help="Maximum difference between log-probs of server and trainer after new weights, in nats.",
            show_default="0.001; 1 for its own server in bfloat16",
        ),
    ] = None
    lora_rank: _LoRARank = None
    serve_merged: Annotated[
        bool,
        typer.Option(
            "--serve-merged",
            help="With --lora: load weights with merged adapters into the server, which then reads faster on CPUs.",
        ),
    ] = False
    resume: Annotated[bool, typer.Option("--resume", help="Continue the loop in --out, or begin a new one.")] = False
