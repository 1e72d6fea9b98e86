"""The promised part of an outcome, and its comparison with that of a later version.

Not promised, and so replaced before anything is recorded or compared: times (by "<time>"), folders ("<folder>"), the
fake server's address ("<server>"), sizes in bytes of files ("<size>"), and ids that are drawn or counted by a database,
which are numbered in the order of their first appearance; any numbering will do that tells the same ids apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

TIMES = frozenset({"seconds", "began", "ended", "time"})
SIZES = frozenset({"bytes", "bytes_freed"})
COUNTED = frozenset({"id", "conversation", "call_id", "step"})
"""Keys of ids: rows of a database, and calls of the policy; "step" is also the number of an optimizer step."""
DRAWN = re.compile(r"\b\d{8}-\d{6}-[0-9a-f]{8}\b|\bin-[0-9a-f]{24}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
"""Ids that stand in texts: of runs, and of streams that have not ended."""
SHOWN_TIMES = re.compile(
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?\b|\b\d[\d.,]*(?= (?:ms|s|min|h|chunks/s|tokens/s)\b)"
)
SHOWN_SIZES = re.compile(r"\b\d[\d.,]* (?:bytes|kB|MB)\b")
NUMBERED = re.compile(r"<(row|reward|call_id|drawn) \d+>")
SERVER = re.compile(r"http://127\.0\.0\.1:\d+")


def to_json(value: Any) -> Any:
    """Return a value of the package in the types of JSON; arrays as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, dict):
        return {str(key): to_json(part) for key, part in value.items()}
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if hasattr(value, "__iter__"):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [to_json(item) for item in items]
    return str(value)


def normalise(value: Any, *folders: Any) -> Any:
    """Return the value, ready for JSON, without what is not promised."""
    names: dict[tuple[str, Any], str] = {}

    def make_name(kind: str, original: Any) -> str:
        return names.setdefault((kind, original), f"<{kind} {sum(key[0] == kind for key in names) + 1}>")

    def text(original: str) -> str:
        for folder in folders:
            original = original.replace(str(folder), "<folder>")
        return DRAWN.sub(lambda match: make_name("drawn", match[0]), SERVER.sub("<server>", original))

    def walk(key: str, item: Any) -> Any:
        if isinstance(item, dict):
            is_reward = {"name", "value", "source"} <= item.keys()  # whose own rows are another table's
            return {
                name: make_name("reward", inner) if is_reward and name == "id" and inner else walk(name, inner)
                for name, inner in item.items()
            }
        if isinstance(item, list):
            return [walk("", inner) for inner in item]
        if key in COUNTED and isinstance(item, int | str) and not isinstance(item, bool):
            return make_name("row" if isinstance(item, int) else key, item)
        if isinstance(item, int | float) and not isinstance(item, bool):
            for keys, word in ((TIMES, "<time>"), (SIZES, "<size>")):
                if key in keys:
                    return word
        return text(item) if isinstance(item, str) else item

    return walk("", to_json(value))


def simplify(output: str) -> str:
    """Return the output of a command for people, without times and without blanks at the ends of lines."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    lines = SHOWN_SIZES.sub("<size>", SHOWN_TIMES.sub("<time>", plain)).splitlines()
    narrow = (re.sub(r" {2,}", "  ", line).rstrip() for line in lines)
    return "\n".join("seconds  <time>" if line.startswith("seconds ") else line for line in narrow)


def differences(recorded: Any, actual: Any, tolerance: float = 0.0) -> list[str]:
    """Return the places where `actual` differs from the record. It may only have further keys.

    Args:
        recorded: the JSON of the version that made the promise.
        actual: the JSON of this version.
        tolerance: by how much numbers that are not whole may differ.
    """
    there: dict[str, str] = {}
    here: dict[str, str] = {}

    def same_text(one: str, other: str) -> bool:
        """Whether two texts are the same but for the numbering of ids."""
        pairs = list(zip(NUMBERED.finditer(one), NUMBERED.finditer(other), strict=False))
        is_same = all(there.setdefault(a[0], b[0]) == b[0] and here.setdefault(b[0], a[0]) == a[0] for a, b in pairs)
        return is_same and NUMBERED.sub(r"<\1>", one) == NUMBERED.sub(r"<\1>", other)

    def walk(one: Any, other: Any, where: str) -> Iterator[str]:
        if isinstance(one, dict) and isinstance(other, dict):
            for key, value in one.items():
                if key in other:
                    yield from walk(value, other[key], f"{where}.{key}")
                else:
                    yield f"{where}.{key} is missing"
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                yield f"{where} has {len(other)} entries, not {len(one)}"
            for place, pair in enumerate(zip(one, other, strict=False)):
                yield from walk(*pair, f"{where}[{place}]")
        elif isinstance(one, str) and isinstance(other, str):
            if not same_text(one, other):
                yield f"{where} is {other!r}, not {one!r}"
        elif isinstance(one, float) and isinstance(other, float):
            if not (one == other or abs(one - other) <= tolerance):
                yield f"{where} is {other!r}, not {one!r}"
        elif type(one) is not type(other) or one != other:
            yield f"{where} is {other!r}, not {one!r}"

    return list(walk(recorded, actual, ""))
