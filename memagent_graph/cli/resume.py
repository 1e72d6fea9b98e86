"""`memagent resume`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.running import RunOptions

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console
    from memagent_graph.results import ReadResult


@dataclass(frozen=True, kw_only=True)
class Resume(RunOptions):
    """What `memagent resume` is asked for."""

    run_id: Annotated[str, typer.Argument(help="The run, as `memagent read` named it.")]
    document: Annotated[Path | None, typer.Option(help="The document again, if its stored text is gone.")] = None
    policy: Annotated[str | None, typer.Option(help="Another policy, by its name.", show_default="the run's")] = None
    model: Annotated[str | None, typer.Option(help="Another policy.", show_default="the run's")] = None
    base_url: Annotated[str | None, typer.Option(help="Where its server is now.", show_default="the run's")] = None
    strategy: Annotated[str | None, typer.Option(help="Another way of reading.", show_default="the run's")] = None


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    add_command(app, "resume", Resume, resume)


def resume(request: Resume) -> None:
    """Continue a run that was killed, failed, or stopped at a limit."""

    async def run(console: Console) -> ReadResult:
        from memagent_graph.documents.store import Document  # noqa: PLC0415
        from memagent_graph.run_log import RunLog  # noqa: PLC0415
        from memagent_graph.settings import ReaderSettings  # noqa: PLC0415
        from memagent_graph.storage.paths import default_run_log  # noqa: PLC0415

        record = RunLog(request.log or default_run_log()).get(request.run_id)
        settings = ReaderSettings.from_log(record.settings, request.run_id).with_other(
            policy=request.policy, model=request.model, base_url=request.base_url, strategy=request.strategy
        )
        async with request.make_reader(settings.with_server_of_environment()) as reader:
            console.resume_command = request.resume_command(request.run_id)
            path = request.document
            source = None if path is None else Document.from_path(path, encoding=request.encoding)
            return await console.follow(reader.astream_resume(request.run_id, document=source, limits=request.limits))

    request.finish(run)
