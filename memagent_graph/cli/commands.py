"""Which commands there are, and how one is made from the frozen dataclass of its options.

A command's module is imported when the command, or the list of all, is asked for. Another package adds one by an entry
point in the group "memagent.commands", which names a function `register(app)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, get_type_hints

import typer
import typer.core
import typer.main

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_BUILT_IN: Final = {
    "read": "read:Read",
    "resume": "resume:Resume",
    "doctor": "doctor:Doctor",
    "demo": "demo:Demo",
    "show": "show:Show",
    "diff": "diff:Diff",
    "runs": "runs:Runs",
    "reward": "reward:GiveReward",
    "export": "export:Export",
    "import": "import_:Import",
    "eval": "eval:Eval",
    "eval-report": "eval_report:EvalReport",
    "serve": "serve:Serve",
    "mcp": "mcp:Mcp",
    "policy": "policy_commands:COMMANDS",
}
"""Module and class of each command of this package; a mapping from names to classes in place of a class is a group."""


class Command(Protocol):
    """What a command is asked for: a frozen dataclass whose docstring is the command's help.

    Its fields are the arguments and options, annotated as typer wants them. Those of the class itself come first in the
    help, then those of the classes it inherits from, in their order.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def run(self) -> None:
        """Do what was asked for, and leave with `typer.Exit` where the exit code is not 0."""
        ...


def add_command(app: typer.Typer, name: str, command: type[Command]) -> None:
    """Add a command to a command line, by the name that the user types."""
    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters
    order = dict.fromkeys(each for kind in command.__mro__ for each in vars(kind).get("__annotations__", ()))
    parameters = [
        given[each].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each])
        for each in order
        if each in given
    ]

    def callback(**values: Any) -> None:
        command(**values).run()

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {each.name: each.annotation for each in parameters}
    # A number may be negative, and must not be taken for an option.
    context: dict[str, Any] = {}
    if getattr(command, "takes_negative_numbers", False):
        context["ignore_unknown_options"] = True
    if prefix := getattr(command, "environment", None):
        context["auto_envvar_prefix"] = prefix
    app.command(name, help=command.__doc__, context_settings=context)(callback)


class CommandGroup(typer.core.TyperGroup):
    """The commands of this package and those that others add, each loaded when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()


class _Commands(Mapping[str, Any]):
    """Commands by name. Names of other packages' are looked for only where this package has none."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        from memagent_graph.entry_points import COMMANDS, added  # noqa: PLC0415

        return {name: entry for name, entry in added(COMMANDS).items() if name not in _BUILT_IN}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name in _BUILT_IN:
                module, _, kind = _BUILT_IN[name].partition(":")
                command = getattr(import_module(f"memagent_graph.cli.{module}"), kind)
                grouped = command if isinstance(command, Mapping) else {name: command}

                def register(app: typer.Typer) -> None:
                    for each, kind in grouped.items():
                        add_command(app, each, kind)

                self._loaded[name] = _made(register)
                if grouped is command:
                    self._loaded[name].name = name
                    self._loaded[name].help = f"Policies on this machine: {', '.join(grouped)}."
            else:
                self._loaded[name] = _made_elsewhere(self._added[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*_BUILT_IN, *self._added))

    def __len__(self) -> int:
        return len(_BUILT_IN) + len(self._added)


def _made(register: Callable[[typer.Typer], Any]) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    register(app)
    return typer.main.get_command(app)


def _made_elsewhere(entry: EntryPoint) -> Any:
    """A command of another package; one that says what is wrong where it cannot be loaded."""
    from memagent_graph.entry_points import failure_of  # noqa: PLC0415
    from memagent_graph.errors import MemAgentError  # noqa: PLC0415

    try:
        return _made(entry.load())
    except Exception as error:  # noqa: BLE001  whatever another package raises, the other commands work
        failure = failure_of(entry, "the command", error, MemAgentError)

    def command() -> None:
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.cli.exit_codes import ExitCode  # noqa: PLC0415

        raise typer.Exit(Console().failure(failure, ExitCode.SETTINGS))

    options: Any = {
        "help": f"Cannot be loaded: {failure.message}.",
        "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    }
    return _made(lambda app: app.command(entry.name, **options)(command))
