"""What other packages add to this one through entry points: commands, policies."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from memagent_graph.errors import MemAgentError

COMMANDS: Final = "memagent.commands"
"""Each names a function `register(app)` that adds one command to the `typer.Typer` it is given."""
POLICIES: Final = "memagent.policies"
"""Each names a `memagent_graph.policies.named.PolicyFactory`."""


def added(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in the order of names; of one name's, the first on the Python path."""
    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=group):
        found.setdefault(each.name, each)
    return dict(sorted(found.items()))


def failure_of(entry: EntryPoint, what: str, error: Exception, kind: type[MemAgentError]) -> MemAgentError:
    """What to raise when an entry point cannot be loaded, or what it names fails; it names the package.

    Args:
        entry: the entry point.
        what: what it was to be, as in "the policy".
        error: what went wrong.
        kind: the error's class.
    """
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    if isinstance(error, MemAgentError):
        told, hint = error.message, error.hint
    else:
        told, hint = f"{type(error).__name__}: {error}", f"Update or remove the package {package}, or ask its authors."
    return kind(f"{what} {entry.name!r} of the package {package} fails: {told}", hint=hint)
