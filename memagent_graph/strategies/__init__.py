"""Strategies by name, from this package, other packages, or the user's own code.

overwrite    as in the paper: the policy rewrites the whole memory at each chunk
gated        memory is rewritten only if a chunk has something new; with stop=yes reading may end early
refine       a draft of the answer, improved at each chunk
map_reduce   findings of each chunk, in parallel, then merged
parallel     chunks read in parallel, findings merged, in up to `passes` passes
segments     the loop of the paper in several segments in parallel; the memories are merged
reread       after a full read, the document is read again for each sub-question
recall       the loop of the paper, in which the policy can search earlier memories and chunks

Three strategies ask once, about an excerpt of the document. They are fast, and serve as baselines:

retrieval           the chunks that are most similar to the question
middle_truncation   the document's beginning and end
full_context        the whole document, if it fits in the window

Options follow a name: "gated:stop=yes", "parallel:passes=3:width=128". With `passes=2`, `overwrite`, `gated` and
`refine` read the document again.

Other packages add strategies with entry points in the group "memagent.strategies". The user's own code is loaded only
by its name, "path/to/file.py:Name" or "module:Name".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pkgutil import resolve_name
from typing import Any, Final, get_type_hints

from memagent_graph.entry_points import STRATEGIES, list_entry_points, make_entry_point_error
from memagent_graph.errors import ProfileError, StrategyError
from memagent_graph.own_code import load_own_code
from memagent_graph.plain_text import did_you_mean
from memagent_graph.policies.profile import Profile
from memagent_graph.reading.strategy import Strategy as Strategy
from memagent_graph.settings import parse_text
from memagent_graph.strategies.overwrite import Overwrite as Overwrite

_BUILT_IN_STRATEGIES: Final = {
    "overwrite": "overwrite:Overwrite",
    "gated": "gated:Gated",
    "refine": "overwrite:Refine",
    "map_reduce": "map_reduce:MapReduce",
    "parallel": "map_reduce:Parallel",
    "segments": "segments:Segments",
    "reread": "reread:Reread",
    "recall": "recall:Recall",
    "retrieval": "excerpts:Retrieval",
    "middle_truncation": "excerpts:MiddleTruncation",
    "full_context": "excerpts:FullContext",
}
"""Module and class by name. A module is imported when its strategy is chosen."""


def list_strategy_names() -> tuple[str, ...]:
    """Return the names that `load_strategy` takes."""
    return tuple(dict.fromkeys((*_BUILT_IN_STRATEGIES, *list_entry_points(STRATEGIES))))


def is_strategy(text: str) -> bool:
    """Return whether a text names a strategy, and not another system of evaluations."""
    return ":" in text or text in list_strategy_names()


def choose_strategy(choice: Strategy | type[Strategy] | str | None, profile: Profile | None) -> Strategy:
    """Return the chosen strategy, or else the strategy in the policy's profile, or else overwrite.

    A profile may come from somebody else. So it must not name code, or a strategy that shows the policy only a part of
    the document. Only the caller may choose them.

    Raises:
        ProfileError: the profile names such a strategy, or an unknown strategy.
        StrategyError: as for `load_strategy`.
    """
    if choice is not None or profile is None or not profile.strategy:
        return load_strategy(choice)
    try:
        strategy = load_strategy(profile.strategy, allow_own_code=False)
    except StrategyError as error:
        raise ProfileError(f"the policy's memagent.json: {error.message}", hint=error.hint) from error
    if not strategy.reads_all:
        raise ProfileError(
            f"the policy's memagent.json names the strategy {profile.strategy}, which does not read the whole document",
            hint=f"Choose it yourself (--strategy {profile.strategy}), or take it out of memagent.json.",
        )
    return strategy


def load_strategy(strategy: Strategy | type[Strategy] | str | None, *, allow_own_code: bool = True) -> Strategy:
    """Return the strategy for a name, a class or an object; overwrite for None.

    Args:
        strategy: a strategy, its class, or its name: "name", "file.py:Name" or "module:Name", perhaps with options.
        allow_own_code: whether a name may refer to the user's own code. Use False for names from files.

    Raises:
        StrategyError: the name is unknown, the code cannot be loaded or is not a strategy, two strategies have the same
            name, or an option is unknown or has an invalid value.
    """
    if strategy is None:
        return Overwrite()
    if not isinstance(strategy, str):
        return _make_strategy(strategy, repr(strategy), {})
    name, options = split_options(strategy)
    if name in _BUILT_IN_STRATEGIES:
        return _make_strategy(resolve_name(f"{__name__}.{_BUILT_IN_STRATEGIES[name]}"), name, options)
    if name.partition(":")[0] in list_strategy_names():
        raise StrategyError(
            f"{strategy} has an option without a value", hint=f"Write it as {name}=VALUE, such as gated:stop=yes."
        )
    if ":" in name and not allow_own_code:
        raise StrategyError(
            f"{strategy} names code, which runs only if you name it yourself, not if a file does",
            hint=f"If you trust it, choose it: --strategy {strategy}.",
        )
    if ":" in name:
        return _make_strategy(load_own_code(name, noun="a strategy", error=StrategyError), name, options)
    entries = list_entry_points(STRATEGIES)
    if name in entries:
        try:
            loaded_object = entries[name].load()
        except Exception as error:  # another package can raise anything
            raise make_entry_point_error(entries[name], "the strategy", error, StrategyError) from error
        return _make_strategy(loaded_object, name, options)
    names = list_strategy_names()
    hint = f'Choose one of: {", ".join(names)}. Write your own as "file.py:Name".'
    raise StrategyError(f"there is no strategy {name!r}", hint=did_you_mean(name, names, hint))


def _make_strategy(strategy: Any, name: str, options: Mapping[str, str]) -> Strategy:
    """Return a strategy, or an instance of a strategy's class, with these options."""
    strategy_class = strategy if isinstance(strategy, type) else type(strategy)
    if not issubclass(strategy_class, Strategy):
        raise StrategyError(
            f"{name} is not a strategy", hint="Give a subclass of memagent_graph.Strategy, or an instance of one."
        )
    values = convert_options(strategy_class, name, options)
    instance: Strategy = strategy
    if strategy_class is strategy:
        instance = strategy_class(**values)
    elif values:
        instance = replace(strategy, **values)
    if instance.name in _BUILT_IN_STRATEGIES and not strategy_class.__module__.startswith(__name__):
        raise StrategyError(
            f"{name} has the name {instance.name!r}, which is the name of a strategy of this package",
            hint="Choose another name: logs and resumed runs identify strategies by name.",
        )
    return instance


_OPTIONS_SUFFIX: Final = re.compile(r"((?::[A-Za-z_]\w*=[^:]*)*)\Z")
_OPTION_TYPES: Final = (bool, int, float, str)


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Return a name, and the options after it as text.

    Raises:
        StrategyError: an option is given twice.
    """
    match = _OPTIONS_SUFFIX.search(text)
    suffix = match[0] if match else ""
    pairs = [option.split("=", 1) for option in suffix.split(":")[1:]]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise StrategyError(f"{text} has an option twice", hint="Write each option once.")
    return text[: len(text) - len(suffix)], options


def convert_options(strategy_class: type, name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of options, converted to the types of the strategy's fields.

    Args:
        strategy_class: the strategy's class.
        name: the name that the user typed.
        options: as text.

    Raises:
        StrategyError: there is no such option, or its text does not fit its type.
    """
    if not options:
        return {}
    hints = get_type_hints(strategy_class)
    field_names = [field.name for field in fields(strategy_class)] if is_dataclass(strategy_class) else []
    option_types = {name: hints[name] for name in field_names if hints[name] in _OPTION_TYPES}
    values = {}
    for option, text in options.items():
        if option not in option_types:
            option_names = ", ".join(option_types) or "none; make its class a dataclass, and its fields are options"
            raise StrategyError(f"{name} has no option {option!r}", hint=f"Its options: {option_names}.")
        try:
            values[option] = parse_text(text, option_types[option])
        except ValueError as error:
            raise StrategyError(f"{option}={text} is not valid for {name}", hint=f"{error}.") from error
    return values
