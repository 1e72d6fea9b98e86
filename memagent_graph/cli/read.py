"""`memagent read`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.options import (
    Concurrency,
    OnInvented,
    ReaderOptions,
    ReplaceUndecodable,
    Retries,
    Rule,
    Temperature,
    TopP,
)
from memagent_graph.cli.running import RunOptions

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.results import ReadResult
    from memagent_graph.settings import ReaderSettings


@dataclass(frozen=True, kw_only=True)
class Read(ReaderOptions, RunOptions):
    """What `memagent read` is asked for."""

    document: Annotated[str, typer.Argument(help="The document's path, or - for standard input.")]
    question: Annotated[str, typer.Option("--question", "-q", help="What to find out.")]
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None
    logprobs: Annotated[
        bool | None,
        typer.Option(
            "--logprobs/--no-logprobs",
            help="Ask for token ids and log-probs.",
            show_default="if logged, and the policy has them",
        ),
    ] = None
    on_truncated: Annotated[Rule, typer.Option(help="What to do with a memory that was cut off or is too long.")] = (
        "accept"
    )
    on_empty: Annotated[Rule, typer.Option(help="With an empty one.")] = "keep_previous"
    on_refused: Annotated[Rule, typer.Option(help="With a refusal.")] = "keep_previous"
    on_invented: OnInvented = None
    replace_undecodable: ReplaceUndecodable = False
    concurrency: Concurrency = 128
    retries: Retries = 4
    run_id: Annotated[str | None, typer.Option(help="An id of your own for the run; one of that id is replaced.")] = (
        None
    )
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep no log; `memagent resume` then cannot find the run.")
    ] = False

    def settings(self) -> ReaderSettings:
        """The reader that was asked for, with its sampling and its rules."""
        return replace(
            super().settings(),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            logprobs=self.logprobs,
            on_truncated=self.on_truncated,
            on_empty=self.on_empty,
            on_refused=self.on_refused,
            on_invented=self.on_invented,
            replace_undecodable=self.replace_undecodable,
            concurrency=self.concurrency,
            retries=self.retries,
        )


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    add_command(app, "read", Read, read)


def read(request: Read) -> None:
    """Read a document with a question in mind."""

    async def run(console: Console) -> ReadResult:
        from memagent_graph.documents.store import Document, DocumentStore  # noqa: PLC0415
        from memagent_graph.reading.state import new_run_id  # noqa: PLC0415
        from memagent_graph.storage.paths import default_store  # noqa: PLC0415

        source = (
            Document.from_file(sys.stdin.buffer, encoding=request.encoding)
            if request.document == "-"
            else Document.from_path(Path(request.document), encoding=request.encoding)
        )
        name = request.run_id or new_run_id()
        # The document comes first: it costs little to find out that it cannot be read, and a policy may take seconds.
        reference = DocumentStore(default_store()).add(source, replace_undecodable=request.replace_undecodable)
        async with request.make_reader(request.settings(), is_logged=not request.no_log) as reader:
            if not request.no_log:
                console.resume_command = request.resume_command(name)
            stream = reader.astream(reference, request.question, run_id=name, limits=request.limits)
            return await console.follow(stream)

    request.finish(run)
