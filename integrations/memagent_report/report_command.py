"""Write a report over many documents, with quotes for each statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import (
    CheckpointsOption,
    JSONOption,
    LogOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    QuietOption,
    ReaderOptions,
    StoreOption,
    expand_questions,
    open_reader,
    print_json,
)

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_report import Report


class ReportFormat(StrEnum):
    """The file formats of --format; see `memagent_report.report_files`."""

    MD = "md"
    HTML = "html"
    CSV = "csv"


@dataclass(frozen=True, kw_only=True)
class ReportDocuments(ReaderOptions):
    """Write a report over several documents. Every sentence cites quotes, and all quotes are checked.

    Each document is read for the same questions. The report is written from the answers and their quotes alone. The
    same command continues a report that was killed, and shows a finished report again.
    """

    examples: ClassVar = (
        'memagent report "What do the contracts say about notice?" contracts/*.pdf --base-url http://localhost:8000/v1',
        'memagent report "Who was where?" a.txt b.txt -q "Who signed it?" -q "When was it signed?" --out report',
        'memagent report "What do the studies find?" *.md -q @questions.txt --format md --format csv --out review',
    )
    question: Annotated[str, typer.Argument(help="The question of the report.")]
    documents: Annotated[list[Path], typer.Argument(help="The documents' paths.")]
    document_questions: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            help="A question for every document. Repeatable; @FILE reads questions from a file, one on each line.",
            show_default="the policy's",
        ),
    ] = None
    extractive: Annotated[
        bool,
        typer.Option("--extractive", help="Use the answers as sections, even if the policy could write them."),
    ] = False
    judge: Annotated[
        bool, typer.Option("--judge", help="Let the policy judge which answers contradict each other.")
    ] = False
    out: Annotated[Path | None, typer.Option(help="Write files to this folder, and do not print Markdown.")] = None
    formats: Annotated[
        list[ReportFormat] | None,
        typer.Option(
            "--format", help="With --out: a file format to write. Repeatable.", show_default="md, html and csv"
        ),
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="With --out: replace files that do not belong to this report.")
    ] = False
    encoding: Annotated[str | None, typer.Option(help="The documents' charset.", show_default="detected")] = None
    max_chunks: Annotated[int | None, typer.Option(min=1, help="Stop each read after this many chunks.")] = None
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    checkpoints: CheckpointsOption = None
    store: StoreOption = None
    log: LogOption = None
    as_json: JSONOption = False
    quiet: QuietOption = False

    def run(self) -> None:
        """Run the command."""
        import asyncio  # noqa: PLC0415

        from memagent_graph.cli.console import Console  # noqa: PLC0415

        if self.formats and self.out is None:
            raise typer.BadParameter("formats are those of files; add --out FOLDER", param_hint="'--format'")
        console = Console(as_json=self.as_json, quiet=self.quiet)
        try:
            report = asyncio.run(self._make_report(console))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.err.print("the same command continues the report")
            console.report_interruption()
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        self._print_report(report, console)
        if not report.totals["answered"]:
            raise typer.Exit(ExitCode.STOPPED if report.totals["stopped"] else ExitCode.NO_ANSWER)

    async def _make_report(self, console: Console) -> Report:
        from memagent_graph.documents import Document  # noqa: PLC0415
        from memagent_graph.reading.state import Limits  # noqa: PLC0415
        from memagent_report import areport  # noqa: PLC0415

        questions = expand_questions(self.document_questions or ())
        documents = [Document.from_path(path, encoding=self.encoding) for path in self.documents]
        settings = self.make_settings()
        console.print_note(settings.policy_reason)
        limits = Limits(self.max_chunks, self.max_tokens_total, self.max_seconds)
        with console.show_status("loading the policy"):
            opened_reader = open_reader(self, settings)
        async with opened_reader as reader:
            return await console.follow_documents(
                len(documents),
                lambda on_update: areport(
                    reader, self.question, documents, questions=questions, extractive=self.extractive,
                    judge=self.judge, limits=None if limits == Limits() else limits,
                    on_update=on_update,
                ),
            )  # fmt: skip

    def _print_report(self, report: Report, console: Console) -> None:
        from memagent_graph.plain_text import make_printable  # noqa: PLC0415
        from memagent_report.report_files import write_report  # noqa: PLC0415

        for event in report.events:
            console.err.print(f"{event.kind.value}: {make_printable(event.detail)}", markup=False, style="yellow")
        paths: Sequence[Path] = ()
        if self.out is not None:
            formats = self.formats or (ReportFormat.MD, ReportFormat.HTML, ReportFormat.CSV)
            paths = write_report(report, self.out, map(str, formats), force=self.force)
            for path in paths:
                console.err.print(f"wrote {path}", markup=False)
        if self.as_json:
            print_json({**report.to_dict(), "files": [str(path) for path in paths]})
        elif self.out is None:
            console.out.print(make_printable(report.to_markdown()), markup=False)
        console.err.print(make_printable(f"{report.summary} Report {report.report_id}"), markup=False, style="dim")
