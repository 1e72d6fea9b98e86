"""`memagent read`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memagent_graph.cli.options import ReaderOptions, ReplaceUndecodable, Rule, Temperature, TopP
from memagent_graph.cli.running import RunOptions
from memagent_graph.errors import MemAgentError

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.results import ReadResult


@dataclass(frozen=True, kw_only=True)
class Read(ReaderOptions, RunOptions):
    """Read a document with a question in mind, or with several."""

    document: Annotated[str, typer.Argument(help="The document's path, or - for standard input.")]
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", help="What to find out; several times for several questions."),
    ] = None
    questions: Annotated[
        Path | None, typer.Option(help="A file with further questions, one on each line.", show_default=False)
    ] = None
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
    replace_undecodable: ReplaceUndecodable = False
    run_id: Annotated[str | None, typer.Option(help="An id of your own for the run; one of that id is replaced.")] = (
        None
    )
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep no log; `memagent resume` then cannot find the run.")
    ] = False

    def _all_questions(self) -> list[str]:
        """The questions of the command line, then those of the file.

        Raises:
            MemAgentError: there is none, or the file cannot be read.
        """
        asked = list(self.question or ())
        if self.questions is not None:
            try:
                lines = self.questions.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise MemAgentError(
                    f"{self.questions} cannot be read: {error}",
                    hint="Give a UTF-8 text file, one question on each line.",
                ) from error
            asked += [line.strip() for line in lines if line.strip()]
        if not asked:
            raise MemAgentError("there is no question", hint='Ask with -q "...", or give a file with --questions.')
        return asked

    def run(self) -> None:
        """Run the command."""

        async def run(console: Console) -> list[ReadResult | Exception]:
            from memagent_graph.documents.store import Document, DocumentStore  # noqa: PLC0415
            from memagent_graph.reading.state import new_run_id  # noqa: PLC0415
            from memagent_graph.storage.paths import default_store  # noqa: PLC0415

            questions = self._all_questions()
            source = (
                Document.from_file(sys.stdin.buffer, encoding=self.encoding)
                if self.document == "-"
                else Document.from_path(Path(self.document), encoding=self.encoding)
            )
            name = self.run_id or new_run_id()
            # The document comes first: that it cannot be read is found out at once, and a policy may take seconds.
            reference = DocumentStore(default_store()).add(source, replace_undecodable=self.replace_undecodable)
            async with self.make_reader(self.settings(), is_logged=not self.no_log) as reader:
                if len(questions) > 1:
                    return await console.follow_questions(
                        lambda show: reader.aread_questions(
                            reference, questions, run_id=name, limits=self.limits,
                            max_concurrency=self.concurrency, return_exceptions=True, on_update=show,
                        )
                    )  # fmt: skip
                if not self.no_log:
                    console.resume_command = self.resume_command(name)
                stream = reader.astream(reference, questions[0], run_id=name, limits=self.limits)
                return [await console.follow(stream)]

        self.finish(run)
