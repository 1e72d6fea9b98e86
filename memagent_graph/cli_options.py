"""Options that several commands of the command line share, each declared once: its name, type, help and default's name.

Here is what describes a policy and a reader, where a call stops, and where it writes. What only one command has stands
at that command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# The policy

Model = Annotated[
    str | None,
    typer.Option(help='A name on the server; without one, a folder, a hub id, or "embedded".', show_default="embedded"),
]
BaseURL = Annotated[
    str | None, typer.Option(help="The server's API, as in http://localhost:8000/v1.", show_default="$OPENAI_BASE_URL")
]
ModelOfRun = Annotated[str | None, typer.Option("--model", help="Another policy.", show_default="the run's")]
BaseURLOfRun = Annotated[
    str | None, typer.Option("--base-url", help="Where its server is now.", show_default="the run's")
]
BaseURLAlone = Annotated[
    str | None, typer.Option("--base-url", help="A server's API; without it, the model runs in this process.")
]
"""Of a command that heeds no server of the environment."""
ApiKey = Annotated[str | None, typer.Option(help="The server's key.", show_default="$OPENAI_API_KEY")]
TokenizerSpec = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help='A tiktoken encoding or model, a tokenizer.json or its folder, a hub id, or "embedded".',
        show_default="the policy's",
    ),
]
ProfileSpec = Annotated[
    str | None,
    typer.Option(
        "--profile", help='What a policy was trained with, memagent.json and tokenizer.json: a folder, or "embedded".'
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one completion may take.")]
Retries = Annotated[int, typer.Option(min=0, help="How often a failed request is sent again.")]

# Prompts and sampling

Layout = Annotated[Literal["paper", "section_first"] | None, typer.Option(help="Order of the update prompt's parts.")]
AnswerForm = Annotated[
    Literal["boxed", "plain"] | None, typer.Option("--answer-format", help="How the answer is asked for.")
]
UpdateTemplate = Annotated[str | None, typer.Option(help="Your own update prompt: a text file.")]
AnswerTemplate = Annotated[str | None, typer.Option(help="Your own answer prompt: a text file.")]
EmptyMemory = Annotated[
    str | None,
    typer.Option(help="What stands for the memory at the first chunk.", show_default="the policy's, or (empty)"),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0)]

# Budgets, in tokens, and chunks

ContextWindow = Annotated[
    int | None, typer.Option(help="Tokens.", show_default="the policy's or the server's, or 8192")
]
QuestionTokens = Annotated[
    int | None, typer.Option(help="Bound of the question.", show_default="the policy's, or 1024")
]
MemoryTokens = Annotated[int | None, typer.Option(help="Bound of the memory.", show_default="the policy's, or 1024")]
ChunkTokens = Annotated[int | None, typer.Option(help="Size of a chunk.", show_default="the policy's, or 5000")]
AnswerTokens = Annotated[int | None, typer.Option(help="Bound of the answer.", show_default="the policy's, or 1024")]
ChunkBoundary = Annotated[
    Literal["token", "sentence", "paragraph"] | None,
    typer.Option("--boundary", help="Where chunks may end.", show_default="the policy's, or token"),
]

# Memories that are no plain success

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

Encoding = Annotated[str | None, typer.Option(help="The document's charset.", show_default="detected")]
ReplaceUndecodable = Annotated[bool, typer.Option("--replace-undecodable", help="Put U+FFFD for stray bytes.")]

# Where a call stops

MaxChunks = Annotated[int | None, typer.Option(min=1, help="Stop after this many chunks; can be resumed.")]
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
