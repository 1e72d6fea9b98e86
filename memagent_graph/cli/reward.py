"""`memagent reward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import plain, print_json
from memagent_graph.cli.run_choice import open_existing


@dataclass(frozen=True, kw_only=True)
class GivenReward:
    """What `memagent reward` is asked for."""

    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run.")]
    value: Annotated[float, typer.Argument(help="How good it was.")]
    name: Annotated[str, typer.Option(help="What was judged.")] = "reward"
    source: Annotated[str, typer.Option(help="Who judged.")] = "person"
    note: Annotated[str | None, typer.Option(help="Why.")] = None
    conversation: Annotated[int | None, typer.Option(help="One of its conversations, by its id in the log.")] = None
    log: Log = None
    as_json: AsJSON = False


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    # A value may be negative, and must not be taken for an option.
    add_command(app, "reward", GivenReward, reward, context_settings={"ignore_unknown_options": True})


def reward(request: GivenReward) -> None:
    """Give a run, or one of its conversations, a reward."""
    with failures_told(as_json=request.as_json):
        open_existing(request.log).reward(
            request.run_id,
            request.value,
            name=request.name,
            source=request.source,
            conversation=request.conversation,
            note=request.note,
        )
    if request.as_json:
        print_json(
            {
                "run_id": request.run_id,
                "conversation": request.conversation,
                "name": request.name,
                "value": request.value,
                "source": request.source,
                "note": request.note,
            }
        )
    else:
        of = "run" if request.conversation is None else f"conversation {request.conversation} of run"
        typer.echo(f"{plain(request.name)} of {of} {plain(request.run_id)}: {request.value:g}", err=True)
