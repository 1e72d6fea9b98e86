"""Options after a strategy's name, as in "parallel:passes=3:width=128": the fields of its dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_type_hints

from memagent_graph.errors import StrategyError

_WRITTEN: Final = re.compile(r"((?::[A-Za-z_]\w*=[^:]*)*)\Z")
_SWITCH: Final = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_READ: Final[Mapping[type, Any]] = {bool: lambda text: _SWITCH[text.lower()], int: int, float: float, str: str}
_FORMS: Final = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Return a name, and the options after it as text.

    Raises:
        StrategyError: an option is given twice.
    """
    found = _WRITTEN.search(text)
    written = found[0] if found else ""
    pairs = [each.split("=", 1) for each in written.split(":")[1:]]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise StrategyError(f"{text} has an option twice", hint="Give each once.")
    return text[: len(text) - len(written)], options


def typed_options(kind: type, name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Options as values of the types of a strategy's fields.

    Args:
        kind: the strategy's class.
        name: the name that the user typed.
        options: as text.

    Raises:
        StrategyError: there is no such option, or its text does not fit its type.
    """
    if not options:
        return {}
    hints = get_type_hints(kind)
    known = {each.name: hints[each.name] for each in fields(kind)} if is_dataclass(kind) else {}
    known = {option: type_ for option, type_ in known.items() if type_ in _READ}
    found = {}
    for option, text in options.items():
        if option not in known:
            there = ", ".join(known) or "none; make its class a dataclass, and its fields are options"
            raise StrategyError(f"{name} has no option {option!r}", hint=f"Its options: {there}.")
        try:
            found[option] = _READ[known[option]](text)
        except (KeyError, ValueError) as error:
            raise StrategyError(
                f"{option}={text} is not valid", hint=f"{name} takes {_FORMS[known[option]]} for {option}."
            ) from error
    return found
