"""Write docs/commands.md: each command of `memagent` with its help, from the command line itself.

python scripts/write_command_reference.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from memagent_graph.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs/commands.md"
_INTRODUCTION = """# Commands

Written by `python scripts/write_command_reference.py` from the command line itself; `memagent COMMAND --help` shows the
same. The [exit codes](errors.md#exit-codes) are the same for all.
"""


def render_page() -> str:
    """Return the text of the page."""
    return "\n".join([_INTRODUCTION, *(_render_section(names, command) for names, command in list_commands())])


def list_commands() -> list[tuple[str, Any]]:
    """Return the commands with their full names; a group is replaced by its commands."""
    named_commands: list[tuple[str, Any]] = []
    group: Any = typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        subcommands = getattr(command, "commands", None)
        named_commands += (
            [(f"{name} {part}", subcommand) for part, subcommand in subcommands.items()]
            if subcommands
            else [(name, command)]
        )
    return named_commands


def _render_section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage, groups = ["memagent", name], defaultdict[str, list[tuple[str, str]]](list)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        if parameter.param_type_name == "argument":
            metavar = (parameter.metavar or (parameter.name or "").upper()).removesuffix("...")
            usage.append((metavar if parameter.required else f"[{metavar}]") + "..." * (parameter.nargs == -1))
            groups["Arguments"].append((f"`{metavar}`", record[1]))
        else:
            choices = re.search(r"([^\[<]*\|[^\]>]*)", record[0])
            values = f": `{choices[1].replace('|', '`, `')}`" if choices else ""
            names = f"`{', '.join(_list_names(parameter))}`{values}"
            groups[parameter.rich_help_panel or "Options"].append((names, record[1]))
    lines = [f"## memagent {name}", "", " ".join(str(command.help).split()), ""]
    lines += ["```sh", " ".join([*usage, "[OPTIONS]"]), "```", ""]
    for group in ("Arguments", "Options", *(panel for panel in groups if panel not in {"Arguments", "Options"})):
        if rows := groups[group]:
            lines += [f"| {group} | |", "|---|---|"]
            lines += [f"| {names} | {_format_cell(help_text)} |" for names, help_text in rows] + [""]
    if examples := _list_examples(command):
        lines += ["```sh", *examples, "```", ""]
    return "\n".join(lines)


def _list_names(parameter: Any) -> list[str]:
    return [*sorted(parameter.opts, key=len, reverse=True), *parameter.secondary_opts]


def _format_cell(text: str) -> str:
    return re.sub(r"([|<>*_])", r"\\\1", " ".join(text.split()))


def _list_examples(command: Any) -> list[str]:
    paragraphs = [Text.from_markup(paragraph).plain.strip() for paragraph in (command.epilog or "").split("\n\n")]
    return [paragraph for paragraph in paragraphs[1:] if paragraph]


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
