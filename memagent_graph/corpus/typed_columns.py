"""Typed columns of a table whose answers have a schema: one for each of the schema's top-level properties.

| property | column |
|---|---|
| string; one with the format `date` | string; date32 |
| integer, number, boolean | int64, float64, bool |
| an array of one of these | a list of them |
| anything else: objects, nested arrays, several types | string, with the value as JSON |

Null is allowed everywhere, and is not counted as a type. An answer that is not an object has no typed columns. A value
that its column cannot hold is null there, and stands in `value` as it is.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from memagent_graph.errors import CorpusError
from memagent_graph.response_format import ResponseFormat

_INT64: Final = range(-(2**63), 2**63)
_OF_OTHERS: Final = "value_"
"""Before the name of a property that another column has."""


class ColumnKind(Enum):
    """What a column holds; the value is the type's name in Arrow."""

    TEXT = "string"
    INTEGER = "int64"
    NUMBER = "float64"
    BOOLEAN = "bool"
    DATE = "date32"
    JSON = "json"
    """Text with a value as JSON."""


_KINDS: Final = {
    "string": ColumnKind.TEXT,
    "integer": ColumnKind.INTEGER,
    "number": ColumnKind.NUMBER,
    "boolean": ColumnKind.BOOLEAN,
}
_TYPES: Final = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
"""Types of JSON values; all others are objects."""


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column of the table for one property of the schema."""

    name: str
    property: str
    kind: ColumnKind
    is_list: bool = False

    def arrow_type(self, arrow: Any) -> Any:
        """Its type.

        Args:
            arrow: the module `pyarrow`.
        """
        kind = arrow.string() if self.kind is ColumnKind.JSON else arrow.type_for_alias(self.kind.value)
        return arrow.list_(kind) if self.is_list else kind

    def held(self, value: Any) -> Any:
        """A value of the property as the column holds it.

        Raises:
            ValueError: the column cannot hold it.
        """
        if value is None:
            return None
        if not self.is_list:
            return _held(self.kind, value)
        if not isinstance(value, list):
            raise ValueError("it is not a list")
        return [None if each is None else _held(self.kind, each) for each in value]


class TypedValues(NamedTuple):
    """An answer's values by column, and what the columns could not hold."""

    values: dict[str, Any]
    not_held: tuple[str, ...]
    """As in "revenue: 10000000000000000000 has more than 64 bits"."""


def columns_of(form: ResponseFormat, taken: Collection[str]) -> tuple[TypedColumn, ...]:
    """The columns for a schema, in its order.

    Args:
        form: the form of the answers.
        taken: names of the table's other columns. A property with one of these names, in any case, gets `value_` before
            its name: some readers of Parquet do not distinguish case.

    Raises:
        CorpusError: two properties would have one column.
    """
    names = {name.casefold() for name in taken}
    made: list[TypedColumn] = []
    for each, schema in form.properties.items():
        name = f"{_OF_OTHERS}{each}" if each.casefold() in names else each
        kind, is_list = _kind(form, form.resolved(schema))
        made.append(TypedColumn(name, each, kind, is_list))
    seen: dict[str, str] = {}
    for column in made:
        key = column.name.casefold()
        if key in seen:
            raise CorpusError(
                f"the schema's properties {seen[key]} and {column.property} would be the same column, {column.name}",
                hint="Rename one of the two: names of columns cannot differ by case alone.",
            )
        seen[key] = column.property
    return tuple(made)


def typed_values(columns: Collection[TypedColumn], value: Any) -> TypedValues:
    """An answer's value in columns; all null if it is not an object.

    Args:
        columns: those of its schema.
        value: JSON values.
    """
    given = value if isinstance(value, Mapping) else {}
    values, not_held = dict[str, Any](), list[str]()
    for column in columns:
        try:
            values[column.name] = column.held(given.get(column.property))
        except (ValueError, OverflowError) as error:
            values[column.name] = None
            not_held.append(f"{column.name}: {error}")
    return TypedValues(values, tuple(not_held))


def _kind(form: ResponseFormat, schema: Mapping[str, Any]) -> tuple[ColumnKind, bool]:
    """What a property's column holds, and whether it is a list of that."""
    options = _options(form, schema)
    if options and all(each.get("type") == "array" and "prefixItems" not in each for each in options):
        kinds = {_one_kind(_options(form, form.resolved(each.get("items")))) for each in options}
        kind = _common(kinds)
        return (ColumnKind.JSON, False) if kind is ColumnKind.JSON else (kind, True)
    return _one_kind(options), False


def _options(form: ResponseFormat, schema: Mapping[str, Any], depth: int = 4) -> list[Mapping[str, Any]]:
    """The schemas of which a value has one, each with at most one type; null is left out."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(keyword)
        if isinstance(inner, list) and (keyword != "allOf" or len(inner) == 1) and "type" not in schema:
            if not depth:
                return [{}]
            return [each for one in inner for each in _options(form, form.resolved(one), depth - 1)]
    kind = schema.get("type")
    if kind is None:
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(constants, list):
            return [{}]
        return [
            {"type": name}
            for name in dict.fromkeys(_TYPES.get(type(each), "object") for each in constants)
            if name != "null"
        ]
    kinds = kind if isinstance(kind, list) else [kind]
    return [{**schema, "type": each} for each in kinds if each != "null"]


def _one_kind(options: Collection[Mapping[str, Any]]) -> ColumnKind:
    kinds = {
        ColumnKind.DATE
        if each.get("type") == "string" and each.get("format") == "date"
        else _KINDS.get(str(each.get("type")), ColumnKind.JSON)
        for each in options
    }
    return _common(kinds)


def _common(kinds: Collection[ColumnKind]) -> ColumnKind:
    """One that holds all of them without a loss."""
    found = set(kinds)
    if found == {ColumnKind.INTEGER, ColumnKind.NUMBER}:
        return ColumnKind.NUMBER
    if found == {ColumnKind.DATE, ColumnKind.TEXT}:
        return ColumnKind.TEXT
    return found.pop() if len(found) == 1 else ColumnKind.JSON


def _held(kind: ColumnKind, value: Any) -> Any:
    """A value as a column of a kind holds it.

    Raises:
        ValueError, OverflowError: it does not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case ColumnKind.JSON:
            return json.dumps(value, ensure_ascii=False)
        case ColumnKind.INTEGER if is_number and value == int(value):
            if int(value) not in _INT64:
                raise ValueError(f"{value} has more than 64 bits")
            return int(value)
        case ColumnKind.NUMBER if is_number:
            return float(value)
        case ColumnKind.BOOLEAN if isinstance(value, bool):
            return value
        case ColumnKind.TEXT if isinstance(value, str):
            return value
        case ColumnKind.DATE if isinstance(value, str):
            return datetime.date.fromisoformat(value)
    raise ValueError(f"{json.dumps(value, ensure_ascii=False)[:80]} is not of the type {kind.value}")
