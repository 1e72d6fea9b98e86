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
import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from memagent_graph.errors import CorpusError
from memagent_graph.response_format import ResponseFormat

_INT64: Final = range(-(2**63), 2**63)
_NAME_PREFIX: Final = "value_"
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


_KIND_BY_TYPE: Final = {
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

    def make_arrow_type(self, arrow: Any) -> Any:
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


def make_typed_columns(response_format: ResponseFormat, other_columns: Collection[str]) -> tuple[TypedColumn, ...]:
    """Return the columns for a schema, in the order of its properties.

    Args:
        response_format: the form of the answers.
        other_columns: names of the table's other columns. A property with one of these names gets the prefix `value_`.
            Case is ignored, because some readers of Parquet ignore it.

    Raises:
        CorpusError: two properties would have the same column name.
    """
    names = {name.casefold() for name in other_columns}
    columns: dict[str, TypedColumn] = {}
    for property_name, schema in response_format.properties.items():
        name = f"{_NAME_PREFIX}{property_name}" if property_name.casefold() in names else property_name
        if other_column := columns.get(name.casefold()):
            raise CorpusError(
                f"the schema's properties {other_column.property} and {property_name} would be the same column, {name}",
                hint="Rename one of them. Column names that differ only in case are not allowed.",
            )
        columns[name.casefold()] = TypedColumn(name, property_name, *_find_kind(response_format, schema))
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


def _find_kind(response_format: ResponseFormat, schema: Any) -> tuple[ColumnKind, bool]:
    """Return the kind of a property's column, and whether the column is a list."""
    alternatives = _list_alternatives(response_format, schema)
    if alternatives and all(
        alternative.get("type") == "array" and "prefixItems" not in alternative for alternative in alternatives
    ):
        item_schemas = [_list_alternatives(response_format, alternative.get("items")) for alternative in alternatives]
        if not all(item_schemas):  # an array whose items can only be null
            return ColumnKind.JSON, False
        kind = _merge_kinds(itertools.chain.from_iterable(item_schemas))
        return (ColumnKind.JSON, False) if kind is ColumnKind.JSON else (kind, True)
    return _merge_kinds(alternatives), False


def _list_alternatives(response_format: ResponseFormat, schema: Any, depth: int = 4) -> list[Mapping[str, Any]]:
    """Split a schema into alternatives with at most one type each, without null."""
    schema = response_format.resolve(schema)
    for keyword in ("anyOf", "oneOf", "allOf"):
        subschemas = schema.get(keyword)
        if isinstance(subschemas, list) and (keyword != "allOf" or len(subschemas) == 1) and "type" not in schema:
            if not depth:
                return [{}]
            return [
                alternative
                for subschema in subschemas
                for alternative in _list_alternatives(response_format, subschema, depth - 1)
            ]
    json_type = schema.get("type")
    if json_type is None:
        return [{}]
    json_types = json_type if isinstance(json_type, list) else [json_type]
    return [{**schema, "type": type_name} for type_name in json_types if type_name != "null"]


def _merge_kinds(alternatives: Iterable[Mapping[str, Any]]) -> ColumnKind:
    """Return a kind that can store the values of all these schemas without loss."""
    kinds = {
        ColumnKind.DATE
        if alternative.get("type") == "string" and alternative.get("format") == "date"
        else _KIND_BY_TYPE.get(str(alternative.get("type")), ColumnKind.JSON)
        for alternative in alternatives
    }
    if kinds == {ColumnKind.INTEGER, ColumnKind.NUMBER}:
        return ColumnKind.NUMBER
    if kinds == {ColumnKind.DATE, ColumnKind.TEXT}:
        return ColumnKind.TEXT
    return kinds.pop() if len(kinds) == 1 else ColumnKind.JSON


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
