"""The promised part of an outcome, and its comparison with the outcome in a later version.

Values that are not promised are replaced before recording and comparing: times (by "<time>"), folders ("<folder>"), the
address of the fake server ("<server>"), file sizes ("<size>"), and random or database ids, which are numbered in the
order of their first appearance. Two numberings are equal if they distinguish the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

TIME_KEYS = frozenset({"seconds", "began", "ended", "time"})
SIZE_KEYS = frozenset({"bytes", "bytes_freed"})
ID_KEYS = frozenset({"id", "conversation", "call_id", "step"})
"""Keys of ids of database rows and policy calls; "step" is also the number of an optimizer step."""
RANDOM_ID = re.compile(
    r"\b\d{8}-\d{6}-[0-9a-f]{8}\b|\bin-[0-9a-f]{24}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
"""Ids in texts: of runs, and of unfinished streams."""
PRINTED_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?\b|\b\d[\d.,]*(?= (?:ms|s|min|h|chunks/s|tokens/s)\b)"
)
PRINTED_SIZE = re.compile(r"\b\d[\d.,]* (?:bytes|kB|MB)\b")
ID_PLACEHOLDER = re.compile(r"<(row|reward|call_id|drawn) \d+>")
SERVER_URL = re.compile(r"http://127\.0\.0\.1:\d+")


def to_json(value: Any) -> Any:
    """Return a value of the package as JSON types; arrays become lists."""
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
    """Return the value as JSON types, with placeholders for values that are not promised."""
    placeholders: dict[tuple[str, Any], str] = {}

    def number_id(kind: str, original: Any) -> str:
        number = sum(key[0] == kind for key in placeholders) + 1
        return placeholders.setdefault((kind, original), f"<{kind} {number}>")

    def replace_in_text(original: str) -> str:
        for folder in folders:
            original = original.replace(str(folder), "<folder>")
        return RANDOM_ID.sub(lambda match: number_id("drawn", match[0]), SERVER_URL.sub("<server>", original))

    def walk(key: str, item: Any) -> Any:
        if isinstance(item, dict):
            is_reward = {"name", "value", "source"} <= item.keys()  # rewards have their own table
            return {
                name: number_id("reward", inner) if is_reward and name == "id" and inner else walk(name, inner)
                for name, inner in item.items()
            }
        if isinstance(item, list):
            return [walk("", inner) for inner in item]
        if key in ID_KEYS and isinstance(item, int | str) and not isinstance(item, bool):
            return number_id("row" if isinstance(item, int) else key, item)
        if isinstance(item, int | float) and not isinstance(item, bool):
            for keys, placeholder in ((TIME_KEYS, "<time>"), (SIZE_KEYS, "<size>")):
                if key in keys:
                    return placeholder
        return replace_in_text(item) if isinstance(item, str) else item

    return walk("", to_json(value))


def simplify(output: str) -> str:
    """Return the printed output of a command without colors, times, sizes, and spaces that only align."""
    plain_text = re.sub(r"\x1b\[[\d;]*m", "", output)
    lines = PRINTED_SIZE.sub("<size>", PRINTED_TIME.sub("<time>", plain_text)).splitlines()
    lines = [re.sub(r" {2,}", "  ", line).rstrip() for line in lines]
    return "\n".join("seconds  <time>" if line.startswith("seconds ") else line for line in lines)


def find_differences(recorded: Any, actual: Any, tolerance: float = 0.0) -> list[str]:
    """Return where `actual` differs from the record; only additional keys are allowed.

    Args:
        recorded: the JSON of the version that made the promise.
        actual: the JSON of this version.
        tolerance: the largest allowed difference between two floats.
    """
    actual_ids: dict[str, str] = {}
    recorded_ids: dict[str, str] = {}

    def is_same_text(old: str, new: str) -> bool:
        """Return whether two texts differ at most in the numbering of ids."""
        for match in zip(ID_PLACEHOLDER.finditer(old), ID_PLACEHOLDER.finditer(new), strict=False):
            a, b = match[0][0], match[1][0]
            if actual_ids.setdefault(a, b) != b or recorded_ids.setdefault(b, a) != a:
                return False
        return ID_PLACEHOLDER.sub(r"<\1>", old) == ID_PLACEHOLDER.sub(r"<\1>", new)

    def walk(old: Any, new: Any, path: str) -> Iterator[str]:
        if isinstance(old, dict) and isinstance(new, dict):
            for key, value in old.items():
                if key in new:
                    yield from walk(value, new[key], f"{path}.{key}")
                else:
                    yield f"{path}.{key} is missing"
        elif isinstance(old, list) and isinstance(new, list):
            if len(old) != len(new):
                yield f"{path} has {len(new)} entries, not {len(old)}"
            for index, pair in enumerate(zip(old, new, strict=False)):
                yield from walk(*pair, f"{path}[{index}]")
        elif isinstance(old, str) and isinstance(new, str):
            if not is_same_text(old, new):
                yield f"{path} is {new!r}, not {old!r}"
        elif isinstance(old, float) and isinstance(new, float):
            if not (old == new or abs(old - new) <= tolerance):
                yield f"{path} is {new!r}, not {old!r}"
        elif type(old) is not type(new) or old != new:
            yield f"{path} is {new!r}, not {old!r}"

    return list(walk(recorded, actual, ""))
