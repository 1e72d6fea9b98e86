"""Options that several commands share, each declared once: its name, type, help and default's name.

Here is what describes a policy and a reader, where a call stops, and where it writes. What only one command has stands
in that command's module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from memagent_graph.settings import ReaderSettings

# The policy

PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="The policy by its name: embedded, smollm2, local, server, or one that an installed package adds.",
        show_default="by --model and --base-url",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help='A name on the server; without one, a folder, a hub id, "embedded", or "smollm2" once it was added.',
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
        "--profile", help='What a policy was trained with, memagent.json and tokenizer.json: a folder, or "embedded".'
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one completion may take.")]
Retries = Annotated[int, typer.Option(min=0, help="How often a failed request is sent again.")]

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
TopP = Annotated[float, typer.Option(min=0.0, max=1.0)]

# Memories that are not a plain success

Rule = Literal["accept", "keep_previous", "retry"]
OnInvented = Annotated[
    Rule | None,
    typer.Option(
        "--on-invented",
        help="What to do with a memory that has a word which stands nowhere in its prompt.",
        show_default="the policy's, or accept",
    ),
]

# Documents

ReplaceUndecodable = Annotated[bool, typer.Option("--replace-undecodable", help="Put U+FFFD for stray bytes.")]

# An evaluation's tasks

Haystack = Annotated[
    Path | None,
    typer.Option(help="Text to hide facts in: a file, or a folder of .txt and .md.", show_default="Python's docs"),
]
Small = Annotated[bool, typer.Option("--small", help="The tasks' variants for policies of small context.")]

# Where a call stops

MaxTokensTotal = Annotated[int | None, typer.Option(min=1, help="Stop after this many tokens; can be resumed.")]
MaxSeconds = Annotated[float | None, typer.Option(min=0.001, help="Stop after this time; can be resumed.")]

# What it writes, and where

Checkpoints = Annotated[
    Path | None, typer.Option(help="SQLite file for checkpoints.", show_default="user's data folder")
]
Log = Annotated[
    Path | None, typer.Option("--log", help="SQLite file for the run log.", show_default="user's data folder")
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How a policy reads; what is not given is as the policy's profile has it."""

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
        typer.Option(help="What stands for the memory at the first chunk.", show_default="the policy's, or (empty)"),
    ] = None
    context_window: Annotated[
        int | None, typer.Option(help="Tokens.", show_default="the policy's or the server's, or 8192")
    ] = None
    question_tokens: Annotated[
        int | None, typer.Option(help="Bound of the question.", show_default="the policy's, or 1024")
    ] = None
    memory_tokens: Annotated[
        int | None, typer.Option(help="Bound of the memory.", show_default="the policy's, or 1024")
    ] = None
    chunk_tokens: Annotated[int | None, typer.Option(help="Size of a chunk.", show_default="the policy's, or 5000")] = (
        None
    )
    answer_tokens: Annotated[
        int | None, typer.Option(help="Bound of the answer.", show_default="the policy's, or 1024")
    ] = None
    boundary: Annotated[
        Literal["token", "sentence", "paragraph"] | None,
        typer.Option(
            help="Where chunks may end. With `token`, the paper's, some sentences are cut in two (about 3% at "
            "512 tokens); with `sentence`, none that ends in a chunk's last 15%, for 2% more chunks.",
            show_default="the policy's, or token",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(ReadingOptions):
    """A reader: its policy, and how that reads."""

    stop: Annotated[
        str | None,
        typer.Option(
            help='Stop early once the answer has settled: "converged", or with options as in "converged:every=2".',
            show_default="read all",
        ),
    ] = None
    policy: PolicyName = None
    model: Model = None
    base_url: BaseURL = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help='A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
            show_default="the policy's",
        ),
    ] = None
    on_invented: OnInvented = None
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 128
    timeout: Timeout = 300.0
    retries: Retries = 4

    def settings(self) -> ReaderSettings:
        """The reader that was asked for, with the environment's server where no policy was named.

        Options of a command are settings where they have a setting's name.
        """
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415

        names = {each.name for each in fields(self)} & {each.name for each in fields(ReaderSettings)}
        settings = ReaderSettings(**{name: getattr(self, name) for name in names}).decided()
        return replace(settings, strategy=f"{self.strategy or 'overwrite'}+{self.stop}") if self.stop else settings
