"""`memagent show`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from memagent_graph.cli.exit_codes import report_failures
from memagent_graph.cli.options import JSONOption, LogOption, StoreOption, print_json
from memagent_graph.cli.run_choice import LATEST, RunArgument, find_run, open_log

if TYPE_CHECKING:
    from memagent_graph.provenance.evidence import LineOrigin, LostLine
    from memagent_graph.run_log import RunLog
    from memagent_graph.timeline.view import RunView


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show how a run's memory was built, chunk by chunk, and the quotes that support its answer."""

    examples: ClassVar = (
        "memagent show",
        "memagent show latest --chunk 3",
        "memagent show 20261121 --html run.html",
    )
    run_id: RunArgument = LATEST
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a self-contained page to this file instead. An earlier page is replaced; "
            "other files and links only with --force."
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="With --html: replace any file or link.")] = False
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Show only this chunk, in full. Chunks are counted from 1.")
    ] = None
    log: LogOption = None
    store: StoreOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console

        with report_failures(as_json=self.as_json):
            log = open_log(self.log)
            with Console().show_status("loading the run"):
                view = load_view(log, find_run(log, self.run_id), self.store)
            if self.as_json:
                _print_view_as_json(view)
            elif self.html is not None:
                _write_page(view, self.html, force=self.force)
            else:
                _print_timeline(view, self.chunk)


def load_view(log: RunLog, run_id: str, store: str | None = None) -> RunView:
    """Return a run with its document, if the document is still in the store (by default the store of the run)."""
    from memagent_graph.documents import find_store, open_store
    from memagent_graph.timeline.view import load_run_view

    documents = open_store(store) if store else find_store(log.get(run_id).document, log.path)
    return load_run_view(log, run_id, documents)


def _write_page(view: RunView, path: Path, *, force: bool) -> None:
    from memagent_graph.timeline.model import build_timeline
    from memagent_graph.timeline.page import render_page, write_page

    page = render_page(build_timeline(view))
    write_page(page, path, force=force)
    typer.echo(f"wrote {path} ({len(page.encode()) / 1000:,.0f} kB); open it in a browser", err=True)


def _print_timeline(view: RunView, chunk: int | None) -> None:
    from rich.console import Console

    from memagent_graph.timeline.model import build_timeline
    from memagent_graph.timeline.terminal import render_timeline

    Console(highlight=False).print(render_timeline(build_timeline(view), chunk=chunk))


def _print_view_as_json(view: RunView) -> None:
    def pack_line(line: LineOrigin | LostLine) -> dict[str, Any]:
        return asdict(line) | {"first_chunk": view.trace.updates[line.update].chunk_index}

    text_fields = ("run_id", "question", "model", "strategy", "stop_reason", "answer", "raw_answer")
    print_json(
        {
            **{name: getattr(view, name) for name in text_fields},
            "document": dict(view.document),
            "memory": view.trace.final_memory,
            "lines": list(map(pack_line, view.provenance.lines)),
            "lost": list(map(pack_line, view.provenance.lost)),
            "evidence": list(map(asdict, view.evidence)),
            "rewards": list(map(asdict, view.rewards)),
            "updates": list(map(asdict, view.trace.updates)),
        }
    )
