"""Typed columns for answers with a schema: one column for each top-level property.

| property | column |
|---|---|
| string; string with the format `date` | string; date32 |
| integer, number, boolean | int64, float64, bool |
| array of one of these | list of that type |
| anything else: objects, nested arrays, several types | string, with the value as JSON |

Null is always allowed and does not count as a type. If an answer is not an object, its typed columns are null. If a
column cannot store a value, it is null in this row, and the value is only in the column `value`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from memagent_graph.errors import CorpusError
from memagent_graph.response_format import ResponseFormat

_INT64: Final = range(-(2**63), 2**63)
_PREFIX: Final = "value_"
"""Prefix for a property with the same name as another column of the table."""


class ColumnKind(Enum):
    """The type of a column's values. The enum's value is the name of the Arrow type."""

    TEXT = "string"
    INTEGER = "int64"
    NUMBER = "float64"
    BOOLEAN = "bool"
    DATE = "date32"
    JSON = "json"
    """A string that contains the value as JSON."""


_KINDS: Final = {
    "string": ColumnKind.TEXT,
    "integer": ColumnKind.INTEGER,
    "number": ColumnKind.NUMBER,
    "boolean": ColumnKind.BOOLEAN,
}


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """The column of one property of the schema."""

    name: str
    property: str
    kind: ColumnKind
    is_list: bool = False

    def arrow_type(self, arrow: Any) -> Any:
        """Return the column's Arrow type.

        Args:
            arrow: the module `pyarrow`.
        """
        kind = arrow.string() if self.kind is ColumnKind.JSON else arrow.type_for_alias(self.kind.value)
        return arrow.list_(kind) if self.is_list else kind

    def convert(self, value: Any) -> Any:
        """Convert a value of the property to the column's type.

        Raises:
            ValueError, OverflowError: the column cannot store the value.
        """
        if value is None:
            return None
        if not self.is_list:
            return _convert_value(self.kind, value)
        if not isinstance(value, list):
            raise ValueError("it is not a list")
        return [None if item is None else _convert_value(self.kind, item) for item in value]


def make_typed_columns(form: ResponseFormat, other_columns: Collection[str]) -> tuple[TypedColumn, ...]:
    """Return the columns for a schema, in the order of its properties.

    Args:
        form: the form of the answers.
        other_columns: names of the table's other columns. A property with one of these names gets the prefix `value_`.
            Case is ignored, because some readers of Parquet ignore it.

    Raises:
        CorpusError: two properties would have the same column name.
    """
    names = {name.casefold() for name in other_columns}
    columns: dict[str, TypedColumn] = {}
    for key, schema in form.properties.items():
        name = f"{_PREFIX}{key}" if key.casefold() in names else key
        if other := columns.get(name.casefold()):
            raise CorpusError(
                f"the schema's properties {other.property} and {key} would be the same column, {name}",
                hint="Rename one of them. Column names that differ only in case are not allowed.",
            )
        columns[name.casefold()] = TypedColumn(name, key, *_find_kind(form, form.resolve(schema)))
    return tuple(columns.values())


def convert_values(columns: Collection[TypedColumn], value: Any) -> tuple[dict[str, Any], list[str]]:
    """Convert an answer's value to typed columns. All of them are null if the value is not an object.

    Args:
        columns: the typed columns of the schema.
        value: the answer as a JSON value.

    Returns:
        The values by column, and messages about those that a column cannot store, such as "revenue:
        10000000000000000000 has more than 64 bits".
    """
    answer = value if isinstance(value, Mapping) else {}
    values, problems = dict[str, Any](), list[str]()
    for column in columns:
        try:
            values[column.name] = column.convert(answer.get(column.property))
        except (ValueError, OverflowError) as error:
            values[column.name] = None
            problems.append(f"{column.name}: {error}")
    return values, problems


def _find_kind(form: ResponseFormat, schema: Mapping[str, Any]) -> tuple[ColumnKind, bool]:
    """Return the kind of a property's column, and whether the column is a list."""
    options = _list_alternatives(form, schema)
    if options and all(option.get("type") == "array" and "prefixItems" not in option for option in options):
        kinds = {_merge_options(_list_alternatives(form, form.resolve(option.get("items")))) for option in options}
        kind = _merge_kinds(kinds)
        return (ColumnKind.JSON, False) if kind is ColumnKind.JSON else (kind, True)
    return _merge_options(options), False


def _list_alternatives(form: ResponseFormat, schema: Mapping[str, Any], depth: int = 4) -> list[Mapping[str, Any]]:
    """Split a schema into alternatives with at most one type each, without null."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(keyword)
        if isinstance(inner, list) and (keyword != "allOf" or len(inner) == 1) and "type" not in schema:
            if not depth:
                return [{}]
            return [option for part in inner for option in _list_alternatives(form, form.resolve(part), depth - 1)]
    kind = schema.get("type")
    if kind is None:
        return [{}]
    kinds = kind if isinstance(kind, list) else [kind]
    return [{**schema, "type": name} for name in kinds if name != "null"]


def _merge_options(options: Collection[Mapping[str, Any]]) -> ColumnKind:
    kinds = {
        ColumnKind.DATE
        if option.get("type") == "string" and option.get("format") == "date"
        else _KINDS.get(str(option.get("type")), ColumnKind.JSON)
        for option in options
    }
    return _merge_kinds(kinds)


def _merge_kinds(kinds: Collection[ColumnKind]) -> ColumnKind:
    """Return a kind that can store values of all these kinds without loss."""
    distinct = set(kinds)
    if distinct == {ColumnKind.INTEGER, ColumnKind.NUMBER}:
        return ColumnKind.NUMBER
    if distinct == {ColumnKind.DATE, ColumnKind.TEXT}:
        return ColumnKind.TEXT
    return distinct.pop() if len(distinct) == 1 else ColumnKind.JSON


def _convert_value(kind: ColumnKind, value: Any) -> Any:
    """Convert a value to a kind of column.

    Raises:
        ValueError, OverflowError: the column cannot store the value.
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
            if float(value) != value:
                raise ValueError(f"{value} cannot be a 64-bit floating-point number without rounding")
            return float(value)
        case ColumnKind.BOOLEAN if isinstance(value, bool):
            return value
        case ColumnKind.TEXT if isinstance(value, str):
            return value
        case ColumnKind.DATE if isinstance(value, str):
            return datetime.date.fromisoformat(value)
    raise ValueError(f"{json.dumps(value, ensure_ascii=False)[:80]} is not of the type {kind.value}")
