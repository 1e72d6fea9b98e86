"""A corpus with a schema is a table with typed columns; other schemas are refused, and a bad answer is told."""

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
from unit.corpus.test_corpus_run import World

from memagent_corpus import CorpusReader, open_inputs
from memagent_corpus.corpus_run import CorpusSummary
from memagent_corpus.corpus_session import estimate_corpus
from memagent_corpus.table_folder import describe_differences
from memagent_corpus.typed_columns import convert_values, make_typed_columns
from memagent_graph import Budget, MemAgent
from memagent_graph.errors import BudgetError, CorpusError
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource

QUESTION = "What is the key of harbor?"
ROOMY = Budget(context_window=2000, question_tokens=200, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "key": {"type": ["integer", "null"]}},
    "required": ["place", "key"],
}


def answer_in_json(prompt: str) -> str:
    """Read perfectly; answer with the place and the key as JSON."""
    reply = read_perfectly(prompt)
    key = reply.removeprefix("\\boxed{").removesuffix("}")
    if "<schema>" not in prompt:
        return reply
    return json.dumps({"place": "harbor", "key": int(key) if key.isdigit() else None})


class Corpus(World):
    """Documents that each have a key of their own, and runs with a schema over them."""

    def write_keys(self, *keys: int) -> None:
        for key in keys:
            self.write(f"d{key}.txt", key)

    def agent(self, **options: Any) -> MemAgent:
        return super().agent(budget=ROOMY, **options)

    def run_with(
        self, form: ResponseFormatSource | None, script: Callable[[str], str] = answer_in_json, **options: Any
    ) -> CorpusSummary:
        self.script = script
        return self.run(QUESTION, form=form, **options)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["document"]: row for row in read_rows(self.out)}


@pytest.fixture
def corpus(tmp_path: Path, make_reader: Any) -> Corpus:
    return Corpus(tmp_path, make_reader)


# Columns


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: str
    born: datetime.date


COLUMNS: dict[str, tuple[Any, Any, Any, Any]] = {
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
    "pair": (tuple[int, str], pa.string(), [1, "a"], '[1, "a"]'),
    "Extra field": (dict[str, int], pa.string(), {"a": 1}, '{"a": 1}'),
}  # fmt: skip
"""The type of a property, that of its column, a value in an answer, and the same in the table."""
EVERYTHING = create_model(
    "Everything", **{f"field{n}": (row[0], Field(alias=name)) for n, (name, row) in enumerate(COLUMNS.items())}
)
TYPES = {name: row[1] for name, row in COLUMNS.items()}


def test_each_property_has_the_type_that_fits_it_and_holds_its_value_what_is_nested_as_json() -> None:
    columns = make_typed_columns(ResponseFormat.of(EVERYTHING), ())
    assert {column.name: column.arrow_type(pa) for column in columns} == TYPES
    answer = EVERYTHING.model_validate({name: row[2] for name, row in COLUMNS.items()})
    values, problems = convert_values(columns, answer.model_dump(mode="json", by_alias=True))
    assert problems == []
    assert values == {name: row[3] for name, row in COLUMNS.items()}
    pa.Table.from_pylist([values], schema=pa.schema(TYPES.items()))


@pytest.mark.parametrize(
    ("schema", "value", "words"),
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
def test_a_value_that_a_column_cannot_hold_is_null_there_and_told(schema: Any, value: Any, words: str) -> None:
    columns = make_typed_columns(ResponseFormat.of({"type": "object", "properties": {"x": schema, "y": {}}}), ())
    values, problems = convert_values(columns, {"x": value, "y": None})
    assert values == {"x": None, "y": None}
    assert len(problems) == 1 and problems[0].startswith("x: ") and words in problems[0]


def test_columns_with_a_reserved_name_get_a_prefix_and_duplicates_are_refused() -> None:
    form = ResponseFormat.of({"type": "object", "properties": {"Document": {"type": "string"}, "key": {}}})
    assert [column.name for column in make_typed_columns(form, ("document", "id"))] == ["value_Document", "key"]
    form = ResponseFormat.of({"type": "object", "properties": {"Key": {}, "key": {}}})
    with pytest.raises(CorpusError, match="Key and key would be the same column"):
        make_typed_columns(form, ())


@pytest.mark.parametrize("schema", [{"type": "array", "items": SCHEMA}, {"type": "string"}, {"anyOf": [SCHEMA]}])
def test_answers_that_are_not_objects_have_no_typed_columns(schema: Any) -> None:
    assert make_typed_columns(ResponseFormat.of(schema), ()) == ()


# Runs


def test_a_corpus_becomes_a_table_with_a_column_for_each_property(corpus: Corpus) -> None:
    corpus.write_keys(1, 22, 333)
    (corpus.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    summary = corpus.run_with(SCHEMA)
    assert (summary.read, summary.failed) == (4, 1)
    assert {name: (row["place"], row["key"]) for name, row in corpus.rows.items()} == {
        "d1.txt": ("harbor", 1), "d22.txt": ("harbor", 22), "d333.txt": ("harbor", 333), "bad.pdf": (None, None),
    }  # fmt: skip
    assert json.loads(corpus.rows["d22.txt"]["value"]) == {"place": "harbor", "key": 22}
    [path] = corpus.out.glob("*.parquet")
    schema = pq.read_schema(path)
    assert (schema.field("place").type, schema.field("key").type) == (pa.string(), pa.int64())
    assert corpus.run_with(SCHEMA).skipped == 4


def test_an_answer_that_does_not_fit_has_null_columns_an_event_and_an_error_and_may_be_read_again(
    corpus: Corpus,
) -> None:
    def stubborn(prompt: str) -> str:
        return "It is 22." if "<schema>" in prompt and "22" in extract(prompt, "memory") else answer_in_json(prompt)

    corpus.write_keys(1, 22)
    summary = corpus.run_with(SCHEMA, stubborn)
    assert (summary.failed, summary.kinds) == (1, {"InvalidAnswer": 1})
    row = corpus.rows["d22.txt"]
    assert (row["place"], row["key"], row["value"], row["answer"]) == (None, None, None, "It is 22.")
    assert row["stop_reason"] == "invalid_answer" and row["error_kind"] == "InvalidAnswer"
    assert "not JSON" in row["error"]
    assert [event["kind"] for event in row["events"]] == ["invalid_answer"] * 3, "the first answer and two repairs"
    assert corpus.run_with(SCHEMA).read == 0, "an error is not read again by itself"
    assert corpus.run_with(SCHEMA, retry_failed=True).read == 1
    assert {row["key"] for row in corpus.rows.values()} == {1, 22}
    assert not any(row["error"] for row in corpus.rows.values())


def test_an_empty_answer_is_an_error_as_well(corpus: Corpus) -> None:
    corpus.write_keys(1)
    corpus.run_with(SCHEMA, lambda prompt: "" if "<schema>" in prompt else answer_in_json(prompt))
    row = corpus.rows["d1.txt"]
    assert (row["stop_reason"], row["error"], row["key"]) == ("no_answer", "the policy wrote no answer", None)


def test_a_number_too_large_for_its_column_stands_in_value_and_an_event_says_so(corpus: Corpus) -> None:
    corpus.write_keys(1)
    corpus.run_with(SCHEMA, lambda prompt: '{"place": "x", "key": 1' + "0" * 30 + "}" if "<schema>" in prompt else "m")
    row = corpus.rows["d1.txt"]
    assert row["key"] is None and row["place"] == "x" and row["error"] is None
    assert json.loads(row["value"])["key"] == 10**30
    assert [(event["kind"], event["detail"].partition(":")[0]) for event in row["events"]] == [
        ("value_not_in_column", "key")
    ]


def test_a_model_that_cannot_be_written_as_json_is_an_error_of_its_row(corpus: Corpus) -> None:
    class Broken(BaseModel):
        place: str
        key: int | None

        @field_serializer("key")
        def refuse(self, _: int) -> int:
            raise ValueError("no serializer for this")

    corpus.write_keys(1, 2)
    assert corpus.run_with(Broken).failed == 2
    assert all("no serializer" in row["error"] for row in corpus.rows.values())


def test_another_schema_on_the_same_table_is_refused_with_the_difference(corpus: Corpus) -> None:
    corpus.write_keys(1)
    corpus.run_with(SCHEMA)
    other = json.loads(json.dumps(SCHEMA))
    other["properties"]["key"]["type"] = "string"
    with pytest.raises(CorpusError) as raised:
        corpus.run_with(other)
    difference = 'response_format.schema.properties.key.type: ["integer", "null"] in the table, string now'
    assert difference in raised.value.message and "digest" not in raised.value.message
    with pytest.raises(CorpusError, match=r"response_format: .* in the table, None now"):
        corpus.run_with(None, read_perfectly)
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    with pytest.raises(CorpusError, match="the same schema with its properties in another order"):
        corpus.run_with(turned)
    assert corpus.run_with(SCHEMA).skipped == 1


def test_many_differences_are_cut_short() -> None:
    before = {"schema": {str(number): number for number in range(40)}}
    lines = describe_differences(before, {"schema": {str(number): "x" * 500 for number in range(40)}})
    assert len(lines) == 13 and lines[-1] == "and 28 more" and max(map(len, lines)) < 250


def test_typed_columns_survive_the_loss_of_the_ledger_and_rows_that_are_replaced(corpus: Corpus) -> None:
    class Dated(BaseModel):
        day: datetime.date
        keys: list[int]

    def answer_with_date(prompt: str) -> str:
        key = read_perfectly(prompt).removeprefix("\\boxed{").removesuffix("}")
        return json.dumps({"day": "2024-01-31", "keys": [int(key)]}) if "<schema>" in prompt else read_perfectly(prompt)

    corpus.write_keys(1, 2)
    corpus.run_with(Dated, answer_with_date)
    for path in (corpus.out / "_work").glob("ledger*"):
        path.unlink()
    assert corpus.run_with(Dated, answer_with_date).skipped == 2, "what is done is found in the parts"
    (corpus.folder / "d2.txt").write_text("The key of harbor is 5, no: The key of harbor is 77. " + "word " * 40)
    assert corpus.run_with(Dated, answer_with_date).changed == 1
    columns = {name: (row["day"], row["keys"]) for name, row in corpus.rows.items()}
    assert columns == {"d1.txt": (datetime.date(2024, 1, 31), [1]), "d2.txt": (datetime.date(2024, 1, 31), [77])}


def test_a_schema_that_does_not_fit_the_window_is_refused_before_anything_is_read(corpus: Corpus) -> None:
    corpus.write_keys(1)
    described = {"type": "object", "properties": {"key": {"type": "integer", "description": "a key " * 2000}}}
    with pytest.raises(BudgetError, match=r"schema \d+ .*Ask for fewer fields"):
        corpus.run_with(described)
    assert not list(corpus.out.glob("*.parquet"))


def test_an_estimate_counts_the_schema(corpus: Corpus) -> None:
    corpus.write_keys(1, 2, 3)

    def estimate(form: ResponseFormatSource | None) -> int:
        inputs = open_inputs(str(corpus.folder))
        reader = CorpusReader(corpus.agent(), [QUESTION], inputs.access, response_format=form)
        return asyncio.run(estimate_corpus(inputs, reader)).prompt_tokens

    plain, with_schema = estimate(None), estimate(SCHEMA)
    assert with_schema > plain + 3 * 30
    corpus.run_with(SCHEMA)
    assert sum(row["usage"]["prompt_tokens"] for row in corpus.rows.values()) <= with_schema
