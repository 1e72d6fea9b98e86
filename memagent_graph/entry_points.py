"""Commands, policies, strategies and converters that other packages add through entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from memagent_graph.errors import MemAgentError, make_install_command

COMMANDS: Final = "memagent.commands"
"""The group of commands: each is a class with the methods of `memagent_graph.cli.commands.Command`."""
POLICIES: Final = "memagent.policies"
"""The group of policies: each is a `memagent_graph.policy_registry.PolicyFactory`."""
CONVERTERS: Final = "memagent.converters"
"""The group of converters: each is a `memagent_graph.converters.Converter`, named after a kind of file."""
STRATEGIES: Final = "memagent.strategies"
"""The group of strategies: each is a subclass of `memagent_graph.Strategy`, or an instance of one."""


def list_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, sorted by name. If two have the same name, the first on the path counts."""
    first_entries = {entry.name: entry for entry in reversed(tuple(entry_points(group=group)))}
    return dict(sorted(first_entries.items()))


def make_entry_point_error(entry: EntryPoint, noun: str, error: Exception, kind: type[MemAgentError]) -> MemAgentError:
    """Return the error for an entry point that cannot be loaded or that fails. The message names the package.

    Args:
        entry: the entry point.
        noun: a noun with its article, for the message, such as "the policy".
        error: the exception that was raised.
        kind: the class of the error to return.
    """
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    if isinstance(error, ModuleNotFoundError) and entry.extras and entry.dist:
        extras = ",".join(entry.extras)
        return kind(
            f"{noun} {entry.name!r} needs the extra {extras!r}, which is not installed (no module {error.name!r})",
            hint=f"Install it with: {make_install_command(extras, entry.dist.name)}.",
        )
    if isinstance(error, MemAgentError):
        reason, hint = error.message, error.hint
    else:
        reason, hint = (
            f"{type(error).__name__}: {error}",
            f"Update or remove the package {package}, or ask its authors.",
        )
    return kind(f"{noun} {entry.name!r} of the package {package} fails: {reason}", hint=hint)
