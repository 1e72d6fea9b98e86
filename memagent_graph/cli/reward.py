"""`memagent reward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON, Log
from memagent_graph.cli.output import print_json
from memagent_graph.cli.run_choice import NamedRun, open_existing, run_named
from memagent_graph.plain_text import in_one_line


@dataclass(frozen=True, kw_only=True)
class GiveReward:
    """Give a run, or one of its conversations, a reward."""

    examples: ClassVar = (
        "memagent reward latest 1.0 --name correct",
        'memagent reward 20261121-08 -0.5 --note "wrong year"',
    )
    takes_negative_numbers: ClassVar = True
    run_id: NamedRun
    value: Annotated[float, typer.Argument(help="How good it was.")]
    name: Annotated[str, typer.Option(help="What was judged.")] = "reward"
    source: Annotated[str, typer.Option(help="Who judged.")] = "person"
    note: Annotated[str | None, typer.Option(help="Why.")] = None
    conversation: Annotated[int | None, typer.Option(help="One of its conversations, by its id in the log.")] = None
    log: Log = None
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        with failures_told(as_json=self.as_json):
            log = open_existing(self.log)
            run_id = run_named(log, self.run_id)
            log.reward(
                run_id,
                self.value,
                name=self.name,
                source=self.source,
                conversation=self.conversation,
                note=self.note,
            )
        if self.as_json:
            names = ("conversation", "name", "value", "source", "note")
            print_json({"run_id": run_id, **{name: getattr(self, name) for name in names}})
        else:
            of = "run" if self.conversation is None else f"conversation {self.conversation} of run"
            typer.echo(f"{in_one_line(self.name)} of {of} {in_one_line(run_id)}: {self.value:g}", err=True)
