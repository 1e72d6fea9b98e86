"""Writes formulas as one line of text: those of Office (OMML) and of the web (MathML).

`(a+b)/2` for a fraction, `x^-3` and `a_(i+1)` for scripts, `√(x)` for a root. Both languages have the
same constructions under different names, so one function reads both.
"""

from __future__ import annotations

import re
from typing import Any, Final

_SINGLE_TERM: Final = re.compile(r"[-+−]?(?:(?:\d|[.,](?=\d))+|[^\W\d]\w*)")
_FRACTIONS: Final = frozenset(("f", "mfrac"))
_SUPERSCRIPTS: Final = frozenset(("sSup", "msup", "mover", "limUpp"))
_SUBSCRIPTS: Final = frozenset(("sSub", "msub", "munder", "limLow"))
_SUB_SUPERSCRIPTS: Final = frozenset(("sSubSup", "msubsup", "munderover"))
_PROPERTIES_SUFFIX: Final = "Pr"
_IGNORED_ELEMENTS: Final = frozenset(("annotation", "annotation-xml", "mphantom"))

FormulaElement = tuple[str, str, list[Any]]
"""An element: its name without a namespace, its text, and its children. The text of Office's properties, such as `chr`,
is their value."""


def format_script(sign: str, text: str) -> str:
    """Return a superscript or subscript: `^6`, `_i`, in parentheses if it is more than a number or a word."""
    return f"{sign}{text}" if _SINGLE_TERM.fullmatch(text) else f"{sign}({text})"


def linearize(formula: FormulaElement) -> str:  # noqa: PLR0911, PLR0912  one line for each construction
    """Return a formula as a line of text."""
    name, text, children = formula
    if name in _IGNORED_ELEMENTS:
        return ""
    if name == "semantics":
        children = children[:1]
    properties = next((child for child in children if child[0].endswith(_PROPERTIES_SUFFIX)), None)
    property_values = {child[0]: child[1] for child in properties[2]} if properties else {}
    operands = [linearize(child) for child in children if not child[0].endswith(_PROPERTIES_SUFFIX)]
    match name, operands:
        case _, [numerator, denominator] if name in _FRACTIONS:
            return f"{_parenthesize(numerator)}/{_parenthesize(denominator)}"
        case _, [base, script] if name in _SUPERSCRIPTS:
            return _parenthesize(base) + format_script("^", script)
        case _, [base, script] if name in _SUBSCRIPTS:
            return _parenthesize(base) + format_script("_", script)
        case _, [base, lower, upper] if name in _SUB_SUPERSCRIPTS:
            return _parenthesize(base) + format_script("_", lower) + format_script("^", upper)
        case "sPre", [lower, upper, base]:
            return format_script("_", lower) + format_script("^", upper) + base
        case "rad", [degree, base]:
            return f"root({base}, {degree})" if degree else f"√({base})"
        case "mroot", [base, degree]:
            return f"root({base}, {degree})"
        case "msqrt", _:
            return f"√({''.join(operands)})"
        case "nary", [lower, upper, base]:
            limits = (format_script("_", lower) if lower else "") + (format_script("^", upper) if upper else "")
            return f"{property_values.get('chr') or '∫'}{limits} {base}"
        case "d", _:
            separator = property_values.get("sepChr") or "|"
            return (
                (property_values.get("begChr", "(") or "")
                + separator.join(operands)
                + (property_values.get("endChr", ")") or "")
            )
        case "acc", [base]:
            return f"{_parenthesize(base)}{property_values.get('chr') or chr(0x302)}"
        case (("m" | "mtable" | "eqArr"), _):
            return "[" + "; ".join(operands) + "]"
        case (("mr" | "mtr"), _):
            return ", ".join(operands)
    return text + "".join(operands)


def _parenthesize(text: str) -> str:
    """Return an operand of a formula, in parentheses if it has more than one term."""
    is_single_term = (
        _SINGLE_TERM.fullmatch(text) or re.fullmatch(r"\([^()]*\)|.", text) or re.fullmatch(r"√\([^()]*\)", text)
    )
    return text if is_single_term else f"({text})"
