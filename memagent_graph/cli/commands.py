"""Which commands there are, and how one is made: from a frozen dataclass of its options and the function that acts.

A command's module has a function `register(app)`, whether it is in this package or named by another package's entry
point in the group "memagent.commands". It is imported when the command, or the list of all, is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import MISSING, fields
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_type_hints

import typer
import typer.core
import typer.main

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_BUILT_IN: Final = (
    "read", "resume", "doctor", "demo", "show", "diff", "runs", "reward", "export", "import", "eval", "eval-report",
    "mcp",
)  # fmt: skip
_MODULES: Final = {"import": "import_"}
"""Of commands whose names cannot be modules' names."""

Request = TypeVar("Request")


def add_command(
    app: typer.Typer, name: str, request: type[Request], act: Callable[[Request], None], **options: Any
) -> None:
    """Add a command to a command line.

    Args:
        app: where it is added.
        name: what the user types.
        request: a dataclass whose fields are the command's arguments and options, annotated as typer wants them. Those
            of the class itself come first in the help, then those of the classes it inherits from, in their order.
        act: what the command does with what was asked for; its docstring is the command's help.
        options: further ones of `typer.Typer.command`.
    """
    made: Any = request
    hints = get_type_hints(request, include_extras=True)
    by_name = {each.name: each for each in fields(made)}
    order = dict.fromkeys(name for kind in request.__mro__ for name in vars(kind).get("__annotations__", ()))
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if by_name[name].default is MISSING else by_name[name].default,
            annotation=hints[name],
        )
        for name in order
    ]

    def command(**given: Any) -> None:
        act(made(**given))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: hints[name] for name in order}
    command.__doc__ = act.__doc__
    app.command(name, **options)(command)


class CommandGroup(typer.core.TyperGroup):
    """The commands of this package and those that others add, each loaded when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()


class _Commands(MutableMapping[str, Any]):
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
                module = _MODULES.get(name, name.replace("-", "_"))
                self._loaded[name] = _made(import_module(f"memagent_graph.cli.{module}").register)
            else:
                self._loaded[name] = _made_elsewhere(self._added[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*_BUILT_IN, *self._added, *self._loaded)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _made(register: Callable[[typer.Typer], None]) -> Any:
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

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(entry.name, help=f"Cannot be loaded: {failure.message}.", context_settings=any_arguments)(command)
    return typer.main.get_command(app)
