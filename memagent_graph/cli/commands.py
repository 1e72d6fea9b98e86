"""The commands of the command line. A command is a frozen dataclass of its arguments and options.

The module of a command is imported when the command or the list of commands is needed. Other packages add commands with
entry points in the group "memagent.commands", which are such classes.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    NoReturn,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

import rich.markup
import typer
import typer.core
import typer.main
from typer.models import OptionInfo

from memagent_graph.cli.exit_codes import ExitCode, report_failures
from memagent_graph.cli.options import OPTION_GROUPS, make_setting_options
from memagent_graph.settings import ReadSettings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_BUILT_IN_COMMANDS: Final = {
    "read": "read:Read",
    "resume": "read:Resume",
    "doctor": "policy_commands:Doctor",
    "show": "runs:Show",
    "runs": "runs:Runs",
    "reward": "runs:GiveReward",
    "export": "runs:Export",
    "import": "runs:Import",
    "policy": "policy_commands:COMMANDS",
}
"""Module and class of the commands of this package. A mapping of classes by name is a group of commands."""


class Command(Protocol):
    """A command: a frozen dataclass whose docstring is the command's help.

    Its fields are the arguments and options, annotated for typer. A field with the name of a setting of `ReadSettings`
    needs no annotation. The help shows fields of the class first, then inherited fields. The options of a long help are
    in groups, the common ones first. `examples` are command lines for the end of the help, and `context_settings` are
    those of a click context.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def run(self) -> None:
        """Run the command. Raise `typer.Exit` for an exit code other than 0; a `MemAgentError` is reported."""
        ...


def add_command(app: typer.Typer, name: str, command: type[Command]) -> None:
    """Add a command to a command line, by the name that the user types."""
    annotations, signature = _make_annotations(command), inspect.signature(command).parameters
    classes = command.__mro__
    field_names = dict.fromkeys(name for base in classes for name in vars(base).get("__annotations__", ()))
    names = [name for name in field_names if name in annotations and name in signature]
    if len(names) > _MAX_UNGROUPED_OPTIONS:
        names.sort(key=lambda name: _HELP_ORDER.get(name, -1))
        annotations = {name: _add_help_group(name, annotations[name]) for name in names}
    parameters = [
        signature[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotations[name]) for name in names
    ]

    def callback(**values: Any) -> None:
        with report_failures(as_json=values.get("as_json", False)):
            command(**values).run()

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    examples = [f"  {rich.markup.escape(example)}" for example in getattr(command, "examples", ())]
    app.command(
        name,
        help=command.__doc__,
        epilog="\n\n".join(["Examples:", *examples]) if examples else None,
        context_settings=getattr(command, "context_settings", None),
    )(callback)


def _make_annotations(command: type[Command]) -> dict[str, Any]:
    """Return the annotations for typer by field, without fields that only Python can set."""
    options, settings = make_setting_options(), {field.name for field in fields(ReadSettings)}
    annotations = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        if get_origin(hint) is Annotated or name not in settings:
            annotations[name] = hint
        elif name in options:
            annotations[name] = options[name]
    return annotations


_MAX_UNGROUPED_OPTIONS: Final = 14
"""Maximum number of arguments and options in a help without groups."""
_GROUP_BY_OPTION: Final = {name: group for group, names in OPTION_GROUPS.items() for name in names}
_HELP_ORDER: Final = {name: position for position, name in enumerate(_GROUP_BY_OPTION)}


def _add_help_group(name: str, annotation: Any) -> Any:
    """Return the annotation with its option in its group of the help, if it has one."""
    if name in _GROUP_BY_OPTION:
        option_type, info = get_args(annotation)
        if isinstance(info, OptionInfo):
            info = copy.copy(info)
            info.rich_help_panel = _GROUP_BY_OPTION[name]
            return Annotated[option_type, info]
    return annotation


class CommandGroup(typer.core.TyperGroup):
    """The commands of this package and of other packages. A command's module is imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, those of this package first."""
        return [*_BUILT_IN_COMMANDS, *_list_added_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. Other packages are searched only for names that this package does not have."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in _BUILT_IN_COMMANDS:
            return _load_built_in_command(cmd_name)
        added_commands = _list_added_commands()
        if cmd_name in added_commands:
            return _load_added_command(added_commands[cmd_name])
        # typer suggests one of these names.
        self.commands = {name: typer.core.TyperCommand(name) for name in self.list_commands(ctx)}
        return None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands. Those of other packages are shown by their summaries, without importing them."""
        self.commands = {name: _load_built_in_command(name) for name in _BUILT_IN_COMMANDS}
        for name, entry in _list_added_commands().items():
            self.commands[name] = typer.core.TyperCommand(name, help=read_summary(entry))
        super().format_help(ctx, formatter)


def _list_added_commands() -> dict[str, EntryPoint]:
    """Return the commands of other packages by name, without the names that this package has."""
    from memagent_graph.entry_points import COMMANDS, list_entry_points

    return {name: entry for name, entry in list_entry_points(COMMANDS).items() if name not in _BUILT_IN_COMMANDS}


def read_summary(entry: EntryPoint) -> str:
    """Return the first line of the docstring of a command's module, without importing the module."""
    spec, folders = None, None
    for part in entry.module.split("."):
        spec = PathFinder.find_spec(part, folders)
        folders = (spec and spec.submodule_search_locations) or ()
    if spec and spec.origin:
        return (ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or "").partition("\n")[0]
    return f"A command of the package {entry.dist.name}." if entry.dist else ""


def _load_built_in_command(name: str) -> Any:
    module, _, attribute = _BUILT_IN_COMMANDS[name].partition(":")
    command = getattr(import_module(f"memagent_graph.cli.{module}"), attribute)
    if not isinstance(command, Mapping):
        return _make_click_command({name: command})
    group = _make_click_command(command)
    group.name, group.help = name, f"Policies on this machine: {', '.join(command)}."
    return group


def _make_click_command(commands: Mapping[str, type[Command]]) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for name, command in commands.items():
        add_command(app, name, command)
    return typer.main.get_command(app)


def _load_added_command(entry: EntryPoint) -> Any:
    """Return a command of another package, or a command that reports why it cannot be loaded."""
    from memagent_graph.entry_points import make_entry_point_error
    from memagent_graph.errors import MemAgentError

    def fail(error: Exception) -> NoReturn:
        from memagent_graph.cli.console import Console

        Console().report_error(make_entry_point_error(entry, "the command", error, MemAgentError))
        raise typer.Exit(ExitCode.SETTINGS) from error

    try:
        click_command = _make_click_command({entry.name: entry.load()})
    except Exception as error:  # noqa: BLE001  whatever another package raises, the other commands work
        context = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        return typer.core.TyperCommand(
            entry.name, callback=partial(fail, error), help=f"Cannot be loaded: {error}.", context_settings=context
        )
    callback = click_command.callback

    @wraps(callback)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return callback(*arguments, **options)
        except ModuleNotFoundError as error:  # a package of the command's extra
            fail(error)

    click_command.callback = run
    return click_command
