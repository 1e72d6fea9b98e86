"""`memagent resume`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from memagent_graph.cli.options import open_reader
from memagent_graph.cli.run_choice import RunArgument, find_read_id, find_runs_to_resume, list_open_questions
from memagent_graph.cli.running import RunOptions, require_file
from memagent_graph.errors import PolicyAuthenticationError, RunError, RunNotFoundError
from memagent_graph.plain_text import format_count

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.concurrency.shared_pass import Barrier
    from memagent_graph.results import ReadResult


@dataclass(frozen=True, kw_only=True)
class Resume(RunOptions):
    """Continue a run that was killed, failed, or stopped at a limit.

    For a read with several questions, give the id that its runs share: its open questions continue in one pass.
    """

    examples: ClassVar = (
        "memagent resume latest",
        "memagent resume 20261121-083011 --base-url http://localhost:8001/v1",
    )
    run_id: RunArgument
    document: Annotated[Path | None, typer.Option(help="The document, needed only if its stored text is missing.")] = (
        None
    )
    schema: Annotated[
        str | None,
        typer.Option(help="The form of the answer, as for `read`. It must equal the run's.", show_default="the run's"),
    ] = None
    policy: Annotated[str | None, typer.Option(help="Name of another policy.", show_default="the run's")] = None
    model: Annotated[str | None, typer.Option(help="Another model, as for `read`.", show_default="the run's")] = None
    base_url: Annotated[str | None, typer.Option(help="The current URL of the server.", show_default="the run's")] = (
        None
    )
    strategy: Annotated[str | None, typer.Option(help="Another strategy.", show_default="the run's")] = None
    header: Any = None
    ca_file: str | None = None
    proxy: str | None = None

    def run(self) -> None:
        """Run the command."""

        async def run(console: Console) -> list[ReadResult | Exception]:
            from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, read_in_passes
            from memagent_graph.documents import Document
            from memagent_graph.policies.server_url import NO_KEY
            from memagent_graph.reading.run_history import await_result, require_results
            from memagent_graph.response_format import ResponseFormat
            from memagent_graph.run_log import RunFilter, RunLog
            from memagent_graph.settings import ReadSettings
            from memagent_graph.storage.private_files import get_default_run_log
            from memagent_graph.strategies import load_strategy

            log = RunLog(self.log or get_default_run_log())
            run_ids = find_runs_to_resume(log, self.run_id)
            run_id, read_id = run_ids[0], find_read_id(run_ids[0])
            if open_questions := {*list_open_questions(log, read_id)} - {*run_ids}:
                question_count = format_count(len(open_questions), "more question")
                command = self.format_resume_command(read_id)
                console.print_policy(f"{question_count} of the same read without an answer; for all: {command}")
            logged_settings = ReadSettings.from_log(log.get(run_id).settings, run_id)
            settings = logged_settings.with_other(
                policy=self.policy,
                model=self.model,
                base_url=self.base_url,
                api_key=self.api_key,
                header=self.header,
                strategy=self.strategy,
            ).replace(ca_file=self.ca_file, proxy=self.proxy)
            if self.strategy is None:
                load_strategy(settings.strategy, allow_own_code=False)  # a log may come from others
            if settings.api_key == NO_KEY and list(log.runs(RunFilter(run_ids=[run_id], is_own=False))):
                raise RunError(
                    f"run {run_id} was imported, so its server URL, {settings.base_url}, is not trusted",
                    hint="Set the server yourself: --base-url URL.",
                )
            document = None
            if self.document is not None:
                document = Document.from_path(require_file(self.document), encoding=self.encoding)
            with console.show_status("loading the policy"):
                reader = open_reader(self, settings)
            async with reader:
                console.resume_command = self.format_resume_command(read_id if len(run_ids) > 1 else run_id)
                response_format = None if self.schema is None else ResponseFormat.load(self.schema)
                options: Any = {"document": document, "response_format": response_format, "limits": self.limits}

                async def resume_run(run_id: str, show: Callable[..., None], barrier: Barrier) -> ReadResult:
                    return await await_result(
                        reader.astream_resume(run_id, barrier=barrier, **options), partial(show, run_id)
                    )

                try:
                    await self.prepare(reader, console)
                    outcomes = await console.follow_questions(
                        lambda show: read_in_passes(
                            [partial(resume_run, run_id, show) for run_id in run_ids], MAX_SHARED_READS
                        )
                    )
                    all_failed = all(isinstance(outcome, Exception) for outcome in outcomes)
                    return [*require_results(outcomes)] if all_failed else outcomes
                except PolicyAuthenticationError as error:
                    if settings.api_key == NO_KEY:
                        server = settings.base_url
                        error.hint = f"Only the log names this server. If it is your server, pass --base-url {server}."
                    raise
                except RunNotFoundError as error:
                    if log.get(run_id).stop_reason is not None:
                        error.hint = f"It was read without checkpoints, and has ended: memagent show {run_id}."
                    raise

        self.run_to_end(run)
