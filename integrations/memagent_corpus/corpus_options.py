"""The options of `memagent corpus`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memagent_graph.cli.options import (
    CHECKPOINTS_HELP,
    STORE_HELP,
    JSONOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    PriceInOption,
    PriceOutOption,
    QuietOption,
    ReaderOptions,
)
from memagent_graph.settings import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(ReaderOptions, SamplingSettings):
    """The options of `memagent corpus`: its input, questions, table, engine and limits."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="A folder, a pattern in quotes, a Parquet, JSONL or CSV file, a URL of one of these (s3, gs, az, "
            "http), or dataset:NAME.",
        ),
    ]
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "--questions",
            "-q",
            help="A question about every document. Repeatable. @FILE is a file with one question per line.",
            show_default="--question-column",
        ),
    ] = None
    out: Annotated[str, typer.Option(help="The folder of the table, or its URL.")]
    schema: Annotated[
        str | None,
        typer.Option(
            help="The form of the answers: a file with a JSON schema, or a Pydantic model as path/to/file.py:Model. "
            "Each property becomes a typed column of the table.",
            show_default="plain text answers",
        ),
    ] = None
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Estimate tokens, price and time, and read nothing."),
    ] = False
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Read documents again that have rows with errors, or whose part of the table is damaged or missing.",
        ),
    ] = False
    documents: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of documents read at the same time.",
            show_default="enough for --concurrency requests",
        ),
    ] = None
    rows_per_part: Annotated[int, typer.Option(min=1, help="Rows in each Parquet file.")] = 10_000
    checkpoints: Annotated[str | None, typer.Option(help=CHECKPOINTS_HELP, show_default="beside the table")] = None
    store: Annotated[str | None, typer.Option("--store", help=STORE_HELP, show_default="texts are not kept")] = None
    log: Annotated[
        Path | None, typer.Option("--log", help="Log all calls in this SQLite file.", show_default="none")
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read on a Ray cluster: auto, local, or HOST:PORT. --concurrency and --documents then apply to each "
            "actor.",
            show_default="in this process",
        ),
    ] = None
    ray_actors: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of actors on the cluster.", show_default="one for each machine"),
    ] = None
    encoding: Annotated[str | None, typer.Option(help="The charset of texts and tables.", show_default="detected")] = (
        None
    )
    max_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a document in bytes.")] = 2**30
    text_column: Annotated[
        str | None, typer.Option(help="The column with the texts.", show_default="text, if it exists")
    ] = None
    path_column: Annotated[str | None, typer.Option(help="The column with the files' paths.", show_default="path")] = (
        None
    )
    id_column: Annotated[
        str | None, typer.Option(help="The column with unique document names.", show_default="the row's number")
    ] = None
    question_column: Annotated[
        str | None,
        typer.Option(help="The column with a question, or a list of questions, about the row's document only."),
    ] = None
    keep_column: Annotated[
        list[str] | None, typer.Option(help="A column to copy to the table. Repeatable.", show_default="none")
    ] = None
    root: Annotated[
        Path | None,
        typer.Option(help="The folder of the files in --path-column.", show_default="the input table's folder"),
    ] = None
    subset: Annotated[str | None, typer.Option(help="The dataset's subset.")] = None
    split: Annotated[str, typer.Option(help="The dataset's split.")] = "train"
    allow_private_addresses: Annotated[
        bool,
        typer.Option("--allow-private-addresses", help="Allow http and https URLs that lead to your own network."),
    ] = False
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many documents; can be continued.")
    ] = None
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    price_in: PriceInOption = None
    price_out: PriceOutOption = None
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="With --estimate: the server's throughput, to estimate the time.")
    ] = None
    as_json: JSONOption = False
    quiet: QuietOption = False
