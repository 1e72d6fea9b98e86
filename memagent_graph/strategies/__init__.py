"""Ways of reading, by name: those that come with the package, those of other packages, and a user's own.

overwrite    the paper's: the whole memory is rewritten at each chunk
gated        memory is rewritten only where a chunk has something new; with stop=yes reading may end early
refine       a draft of the answer, improved at each chunk
map_reduce   what each chunk contributes, side by side, then merged
parallel     chunks read side by side, what they contribute merged, in up to `passes` passes
segments     the paper's loop in several segments side by side, whose memories are merged
reread       after a whole read, sub-questions, for each of which the document is read again
recall       the paper's, and what an earlier memory or chunk said can be looked up

Options stand behind a name: "gated:stop=yes", "parallel:passes=3:width=128". A rule for stopping early is added with a
plus sign: "overwrite+converged", "refine+converged:every=2".

Another package adds a strategy by an entry point of the group "memagent.strategies". A user's own is named as
"path/to/file.py:Name" or "module:Name", and loaded only because it is named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, get_type_hints

from memagent_graph.errors import StrategyError
from memagent_graph.own_code import load_own
from memagent_graph.reading.strategy import Strategy as Strategy
from memagent_graph.strategies.overwrite import Overwrite as Overwrite

_SHIPPED: Final = {
    "overwrite": "Overwrite",
    "gated": "Gated",
    "refine": "Refine",
    "map_reduce": "MapReduce",
    "parallel": "Parallel",
    "segments": "Segments",
    "reread": "Reread",
    "recall": "Recall",
}
_STOP_RULES: Final = {"converged": "Converged"}
_GROUP: Final = "memagent.strategies"
_OPTIONS: Final = re.compile(r"((?::[A-Za-z_]\w*=[^:]*)*)")
_SWITCH: Final = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def strategy_names() -> tuple[str, ...]:
    """The names that `load_strategy` takes."""
    return (*_SHIPPED, *sorted(each.name for each in entry_points(group=_GROUP) if each.name not in _SHIPPED))


def is_strategy(text: str) -> bool:
    """Whether a text has the form of a strategy's name, rather than of something else that can be evaluated."""
    return ":" in text or "+" in text or text in strategy_names()


def load_strategy(given: Strategy | type[Strategy] | str | None) -> Strategy:
    """The strategy that is meant.

    Args:
        given: a name, "file.py:Name" or "module:Name", each with options and a stop rule if wanted; a strategy, or its
            class; None is the paper's.

    Raises:
        StrategyError: there is none of that name, it cannot be loaded, is not a strategy, or has the name of another;
            an option does not exist, or has no such value.
    """
    if given is None:
        return Overwrite()
    if isinstance(given, str):
        return _with_stop_rule(given)
    return _checked(given, repr(given), {})


def _with_stop_rule(text: str) -> Strategy:
    before, plus, after = text.rpartition("+")
    rule, options = _split(after)
    if not plus or rule not in _STOP_RULES:
        if plus and re.fullmatch(r"\w+", rule) and before.split(":")[0] in strategy_names():
            raise StrategyError(
                f"there is no rule {rule!r} for stopping early", hint=f"There is: {', '.join(_STOP_RULES)}."
            )
        return _named(text)
    if _split(before.rpartition("+")[2])[0] in _STOP_RULES and "+" in before:
        raise StrategyError(f"{text} has two rules for stopping early", hint="Give one, in --strategy or in --stop.")
    made: Strategy = _configured(_class_of(_STOP_RULES, rule), rule, options, strategy=_named(before))
    return made


def _named(text: str) -> Strategy:
    name, options = _split(text)
    if name in _SHIPPED:
        return _checked(_class_of(_SHIPPED, name), name, options)
    if ":" in name:
        return _checked(load_own(name, what="a strategy", error=StrategyError), name, options)
    added = {each.name: each for each in entry_points(group=_GROUP)}
    if name in added:
        try:
            loaded = added[name].load()
        except Exception as error:
            raise StrategyError(
                f"the strategy {name!r} of another package cannot be loaded: {error}",
                hint=f"See {added[name].value}, or read with another --strategy.",
            ) from error
        return _checked(loaded, name, options)
    if name in _STOP_RULES:
        raise StrategyError(f"{name} is a rule for stopping early", hint=f"Write overwrite+{text}, or --stop {text}.")
    near = difflib.get_close_matches(name, strategy_names(), n=3, cutoff=0.5)
    raise StrategyError(
        f"there is no strategy {name!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "")
        + f'There are: {", ".join(strategy_names())}. One of your own is named as "file.py:Name".',
    )


def _class_of(names: Mapping[str, str], name: str) -> Any:
    return getattr(import_module(f"{__name__}.{name}"), names[name])


def _split(text: str) -> tuple[str, dict[str, str]]:
    """A name, and the options behind it as they are written."""
    found = re.search(rf"{_OPTIONS.pattern}\Z", text)
    written = found[0] if found else ""
    pairs = [each.split("=", 1) for each in written.split(":")[1:]]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise StrategyError(f"{text} has an option twice", hint="Give each once.")
    return text[: len(text) - len(written)], options


def _checked(given: object, name: str, options: Mapping[str, str]) -> Strategy:
    made = given() if isinstance(given, type) and not options else given
    if isinstance(made, Strategy) and options:
        made = replace(made, **_typed(type(made), name, options)) if is_dataclass(made) else _no_options(name)
    elif isinstance(made, type) and issubclass(made, Strategy):
        made = _configured(made, name, options)
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


def _configured(kind: Any, name: str, options: Mapping[str, str], **given: Any) -> Any:
    return kind(**given, **_typed(kind, name, options))


def _typed(kind: type, name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Options as values of the types that a strategy's fields have.

    Raises:
        StrategyError: there is no such option, or it is not written as its type is.
    """
    if not options:
        return {}
    hints = get_type_hints(kind)
    known = {each.name: hints[each.name] for each in fields(kind)} if is_dataclass(kind) else {}
    known = {each: type_ for each, type_ in known.items() if type_ in _READ}
    found = {}
    for option, text in options.items():
        if option not in known:
            there = ", ".join(known) or "none"
            raise StrategyError(f"{name} has no option {option!r}", hint=f"Its options: {there}.")
        try:
            found[option] = _READ[known[option]](text)
        except (KeyError, ValueError) as error:
            raise StrategyError(
                f"{option}={text} is not understood", hint=f"{name} takes {_FORMS[known[option]]} for {option}."
            ) from error
    return found


def _no_options(name: str) -> Any:
    raise StrategyError(f"{name} has no options", hint="Make its class a dataclass; its fields are its options.")


_READ: Final[Mapping[type, Any]] = {bool: lambda text: _SWITCH[text.lower()], int: int, float: float, str: str}
_FORMS: Final = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}
