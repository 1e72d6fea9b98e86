"""A corpus with a schema has typed columns; another schema is refused, and bad answers are reported as errors."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel, Field, create_model, field_serializer
from support.corpus_world import read_rows
from support.scripts import extract, read_perfectly
from unit.corpus.test_corpus_run import CorpusFixture

from memagent_corpus import CorpusReader, open_inputs
from memagent_corpus.corpus_run import CorpusSummary
from memagent_corpus.corpus_session import estimate_corpus
from memagent_corpus.table_folder import describe_differences
from memagent_corpus.typed_columns import convert_values, make_typed_columns
from memagent_graph import Budget, MemAgent
from memagent_graph.errors import BudgetError, CorpusError
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource

QUESTION = "What is the key of harbor?"
LARGE_BUDGET = Budget(context_window=2000, question_tokens=200, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "key": {"type": ["integer", "null"]}},
    "required": ["place", "key"],
}


def answer_in_json(prompt: str) -> str:
    """Read perfectly, and answer with the place and the key as JSON."""
    reply = read_perfectly(prompt)
    key = reply.removeprefix("\\boxed{").removesuffix("}")
    if "<schema>" not in prompt:
        return reply
    return json.dumps({"place": "harbor", "key": int(key) if key.isdigit() else None})


class TypedCorpus(CorpusFixture):
    """Documents with a different key each, and runs over them with a schema."""

    def write_keys(self, *keys: int) -> None:
        for key in keys:
            self.write(f"d{key}.txt", key)

    def agent(self, **options: Any) -> MemAgent:
        return super().agent(budget=LARGE_BUDGET, **options)

    def run_with_schema(
        self, schema: ResponseFormatSource | None, answer: Callable[[str], str] = answer_in_json, **options: Any
    ) -> CorpusSummary:
        self.answer = answer
        return self.run(QUESTION, schema=schema, **options)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["document"]: row for row in read_rows(self.out)}


@pytest.fixture
def corpus(tmp_path: Path, make_reader: Any) -> TypedCorpus:
    return TypedCorpus(tmp_path, make_reader)


# Columns


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: str
    born: datetime.date


COLUMN_EXAMPLES: dict[str, tuple[Any, Any, Any, Any]] = {
    "text": (str, pa.string(), "é", "é"),
    "count": (int, pa.int64(), 3, 3),
    "share": (float | None, pa.float64(), 1, 1.0),
    "is_old": (bool, pa.bool_(), False, False),
    "day": (datetime.date, pa.date32(), "2024-03-31", datetime.date(2024, 3, 31)),
    "moment": (datetime.datetime | None, pa.string(), None, None),
    "colour": (Colour, pa.string(), "red", "red"),
    "size": (Literal[1, 2] | None, pa.int64(), 2, 2),
    "names": (list[str], pa.list_(pa.string()), ["a", "b"], ["a", "b"]),
    "years": (list[int] | None, pa.list_(pa.int64()), [1999], [1999]),
    "days": (list[datetime.date], pa.list_(pa.date32()), ["2020-02-29"], [datetime.date(2020, 2, 29)]),
    "person": (Person | None, pa.string(), {"name": "Ada", "born": "1815-12-10"},
               '{"name": "Ada", "born": "1815-12-10"}'),
    "people": (list[Person], pa.string(), [], "[]"),
    "grid": (list[list[int]], pa.string(), [[1], []], "[[1], []]"),
    "either": (int | str, pa.string(), "x", '"x"'),
    "number": (int | float, pa.float64(), 1, 1.0),
    "nulls": (list[None] | list[int], pa.string(), [1], "[1]"),
    "pair": (tuple[int, str], pa.string(), [1, "a"], '[1, "a"]'),
    "Extra field": (dict[str, int], pa.string(), {"a": 1}, '{"a": 1}'),
}  # fmt: skip
"""For each property: its type, the type of its column, a value in an answer, and that value in the table."""
AllColumns = create_model(
    "AllColumns", **{f"f{i}": (row[0], Field(alias=name)) for i, (name, row) in enumerate(COLUMN_EXAMPLES.items())}
)
COLUMN_TYPES = {name: row[1] for name, row in COLUMN_EXAMPLES.items()}


def test_property_types_become_column_types_and_nested_values_become_json() -> None:
    columns = make_typed_columns(ResponseFormat.of(AllColumns), ())
    assert {column.name: column.make_arrow_type(pa) for column in columns} == COLUMN_TYPES
    answer = AllColumns.model_validate({name: row[2] for name, row in COLUMN_EXAMPLES.items()})
    values, problems = convert_values(columns, answer.model_dump(mode="json", by_alias=True))
    assert problems == []
    assert values == {name: row[3] for name, row in COLUMN_EXAMPLES.items()}
    pa.Table.from_pylist([values], schema=pa.schema(COLUMN_TYPES.items()))


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"type": "integer"}, 10**19, "more than 64 bits"),
        ({"type": "integer"}, float("inf"), "infinity"),
        ({"type": "number"}, 10**400, "too large"),
        ({"type": "number"}, 2**53 + 1, "without rounding"),
        ({"type": "string", "format": "date"}, "last spring", "last spring"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "two"], "two"),
        ({"type": "boolean"}, 1, "not of the type bool"),
    ],
)
def test_value_that_does_not_fit_its_column_is_null_and_reported(schema: Any, value: Any, message: str) -> None:
    columns = make_typed_columns(ResponseFormat.of({"type": "object", "properties": {"x": schema, "y": {}}}), ())
    values, problems = convert_values(columns, {"x": value, "y": None})
    assert values == {"x": None, "y": None}
    assert len(problems) == 1 and problems[0].startswith("x: ") and message in problems[0]


def test_columns_with_a_reserved_name_get_a_prefix_and_duplicates_are_refused() -> None:
    response_format = ResponseFormat.of({"type": "object", "properties": {"Document": {"type": "string"}, "key": {}}})
    columns = make_typed_columns(response_format, ("document", "id"))
    assert [column.name for column in columns] == ["value_Document", "key"]
    response_format = ResponseFormat.of({"type": "object", "properties": {"Key": {}, "key": {}}})
    with pytest.raises(CorpusError, match="Key and key would be the same column"):
        make_typed_columns(response_format, ())


@pytest.mark.parametrize("schema", [{"type": "array", "items": SCHEMA}, {"type": "string"}, {"anyOf": [SCHEMA]}])
def test_answers_that_are_not_objects_have_no_typed_columns(schema: Any) -> None:
    assert make_typed_columns(ResponseFormat.of(schema), ()) == ()


# Runs


def test_table_has_a_typed_column_for_each_property(corpus: TypedCorpus) -> None:
    corpus.write_keys(1, 22, 333)
    (corpus.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    summary = corpus.run_with_schema(SCHEMA)
    assert (summary.read, summary.failed) == (4, 1)
    assert {name: (row["place"], row["key"]) for name, row in corpus.rows.items()} == {
        "d1.txt": ("harbor", 1), "d22.txt": ("harbor", 22), "d333.txt": ("harbor", 333), "bad.pdf": (None, None),
    }  # fmt: skip
    assert json.loads(corpus.rows["d22.txt"]["value"]) == {"place": "harbor", "key": 22}
    [path] = corpus.out.glob("*.parquet")
    schema = pq.read_schema(path)
    assert (schema.field("place").type, schema.field("key").type) == (pa.string(), pa.int64())
    assert corpus.run_with_schema(SCHEMA).skipped == 4


def test_invalid_answer_has_null_columns_and_an_error_and_can_be_retried(
    corpus: TypedCorpus,
) -> None:
    def answer_22_in_prose(prompt: str) -> str:
        return "It is 22." if "<schema>" in prompt and "22" in extract(prompt, "memory") else answer_in_json(prompt)

    corpus.write_keys(1, 22)
    summary = corpus.run_with_schema(SCHEMA, answer_22_in_prose)
    assert (summary.failed, summary.kinds) == (1, {"InvalidAnswer": 1})
    row = corpus.rows["d22.txt"]
    assert (row["place"], row["key"], row["value"], row["answer"]) == (None, None, None, "It is 22.")
    assert row["stop_reason"] == "invalid_answer" and row["error_kind"] == "InvalidAnswer"
    assert "not JSON" in row["error"]
    assert [event["kind"] for event in row["events"]] == ["invalid_answer"] * 3, "the first answer and two repairs"
    assert corpus.run_with_schema(SCHEMA).read == 0, "an error is not read again by itself"
    assert corpus.run_with_schema(SCHEMA, retry_failed=True).read == 1
    assert {row["key"] for row in corpus.rows.values()} == {1, 22}
    assert not any(row["error"] for row in corpus.rows.values())


def test_empty_answer_is_an_error_of_its_row(corpus: TypedCorpus) -> None:
    corpus.write_keys(1)
    corpus.run_with_schema(SCHEMA, lambda prompt: "" if "<schema>" in prompt else answer_in_json(prompt))
    row = corpus.rows["d1.txt"]
    assert (row["stop_reason"], row["error"], row["key"]) == ("no_answer", "the policy wrote no answer", None)


def test_number_too_large_for_its_column_is_kept_in_value_with_an_event(corpus: TypedCorpus) -> None:
    corpus.write_keys(1)
    answer = f'{{"place": "x", "key": {10**30}}}'
    corpus.run_with_schema(SCHEMA, lambda prompt: answer if "<schema>" in prompt else "m")
    row = corpus.rows["d1.txt"]
    assert row["key"] is None and row["place"] == "x" and row["error"] is None
    assert json.loads(row["value"])["key"] == 10**30
    assert [(event["kind"], event["detail"].partition(":")[0]) for event in row["events"]] == [
        ("value_not_in_column", "key")
    ]


def test_serialization_error_of_a_model_is_an_error_of_its_row(corpus: TypedCorpus) -> None:
    class UnserializableKey(BaseModel):
        place: str
        key: int | None

        @field_serializer("key")
        def raise_error(self, _: int) -> int:
            raise ValueError("no serializer for this")

    corpus.write_keys(1, 2)
    assert corpus.run_with_schema(UnserializableKey).failed == 2
    assert all("no serializer" in row["error"] for row in corpus.rows.values())


def test_another_schema_for_the_same_table_is_refused_with_the_difference(corpus: TypedCorpus) -> None:
    corpus.write_keys(1)
    corpus.run_with_schema(SCHEMA)
    changed_schema = json.loads(json.dumps(SCHEMA))
    changed_schema["properties"]["key"]["type"] = "string"
    with pytest.raises(CorpusError) as error:
        corpus.run_with_schema(changed_schema)
    difference = 'response_format.schema.properties.key.type: ["integer", "null"] in the table, string now'
    assert difference in error.value.message and "digest" not in error.value.message
    with pytest.raises(CorpusError, match=r"response_format: .* in the table, None now"):
        corpus.run_with_schema(None, read_perfectly)
    reversed_schema = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    with pytest.raises(CorpusError, match="the same schema with its properties in another order"):
        corpus.run_with_schema(reversed_schema)
    assert corpus.run_with_schema(SCHEMA).skipped == 1


def test_long_list_of_differences_is_shortened() -> None:
    old_settings = {"schema": {str(number): number for number in range(40)}}
    lines = describe_differences(old_settings, {"schema": {str(number): "x" * 500 for number in range(40)}})
    assert len(lines) == 13 and lines[-1] == "and 28 more" and max(map(len, lines)) < 250


def test_typed_columns_survive_a_lost_ledger_and_replaced_rows(corpus: TypedCorpus) -> None:
    class DatedKeys(BaseModel):
        day: datetime.date
        keys: list[int]

    def answer_with_date(prompt: str) -> str:
        key = read_perfectly(prompt).removeprefix("\\boxed{").removesuffix("}")
        return json.dumps({"day": "2024-01-31", "keys": [int(key)]}) if "<schema>" in prompt else read_perfectly(prompt)

    corpus.write_keys(1, 2)
    corpus.run_with_schema(DatedKeys, answer_with_date)
    for path in (corpus.out / "_work").glob("ledger*"):
        path.unlink()
    assert corpus.run_with_schema(DatedKeys, answer_with_date).skipped == 2, "what is done is found in the parts"
    (corpus.folder / "d2.txt").write_text("The key of harbor is 5, no: The key of harbor is 77. " + "word " * 40)
    assert corpus.run_with_schema(DatedKeys, answer_with_date).changed == 1
    columns = {name: (row["day"], row["keys"]) for name, row in corpus.rows.items()}
    assert columns == {"d1.txt": (datetime.date(2024, 1, 31), [1]), "d2.txt": (datetime.date(2024, 1, 31), [77])}


def test_a_schema_that_does_not_fit_the_window_is_refused_before_anything_is_read(corpus: TypedCorpus) -> None:
    corpus.write_keys(1)
    long_schema = {"type": "object", "properties": {"key": {"type": "integer", "description": "a key " * 2000}}}
    with pytest.raises(BudgetError, match=r"schema \d+ .*Ask for fewer fields"):
        corpus.run_with_schema(long_schema)
    assert not list(corpus.out.glob("*.parquet"))


def test_an_estimate_counts_the_schema(corpus: TypedCorpus) -> None:
    corpus.write_keys(1, 2, 3)

    def estimate_prompt_tokens(schema: ResponseFormatSource | None) -> int:
        inputs = open_inputs(str(corpus.folder))
        reader = CorpusReader(corpus.agent(), [QUESTION], inputs.access, response_format=schema)
        return asyncio.run(estimate_corpus(inputs, reader)).prompt_tokens

    tokens_without_schema, tokens_with_schema = estimate_prompt_tokens(None), estimate_prompt_tokens(SCHEMA)
    assert tokens_with_schema > tokens_without_schema + 3 * 30
    corpus.run_with_schema(SCHEMA)
    assert sum(row["usage"]["prompt_tokens"] for row in corpus.rows.values()) <= tokens_with_schema
