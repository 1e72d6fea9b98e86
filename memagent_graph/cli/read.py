"""`memagent read`."""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from memagent_graph.cli.options import ReaderOptions, expand_questions, open_reader
from memagent_graph.cli.running import RunOptions, require_file
from memagent_graph.settings import SamplingSettings

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.results import ReadResult


@dataclass(frozen=True, kw_only=True)
class Read(ReaderOptions, SamplingSettings, RunOptions):
    """Read a document and answer one question about it, or several."""

    examples: ClassVar = (
        'memagent read book.txt -q "Who built the lighthouse?" --base-url http://localhost:8000/v1',
        'memagent read report.pdf -q "What did it cost?" -q "Who paid?" --json',
        "memagent read book.txt -q @questions.txt --model english",
        'memagent read contract.pdf --pages 5-10 -q "When can it be terminated?" --boundary heading',
        'memagent read filing.html -q "What does the filing say of revenue?" --schema filing.py:Filing --json',
        'cat notes.txt | memagent read - -q "What was decided?"',
    )
    document: Annotated[str, typer.Argument(help="The document's path, or - for standard input.")]
    question: Annotated[
        list[str],
        typer.Option(
            "--question",
            "-q",
            help="The question. Repeat the option for several questions. @FILE is a file with one question per line.",
        ),
    ]
    schema: Annotated[
        str | None,
        typer.Option(
            help="The form of the answer: a file with a JSON schema, or a Pydantic model as path/to/file.py:Model. The "
            "answer is then JSON; each reply is checked, and repaired if it does not have the form.",
            show_default="an answer in words",
        ),
    ] = None
    pages: Annotated[
        str | None,
        typer.Option(help="The pages of a PDF file to read: 5, 5-10, 12- (to the end) or 1-3,7.", show_default="all"),
    ] = None
    run_id: Annotated[str | None, typer.Option(help="Your own id for the run. A run with the same id is replaced.")] = (
        None
    )
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep nothing of the read: no log, no document, no state to resume from.")
    ] = False

    def run(self) -> None:
        """Run the command."""

        async def run(console: Console) -> list[ReadResult | Exception]:
            from memagent_graph.documents import Document, open_store
            from memagent_graph.reading.run_history import await_result
            from memagent_graph.reading.state import new_run_id
            from memagent_graph.response_format import ResponseFormat

            questions = expand_questions(self.question)
            response_format = None if self.schema is None else ResponseFormat.load(self.schema)
            source = (
                Document.from_file(sys.stdin.buffer, encoding=self.encoding)
                if self.document == "-"
                else Document.from_path(require_file(Path(self.document)), encoding=self.encoding)
            ).only(self.pages)
            run_id = self.run_id or new_run_id()
            options: Any = {"response_format": response_format, "run_id": run_id, "limits": self.limits}
            # The document comes first: an unreadable one is reported at once, and a policy may take seconds to load.
            store = open_store(store_url).with_options(
                converter=self.converter, replace_undecodable=self.replace_undecodable
            )
            with console.show_status("reading the file"):
                reference = await store.add_async(source)
            settings = self.make_settings()
            console.print_policy(settings.policy_reason)
            with console.show_status("loading the policy"):
                reader = open_reader(self, settings, store=store, is_logged=not self.no_log)
            async with reader:
                await self.prepare(reader, console)
                if not self.no_log:
                    console.resume_command = self.format_resume_command(run_id)
                if len(questions) > 1:
                    return await console.follow_questions(
                        lambda show: reader.aread(
                            reference, questions=questions, on_update=show, return_exceptions=True,
                            max_concurrency=self.concurrency, **options,
                        )
                    )  # fmt: skip
                stream = reader.astream(reference, questions[0], **options)
                return [await console.follow_questions(lambda show: await_result(stream, partial(show, questions[0])))]

        is_temporary = self.no_log and self.store is None
        with tempfile.TemporaryDirectory() if is_temporary else nullcontext(self.store) as store_url:
            self.run_to_end(run)
