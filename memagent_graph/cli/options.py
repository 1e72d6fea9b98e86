"""Options that several commands share, each declared once: its name, type, help and default.

They describe a policy and a reader, where a call stops, and where it writes. An option of only one command is in that
command's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

if TYPE_CHECKING:
    from memagent_graph.settings import ReaderSettings

OPTION_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Policy and server": (
        "policy", "profile", "tokenizer", "dtype", "api_key", "concurrency", "timeout", "retries",
        "requests_per_minute", "tokens_per_minute", "session_header",
    ),
    "Several machines": ("ray", "ray_actors"),
    "Prompts and budgets": (
        "layout", "answer_format", "update_template", "answer_template", "empty_memory", "context_window",
        "question_tokens", "memory_tokens", "chunk_tokens", "answer_tokens", "boundary",
    ),
    "Document": ("pages", "encoding", "replace_undecodable", "max_bytes"),
    "Tables and datasets": (
        "text_column", "path_column", "id_column", "question_column", "keep_column", "root", "subset", "split",
    ),
    "What may be opened": ("allow_private_addresses", "allow_chained_urls"),
    "Sampling": ("temperature", "top_p", "seed", "logprobs"),
    "Memories that cannot be used": ("on_truncated", "on_empty", "on_refused", "on_invented"),
    "Limits": ("max_chunks", "max_questions", "max_documents", "max_tokens", "max_tokens_total", "max_seconds"),
    "Who may ask": ("keys", "without_keys", "server_name", "allow_origin", "allow_remote"),
    "Load": (
        "max_reads", "max_waiting", "max_reads_per_key", "max_connections", "max_body", "spool", "uploads",
        "keep_minutes", "cancel_on_close", "heartbeat",
    ),
    "The estimate": ("price_in", "price_out", "tokens_per_second"),
    "Where runs are kept": (
        "run_id", "report_id", "checkpoints", "no_checkpoints", "store", "log", "no_log", "keep_documents",
    ),
    "Output": ("out", "formats", "force", "as_json", "updates", "quiet"),
}  # fmt: skip
"""The groups in which a long help shows its options, by fields' names; options in none come first."""

# The policy

PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="A policy by name: embedded, smollm2, local, server, or one from an installed package.",
        show_default="by --model and --base-url",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help='A name on the server; without a server, a folder, a hub id, "embedded", or "smollm2" after it was added.',
        show_default="$OPENAI_BASE_URL's, else smollm2 if it was added, else embedded",
    ),
]
BaseURL = Annotated[
    str | None, typer.Option(help="The server's API, as in http://localhost:8000/v1.", show_default="$OPENAI_BASE_URL")
]
ApiKey = Annotated[str | None, typer.Option(help="The server's key.", show_default="$OPENAI_API_KEY")]
ProfileSpec = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help='Budgets and prompts that the policy was trained with: a folder with memagent.json, or "embedded".',
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Most seconds for one completion.")]
Retries = Annotated[int, typer.Option(min=0, help="How often to retry a failed request.")]

# How it reads

StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="The way of reading, with options as in gated:stop=yes; your own: path/to/file.py:Name.",
        show_default="the paper's",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this mass.")]

# Memories that cannot be used

Rule = Literal["accept", "keep_previous", "retry"]
OnInvented = Annotated[
    Rule | None,
    typer.Option(
        "--on-invented",
        help="What to do with a memory that has a word or a number which is not in its prompt.",
        show_default="the policy's, or accept",
    ),
]

# Documents

ReplaceUndecodable = Annotated[
    bool, typer.Option("--replace-undecodable", help="Replace bytes that cannot be decoded with U+FFFD.")
]

# An evaluation's tasks

Haystack = Annotated[
    Path | None,
    typer.Option(
        help="Text in which to hide facts: a file, or a folder with .txt and .md files.", show_default="Python's docs"
    ),
]
Small = Annotated[bool, typer.Option("--small", help="Variants of the tasks for policies with a small context.")]

# Where a call stops

MaxTokensTotal = Annotated[int | None, typer.Option(min=1, help="Stop after this many tokens; can be resumed.")]
MaxSeconds = Annotated[float | None, typer.Option(min=0.001, help="Stop after this time; can be resumed.")]

# What it writes, and where

CHECKPOINTS_HELP: Final = (
    "SQLite file for checkpoints, or a PostgreSQL server that several machines share: postgresql://USER@HOST/DATABASE."
)
Checkpoints = Annotated[str | None, typer.Option(help=CHECKPOINTS_HELP, show_default="user's data folder")]
STORE_HELP: Final = (
    "Where the documents' texts are kept: a folder, or a URL that several machines share, as in s3://bucket/texts."
)
Store = Annotated[str | None, typer.Option("--store", help=STORE_HELP, show_default="user's data folder")]
Log = Annotated[
    Path | None, typer.Option("--log", help="SQLite file for the run log.", show_default="user's data folder")
]
PriceIn = Annotated[float | None, typer.Option(min=0.0, help="Price of a million prompt tokens, for the report.")]
PriceOut = Annotated[float | None, typer.Option(min=0.0, help="Price of a million completion tokens.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How a policy reads. For what is not given, the policy's profile decides."""

    strategy: StrategyName = None
    profile: ProfileSpec = None
    layout: Annotated[
        Literal["paper", "section_first"] | None, typer.Option(help="Order of the update prompt's parts.")
    ] = None
    answer_format: Annotated[Literal["boxed", "plain"] | None, typer.Option(help="How the answer is asked for.")] = None
    update_template: Annotated[str | None, typer.Option(help="Your own update prompt: a text file.")] = None
    answer_template: Annotated[str | None, typer.Option(help="Your own answer prompt: a text file.")] = None
    empty_memory: Annotated[
        str | None,
        typer.Option(help="The text of the memory at the first chunk.", show_default="the policy's, or (empty)"),
    ] = None
    context_window: Annotated[
        int | None,
        typer.Option(help="Context window, in tokens.", show_default="the policy's or the server's, or 8192"),
    ] = None
    question_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the question.", show_default="the policy's, or 1024")
    ] = None
    memory_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the memory.", show_default="the policy's, or 1024")
    ] = None
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a chunk.", show_default="the policy's, or 5000")
    ] = None
    answer_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the answer.", show_default="the policy's, or 1024")
    ] = None
    boundary: Annotated[
        Literal["token", "sentence", "paragraph", "heading"] | None,
        typer.Option(
            help="Where chunks may end. With `token`, the paper's, some sentences are cut in two (about 3% at "
            "512 tokens); with `sentence`, none that ends in a chunk's last 15%, for 2% more chunks. `heading`: before "
            "the last heading or numbered clause in a chunk's second half.",
            show_default="the policy's, or token",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(ReadingOptions):
    """A reader: its policy, and how it reads."""

    model: Model = None
    base_url: BaseURL = None
    policy: PolicyName = None
    stop: Annotated[
        str | None,
        typer.Option(
            help='Stop early once the answer has settled: "converged", or "converged:every=2".',
            show_default="read to the end",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help='A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
            show_default="the policy's",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"] | None,
        typer.Option(
            help="Number format of a policy in this process; int8 is two to three times as fast on CPUs with AVX-512.",
            show_default="the policy's where it is fast, or float32",
        ),
    ] = None
    on_invented: OnInvented = None
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at the same time.")] = 128
    timeout: Timeout = 300.0
    retries: Retries = 4

    def settings(self) -> ReaderSettings:
        """The reader's settings, with the environment's server if no policy was named.

        Options of a command that have a setting's name are settings.
        """
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

        names = {each.name for each in fields(self)} & {each.name for each in fields(ReaderSettings)}
        settings = ReaderSettings(**{name: getattr(self, name) for name in names}).decided()
        return replace(settings, strategy=f"{self.strategy or 'overwrite'}+{self.stop}") if self.stop else settings
