"""The options of `memagent eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memagent_graph.cli.options import (
    HaystackOption,
    JSONOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    PriceInOption,
    PriceOutOption,
    QuietOption,
    ReaderOptions,
    SmallOption,
)
from memagent_graph.settings import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ReaderOptions, SamplingSettings):
    """The options of the command."""

    context: typer.Context
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASKS", help="Tasks and suites to run; name your own task as path/to/file.py:Name."),
    ] = None
    list_names: Annotated[bool, typer.Option("--list", help="List the tasks, suites and systems.")] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Document lengths, in the tasks' unit (tokens, passages). 1k is 1024, 1M is 1024k.",
            show_default="8k,32k,128k; passages: 50,200,800; data files: all their lengths",
        ),
    ] = None
    count: Annotated[
        int,
        typer.Option(
            "--n",
            "-n",
            min=1,
            help="Questions per task and length. Without --lengths, all questions of data files that have fewer.",
        ),
    ] = 128
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Answers to sample per question, with a --temperature above 0; the report has pass@k."
        ),
    ] = 1
    systems: Annotated[
        str,
        typer.Option(help="Systems to run: names, strategies, file.py:Name. The others are compared with the first."),
    ] = "memagent"
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum answer tokens; raised for tasks that need more.", show_default="the policy's, or 1024"
        ),
    ] = None
    small: SmallOption = False
    haystack: HaystackOption = None
    questions_per_document: Annotated[
        int,
        typer.Option(
            min=1,
            help="Questions that share a document, for RULER's needle tasks, state_*, english_* and own tasks.",
        ),
    ] = 1
    data: Annotated[Path | None, typer.Option(help="File or folder with the data of tasks that need data files.")] = (
        None
    )
    seed: Annotated[int, typer.Option(help="Seed of the tasks, and of sampling if it is not greedy.")] = 0
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Log token ids and log-probs, so that the runs can be used for training; otherwise only text "
            "is logged.",
        ),
    ] = False
    judge_model: Annotated[
        str | None, typer.Option(help="Model that grades the answers at the end, as an additional score.")
    ] = None
    judge_base_url: Annotated[
        str | None, typer.Option(help="Base URL of the judge's OpenAI-compatible API.", show_default="the policy's")
    ] = None
    judge_api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the judge's server.",
            envvar="MEMAGENT_JUDGE_API_KEY",
            show_default="the policy's on its server",
        ),
    ] = None
    price_in: PriceInOption = None
    price_out: PriceOutOption = None
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum number of questions, and of requests, in flight.")
    ] = 128
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many questions; can be resumed.")
    ] = None
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    out: Annotated[Path, typer.Option(help="Folder for results, report, plots and run log.")] = Path("memagent-eval")
    resume: Annotated[bool, typer.Option("--resume", help="Continue the evaluation in the folder, or add to it.")] = (
        False
    )
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: repeat questions that failed.")
    ] = False
    log: Annotated[
        Path | None, typer.Option(help="SQLite file for the run log.", show_default="runs.sqlite in the folder")
    ] = None
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Resume to the question only, not to the chunk.")
    ] = False
    keep_documents: Annotated[
        bool,
        typer.Option(
            "--keep-documents", help="Keep the documents in the folder, so that `memagent show` can show the chunks."
        ),
    ] = False
    as_json: JSONOption = False
    quiet: QuietOption = False
