"""`memagent show`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from memagent_graph.cli.options import JSONOption, LogOption, StoreOption, print_json
from memagent_graph.cli.run_choice import LATEST, RunArgument, find_run, open_log

if TYPE_CHECKING:
    from memagent_graph.provenance.evidence import LineOrigin, LostLine
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
        import rich.console

        from memagent_graph.cli.console import Console
        from memagent_graph.documents import find_store, open_store
        from memagent_graph.timeline.model import build_timeline
        from memagent_graph.timeline.page import render_page, write_page
        from memagent_graph.timeline.terminal import render_timeline
        from memagent_graph.timeline.view import load_run_view

        log = open_log(self.log)
        with Console().show_status("loading the run"):
            run_id = find_run(log, self.run_id)
            # The default is the store of the run.
            store = open_store(self.store) if self.store else find_store(log.get(run_id).document, log.path)
            view = load_run_view(log, run_id, store)
        if self.as_json:
            _print_view_as_json(view)
        elif self.html is None:
            rich.console.Console(highlight=False).print(render_timeline(build_timeline(view), chunk=self.chunk))
        else:
            page = render_page(build_timeline(view))
            write_page(page, self.html, force=self.force)
            typer.echo(f"wrote {self.html} ({len(page.encode()) / 1000:,.0f} kB); open it in a browser", err=True)


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
