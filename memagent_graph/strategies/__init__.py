"""Ways of reading, by name: those that come with the package, those of other packages, and a user's own.

overwrite    the paper's: the whole memory is rewritten at each chunk
refine       a draft of the answer, improved at each chunk
map_reduce   what each chunk contributes, side by side, then merged

Another package adds one by an entry point of the group "memagent.strategies". A user's own is named as
"path/to/file.py:Name" or "module:Name", and loaded only because it is named.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final

from memagent_graph.errors import StrategyError
from memagent_graph.own_code import load_own
from memagent_graph.reading.strategy import Strategy as Strategy
from memagent_graph.strategies.overwrite import Overwrite as Overwrite

_SHIPPED: Final = {"overwrite": "Overwrite", "refine": "Refine", "map_reduce": "MapReduce"}
_GROUP: Final = "memagent.strategies"


def strategy_names() -> tuple[str, ...]:
    """The names that `load_strategy` takes."""
    return (*_SHIPPED, *sorted(each.name for each in entry_points(group=_GROUP) if each.name not in _SHIPPED))


def load_strategy(given: Strategy | type[Strategy] | str | None) -> Strategy:
    """The strategy that is meant.

    Args:
        given: a name, "file.py:Name" or "module:Name", a strategy, or its class; None is the paper's.

    Raises:
        StrategyError: there is none of that name, it cannot be loaded, is not a strategy, or has the name of another.
    """
    if given is None:
        return Overwrite()
    if isinstance(given, str):
        return _named(given)
    return _checked(given, repr(given))


def _named(text: str) -> Strategy:
    if text in _SHIPPED:
        found: Strategy = getattr(import_module(f"{__name__}.{text}"), _SHIPPED[text])()
        return found
    if ":" in text:
        return _checked(load_own(text, what="a strategy", error=StrategyError), text)
    added = {each.name: each for each in entry_points(group=_GROUP)}
    if text in added:
        try:
            loaded = added[text].load()
        except Exception as error:
            raise StrategyError(
                f"the strategy {text!r} of another package cannot be loaded: {error}",
                hint=f"See {added[text].value}, or read with another --strategy.",
            ) from error
        return _checked(loaded, text)
    near = difflib.get_close_matches(text, strategy_names(), n=3, cutoff=0.5)
    raise StrategyError(
        f"there is no strategy {text!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "")
        + f'There are: {", ".join(strategy_names())}. One of your own is named as "file.py:Name".',
    )


def _checked(given: object, name: str) -> Strategy:
    made = given() if isinstance(given, type) else given
    if not isinstance(made, Strategy):
        raise StrategyError(
            f"{name} is not a strategy", hint="Name a subclass of memagent_graph.Strategy, or an instance of one."
        )
    module = type(made).__module__
    if made.name in _SHIPPED and not module.startswith(__name__):
        raise StrategyError(
            f"{name} has the name {made.name!r}, which a strategy of this package has",
            hint="Give it a name of its own: logs and resumed runs tell strategies apart by it.",
        )
    return made
