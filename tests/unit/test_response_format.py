"""`ResponseFormat`: valid and invalid formats, and the value in a reply that has the format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from memagent_graph import ResponseFormat
from memagent_graph.errors import MissingExtraError, ResponseFormatError
from memagent_graph.response_format import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, StructuredAnswer

DRAFT_4 = "http://json-schema.org/draft-04/schema#"


class Person(BaseModel):
    name: str
    age: int | None = None


class Filing(BaseModel):
    company: str = Field(description="the company's\nfull name")
    signed: date
    people: list[Person] = []

    @field_validator("company")
    @classmethod
    def _check_company(cls, value: str) -> str:
        if value == "unknown":
            raise ValueError("name the company")
        if value == "odd":
            raise KeyError("a bug in the validator")
        return value


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"key": {"type": "integer", "minimum": 1}, "kind": {"enum": ["a", "b"]}},
    "required": ["key"],
}
FILING = '{"company": "Acme", "signed": "2024-05-01", "people": [{"name": "Ann", "age": 41}]}'


@pytest.mark.parametrize(
    "reply",
    [
        f" {FILING} ",
        f"```json\n{FILING}\n```",
        f"Here is the answer:\n\n{FILING}\n\nI hope that [this] helps {{you}}.",
        f"\\boxed{{{FILING}}}",
        f'First {{"company": "Draft", "signed": "2020-01-01", "parts": {[[]] * 300}}}, but no: {FILING}',
    ],
)
def test_the_last_matching_value_of_a_reply_is_its_answer(reply) -> None:
    answer = ResponseFormat.of(Filing).parse(reply)
    people = [Person(name="Ann", age=41)]
    assert answer == StructuredAnswer(FILING, Filing(company="Acme", signed=date(2024, 5, 1), people=people))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("the company is Acme", "not JSON"),
        ('{"company": "Acme", "signed": "2024-05-', "not JSON"),
        ('{"company": "Acme"}', "signed: Field required"),
        ('{"company": "Acme", "signed": "2024-05-01", "people": [{"age": "x"}]}', "people.0.name: Field required"),
        ('{"company": "unknown", "signed": "2024-05-01"}', "name the company"),
        ('{"company": "odd", "signed": "2024-05-01"}', "KeyError: 'a bug in the validator'"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
    ],
)  # fmt: skip
def test_a_reply_that_does_not_match_gives_a_complaint_with_the_reason(reply, words) -> None:
    complaint = ResponseFormat.of(Filing).parse(reply)
    assert isinstance(complaint, str) and words in complaint


def test_a_complaint_lists_eight_problems_and_a_models_says_that_there_are_more() -> None:
    complaint = ResponseFormat.of({"items": {"type": "string"}}).parse(str([*range(9)]))
    assert str(complaint).endswith("7: 7 is not of type 'string'")
    assert str(ResponseFormat.of(Filing).parse(json.dumps({"people": [{}] * 9}))).endswith("; and more")


def test_nan_is_refused_and_numbers_and_whole_objects_are_found() -> None:
    assert isinstance(ResponseFormat.of({"type": "number"}).parse("NaN"), str)
    assert ResponseFormat.of({"type": "number"}).parse("2.5") == StructuredAnswer("2.5", 2.5)
    assert ResponseFormat.of({"type": "object"}).parse('so {"a": {"b": 1}}').value == {"a": {"b": 1}}


def test_fields_are_described_in_words() -> None:
    assert ResponseFormat.of(Filing).describe_fields() == (
        "The answer will have these fields:\n"
        "- company (string): the company's full name\n"
        "- signed (string)\n"
        "- people (list of object with name, age)"
    )
    assert ResponseFormat.of(Filing).describe_fields(short=True) == (
        "The answer will have these fields: company, signed, people."
    )
    assert '- kind (one of "a", "b")' in ResponseFormat.of(SCHEMA).describe_fields()
    people = {"type": "array", "items": Person.model_json_schema()}
    assert "- name (string)" in ResponseFormat.of(people).describe_fields()
    assert ResponseFormat.of({"type": "integer"}).describe_fields() == ""
    union = {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/properties/b/anyOf/0"}]}
    schema = {"properties": {"a": union, "b": {"anyOf": [{"type": "number"}]}}}
    fields = ResponseFormat.of(schema).describe_fields()
    assert fields.endswith("- a (string or null or number)\n- b (number)")


def test_the_schema_for_servers_has_a_valid_name_and_is_strict_only_if_it_can_be() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid")
        key: int

    schema = json.loads(ResponseFormat.of(Strict).server_schema_json)
    assert (schema["name"], schema["strict"]) == ("Strict", True)
    for source in (Filing, {"additionalProperties": False, "properties": {"key": {}}}, {"properties": {}}):
        assert "strict" not in json.loads(ResponseFormat.of(source).server_schema_json)
    assert json.loads(ResponseFormat.of({**SCHEMA, "title": "Key & kind!"}).server_schema_json)["name"] == "Key_kind"


def test_a_schema_in_the_format_of_servers_is_accepted_and_equal_schemas_have_equal_fingerprints() -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "keys", "schema": SCHEMA}}
    assert ResponseFormat.of(wrapped).name == "keys"
    assert ResponseFormat.of(wrapped).fingerprint == ResponseFormat.of(SCHEMA).fingerprint
    assert ResponseFormat.of(SCHEMA).fingerprint != ResponseFormat.of({**SCHEMA, "required": []}).fingerprint
    assert ResponseFormat.of(Filing).fingerprint == ResponseFormat.of(Filing.model_json_schema()).fingerprint


class Callback(BaseModel):
    call: Callable[[], int]


def make_deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (5, "a value of type int is not a response_format"),
        (int, "the class int is not"),
        (Callback, "Callback has no JSON schema"),
        ("schema.json", "a value of type str"),
        ({"type": "objekt"}, "not a JSON schema: type: 'objekt'"),
        ({"properties": {"a": {"minimum": "1"}}}, "properties.a.minimum"),
        ({"enum": [{1, 2}]}, "cannot be written as JSON"),
        ({"const": float("nan")}, "cannot be written as JSON"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "has no schema in it"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, "at most 32,768 bytes"),
        (make_deep_schema(MAX_SCHEMA_DEPTH), "levels deep"),
        (make_deep_schema(5000), "cannot be written|levels deep"),
        *(
            ({"$schema": DRAFT_4, "$ref": target, "allOf": [{}], "default": {}}, "which is not one of its schemas")
            for target in ("https://a.org/", "#/$defs/a", "#a", "#/allOf/²", f"#/allOf/{'9' * 5000}", 5, "#/default")
        ),
        ({"$schema": DRAFT_4, "dependencies": {"a": {"additionalItems": {"$ref": "file:///a"}}}}, "not one of its"),
        ({"properties": {"a%2Fdefault": {}, "a": {"default": {}}}, "$ref": "#/properties/a%2Fdefault"}, "not one of"),
        *(({"$schema": name}, "not a JSON schema: ") for name in ("http://[", 5, [])),
        *(({"pattern": text}, f"is not supported: {words}") for text, words in (("[z-a]", "invalid .*, the start"),
          ("(a", "un"), ("a{99999999999}", "dec"), ("(" * 9000 + ")" * 9000, "exc"), (r"\w{900}", "Compiled"))),
        ({"properties": {"a": {"pattern": "(?=a)b"}}}, "is not supported: look-around"),
        ({"allOf": [{"pattern": f"a{{{index}}}"} for index in range(65)]}, "more than 64 patterns"),
        ({"contentSchema": {"oneOf": [{}] * 2000}}, "at most 2,000 objects and Booleans"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "of draft 3, which is not supported"),
        *(({key: {}}, f"{key}, which is not supported") for key in ("patternProperties", "unevaluatedProperties")),
        *(({"$schema": DRAFT_4, "not": {key: DRAFT_4}}, f"uses .?{key[-2:]}") for key in ("$id", "id")),
        ({"anyOf": [{"$schema": DRAFT_4, "pattern": "^(a+)+$"}]}, "uses .schema, which is not supported"),
    ],
)  # fmt: skip
def test_invalid_response_formats_are_refused_with_a_remedy(source, words) -> None:
    with pytest.raises(ResponseFormatError, match=words) as error:
        ResponseFormat.of(source)
    assert error.value.hint


def test_fields_may_have_names_of_schema_keywords() -> None:
    schema = {"properties": {"$ref": {"type": "integer"}, "pattern": {"type": "string"}, "$id": {}}}
    reply = '{"$ref": 1, "pattern": "(?=", "$id": 2}'
    assert ResponseFormat.of(schema).parse(reply) == StructuredAnswer(reply, json.loads(reply))


def test_a_hostile_schema_or_pattern_takes_a_bounded_number_of_steps() -> None:
    bomb: dict[str, Any] = {
        "$defs": {f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(16)},
        "$ref": "#/$defs/a0",
    }
    bomb["$defs"]["a16"] = {"type": ["integer", "array"]}
    endless = {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"}
    for schema in (bomb, endless, {"not": {"$ref": "#"}}):
        assert "too many steps" in str(ResponseFormat.of(schema).parse("3"))
    for_arrays = ResponseFormat.of({"$defs": bomb["$defs"], "if": {"type": "array"}, "then": {"$ref": "#/$defs/a0"}})
    assert isinstance(for_arrays.parse('{"a": 1} and 3'), StructuredAnswer)
    assert isinstance(for_arrays.parse('{"a": 1} and [3]'), str), "the limit is for the reply, not for each value in it"
    products = ResponseFormat.of({"multipleOf": 0.1})
    assert "not JSON: Out of range" in str(products.parse("1e400"))
    assert "cannot be compared" in str(products.parse("9" * 400))
    lengths = ResponseFormat.of({"allOf": [{"pattern": f"a{{{length}}}"} for length in range(64)]})
    assert [isinstance(lengths.parse(f'"{"a" * length}"'), str) for length in (63, 62)] == [False, True]
    unique = ResponseFormat.of({"allOf": [{"uniqueItems": True}] * 990})  # jsonschema compares each item with each
    numbers = [[{"a": index % count * (1, 1.0)[index % 2]} for index in range(120)] for count in (120, 119)]
    assert [isinstance(unique.parse(json.dumps(items)), str) for items in numbers] == [False, True]
    for items in ({"pattern": "^(a+)+$"}, {"$ref": "#"}):
        slow = ResponseFormat.of({"$schema": DRAFT_4, "items": items, "pattern": "^(a+)+$"})
        assert [isinstance(slow.parse(f'["{"a" * 60}{end}"]'), str) for end in ("!", "")] == [True, False]


def test_a_schema_needs_the_extra_schema_but_a_pydantic_model_does_not(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingExtraError, match=r'"schema"'):
        ResponseFormat.of(SCHEMA)
    assert ResponseFormat.of(Person).parse('{"name": "Ann"}')


def test_a_format_is_loaded_from_a_schema_file_or_a_model(tmp_path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert ResponseFormat.load(str(tmp_path / "schema.json")) == ResponseFormat.of(SCHEMA)
    (tmp_path / "models.py").write_text("from pydantic import BaseModel\nclass Key(BaseModel):\n    key: int\n")
    assert "Key(key=4)" in str(ResponseFormat.load(f"{tmp_path}/models.py:Key").parse('{"key": 4}'))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.json", "cannot be read as JSON: No such file"),
        ("~nobody-here", "cannot be read as JSON: Could not"),
        ("models.py", "cannot be read as JSON: Expecting value: line 1"),
        ("models.py:other", "is not a Pydantic model"),
        ("models.py:Missing", "has no 'Missing'"),
        ("missing.py:Key", "there is no file"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_an_error_with_the_remedy(tmp_path, name, words) -> None:
    (tmp_path / "models.py").write_text("other = 5\n")
    with pytest.raises(ResponseFormatError, match=words) as error:
        ResponseFormat.load(name if name[0] == "~" else f"{tmp_path}/{name}")
    assert error.value.hint
