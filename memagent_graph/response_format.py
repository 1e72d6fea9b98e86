"""The format of a structured answer: a Pydantic model or a JSON schema that validates replies.

>>> ResponseFormat.of(Filing)                                          # doctest: +SKIP
>>> ResponseFormat.of({"type": "object", "properties": {"year": {"type": "integer"}}})  # doctest: +SKIP

Schemas and replies are not trusted; they may come from a client of the MCP server. So the size and depth of a schema
and the steps of a validation are bounded, a schema may refer only to schemas in it, and patterns are matched in linear
time. A Pydantic model is the caller's own code, so only its size and depth are bounded.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError as PydanticSchemaError
from pydantic_core import SchemaValidator, core_schema, from_json

from memagent_graph.errors import ResponseFormatError, load_extra
from memagent_graph.own_code import is_own_code_name, load_own_code
from memagent_graph.storage.bounded_files import parse_json, read_text_file

MAX_SCHEMA_BYTES: Final = 32_768
"""The maximum size of a schema as JSON, which is a part of every answer prompt."""
MAX_SCHEMA_DEPTH: Final = 32
_MAX_STEPS: Final = 30_000
"""The maximum number of keywords that are applied to a reply. Nested alternatives could otherwise take hours."""
_MAX_SECONDS: Final = 2.0
"""The maximum time for a reply: a step with a large value takes some milliseconds."""
_MAX_NESTED_STEPS: Final = 100
"""The maximum number of keywords within each other. References could otherwise exceed the depth of Python's stack."""
_MAX_OBJECTS: Final = 2000
"""The maximum number of objects and Booleans in a schema: the check of a subschema takes up to a millisecond."""
_MAX_PATTERNS: Final = 64
_MAX_COMPILED_PATTERNS: Final = 16
"""The maximum number of patterns in memory. One may take 16 MB."""
_MAX_CHECKED_ITEMS: Final = 100
_MAX_PROBLEMS: Final = 8
_MAX_PROBLEM_CHARACTERS: Final = 240
_MAX_JSON_STARTS: Final = 200
"""The maximum number of brackets in a reply at which a JSON value may begin."""
_MAX_ENUM_OPTIONS: Final = 12

_MAPPING_KEYWORDS: Final = ("properties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SUBSCHEMA_KEYWORDS: Final = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("prefixItems", "items", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames"),
)
_UNSUPPORTED_KEYWORDS: Final = (
    "patternProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$id",
    "unevaluatedItems",  # these two follow references in exponential time
    "unevaluatedProperties",
)
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_FENCED_BLOCK: Final = re.compile(r"```(?:json|JSON)?[^\S\n]*\n(.*?)```", re.DOTALL)

ResponseFormatSource: TypeAlias = "type[BaseModel] | Mapping[str, Any] | ResponseFormat"
"""A source for `ResponseFormat.of`."""


@dataclass(frozen=True, slots=True)
class StructuredAnswer:
    """An answer in the required format."""

    text: str
    """The JSON of the answer, as it is in the reply."""
    value: Any
    """An instance of the model, or, for a schema, plain JSON values."""


@dataclass(frozen=True)
class ResponseFormat:
    """The required format of an answer. Create it with `of`.

    Attributes:
        name: the name in requests to servers.
        schema_json: the JSON schema in compact form, as in the prompt.
        model: the Pydantic model of the schema, if any.
    """

    name: str
    schema_json: str
    model: type[BaseModel] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: ResponseFormatSource) -> ResponseFormat:
        """Return the format for a model or a schema.

        Args:
            source: a subclass of `pydantic.BaseModel`; a JSON schema as a mapping, alone or in OpenAI's form,
                `{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}`; or a `ResponseFormat`.

        Raises:
            ResponseFormatError: the source is not a schema, is too large, or uses an unsupported keyword.
            MissingExtraError: a JSON schema needs the extra "schema", which is not installed.
        """
        if isinstance(source, ResponseFormat):
            return source
        if isinstance(source, type) and issubclass(source, BaseModel):
            try:
                text = _dump_bounded_text(source.model_json_schema())
            except (PydanticUserError, TypeError, ValueError) as error:
                raise ResponseFormatError(
                    f"the model {source.__name__} has no JSON schema: {error}".split("\n")[0],
                    hint="Use field types that JSON has, or describe them with pydantic.WithJsonSchema({...}).",
                ) from error
            return cls(_make_server_name(source.__name__), text, source)
        if not isinstance(source, Mapping):
            is_class = isinstance(source, type)
            description = f"the class {source.__name__}" if is_class else f"a value of type {type(source).__name__}"
            raise ResponseFormatError(
                f"{description} is not a response_format",
                hint="Pass a subclass of pydantic.BaseModel, or a JSON schema as a dict.",
            )
        schema, name = source, None
        if source.get("type") == "json_schema":
            wrapper = source.get("json_schema")
            if not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("schema"), Mapping):
                raise ResponseFormatError(
                    'a response_format of type "json_schema" has no schema in it',
                    hint='Write {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}, or the '
                    "schema by itself.",
                )
            schema, name = wrapper["schema"], wrapper.get("name")
        text = _dump_bounded_text(schema)
        response_format = cls(_make_server_name(name or schema.get("title")), text)
        _require_supported(response_format.schema)
        return response_format

    @classmethod
    def load(cls, name: str) -> ResponseFormat:
        """Return the format for a name: a file with a JSON schema, or a Pydantic model as `file.py:Model`.

        The code of the model is run.

        Raises:
            ResponseFormatError: the file or model does not exist, or cannot be used.
            MissingExtraError: a JSON schema needs the extra "schema", which is not installed.
        """
        if is_own_code_name(name) and not Path(name).is_file():
            hint = "Write a subclass of pydantic.BaseModel after the colon."
            model = load_own_code(name, noun="a Pydantic model", error=ResponseFormatError, hint=hint)
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                raise ResponseFormatError(f"{name} is not a Pydantic model", hint=hint)
            return cls.of(model)
        hint = "Pass a file with a JSON schema, or a Pydantic model as path/to/file.py:Model."
        try:
            schema = parse_json(read_text_file(Path(name).expanduser(), 16 * MAX_SCHEMA_BYTES, allow_pipes=True))
        except (OSError, ValueError, RuntimeError) as error:  # an unknown user after ~
            reason = getattr(error, "strerror", None) or error
            raise ResponseFormatError(f"the schema {name} cannot be read as JSON: {reason}", hint=hint) from error
        return cls.of(schema)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        schema: dict[str, Any] = json.loads(self.schema_json)
        return schema

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the schema."""
        return hashlib.sha256(self.schema_json.encode()).hexdigest()[:16]

    @cached_property
    def server_schema_json(self) -> str:
        """The `json_schema` of an OpenAI `response_format`, as JSON."""
        json_schema: dict[str, Any] = {"name": self.name, "schema": self.schema}
        if all(map(_is_strict, _iter_subschemas(self.schema))):
            json_schema["strict"] = True
        return json.dumps(json_schema, ensure_ascii=False)

    def parse(self, reply: str) -> StructuredAnswer | str:
        """Return the answer in a reply: the whole reply, or the last JSON value in it that is valid.

        If there is none, return the reason as a text.
        """
        reason_by_kind: dict[str, str] = {}
        counter = _KeywordCounter()
        for text in _find_candidates(reply):
            try:
                data = from_json(text, allow_inf_nan=False)
                json.dumps(data, allow_nan=False)  # a number such as 1e400 is read as infinite
            except ValueError as error:
                reason_by_kind.setdefault("not JSON", f"the answer is not JSON: {error}")
                continue
            answer = self._validate(text, data, counter)
            if isinstance(answer, StructuredAnswer):
                return answer
            reason_by_kind.setdefault("invalid", f"the answer does not have the required form: {answer}")
        return reason_by_kind.get("invalid") or reason_by_kind["not JSON"]

    def parse_value(self, answer: str | None) -> Any:
        """Return the value of an answer; None if there is no answer, or it is not valid."""
        structured_answer = self.parse(answer) if answer else None
        return structured_answer.value if isinstance(structured_answer, StructuredAnswer) else None

    @cached_property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the answer's fields, by name and in order; empty if the answer is not an object."""
        return _get_properties(self.resolve(self.schema))

    def describe_fields(self, *, short: bool = False) -> str:
        """Describe the answer's fields in words, for prompts without the schema. The text is empty without fields.

        Args:
            short: whether to list only the names.
        """
        root = self.resolve(self.schema)
        properties = _get_properties(self.resolve(root.get("items")) if root.get("type") == "array" else root)
        if not properties:
            return ""
        if short:
            return f"The answer will have these fields: {', '.join(properties)}."
        lines = ["The answer will have these fields:"]
        for name, reference in properties.items():
            schema = self.resolve(reference)
            description = schema.get("description")
            text = " ".join(description.split()) if isinstance(description, str) else ""
            lines.append(f"- {name} ({self._name_type(schema)}){': ' if text else ''}{text}")
        return "\n".join(lines)

    def _name_type(self, schema: Mapping[str, Any], depth: int = 2) -> str:
        """Return the type of a schema in a few words."""
        if isinstance(options := schema.get("enum"), list):
            listed_options = [json.dumps(option, ensure_ascii=False) for option in options[:_MAX_ENUM_OPTIONS]]
            return f"one of {', '.join(listed_options)}{', ...' if len(options) > len(listed_options) else ''}"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(keyword), list) and depth:
                names = (self._name_type(self.resolve(part), depth - 1) for part in alternatives[:_MAX_ENUM_OPTIONS])
                return " or ".join(dict.fromkeys(names))
        type_name = schema.get("type", "any")
        if type_name == "array" and depth:
            return f"list of {self._name_type(self.resolve(schema.get('items')), depth - 1)}"
        if type_name == "object" and (properties := _get_properties(schema)):
            return f"object with {', '.join(properties)}"
        return " or ".join(map(str, type_name)) if isinstance(type_name, list) else str(type_name)

    def resolve(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema with its references resolved. Keywords next to a reference take precedence."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            target = _find_target(self.schema, reference)
            own_keywords = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
            schema = {**(target if isinstance(target, dict) else {}), **own_keywords}
        return {}

    def _validate(self, text: str, data: Any, counter: _KeywordCounter) -> StructuredAnswer | str:
        """Return the answer in a JSON text with the value `data`, or a description of its problems."""
        if self.model is not None:
            try:
                return StructuredAnswer(text, self.model.model_validate_json(text))
            except ValidationError as error:
                details = error.errors(include_url=False, include_input=False, include_context=False)
                return _list_problems((detail["loc"], detail["msg"]) for detail in details)
            except Exception as error:  # noqa: BLE001  a user's validator may raise anything
                return _list_problems([((), f"{type(error).__name__}: {error}")])
        try:
            errors = islice(_make_validator(self.schema, counter).iter_errors(data), _MAX_PROBLEMS)
            problems = _list_problems((error.absolute_path, error.message) for error in errors)
        except Exception as error:  # noqa: BLE001  such as too many steps, or a number that is too large to divide
            return f"it cannot be compared with the schema: {_shorten(error)}"
        return problems or StructuredAnswer(text, data)


def _get_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


class _KeywordCounter:
    """The number of keywords that were applied to a reply, and how many of them are within each other now."""

    def __init__(self) -> None:
        self.count = self.depth = 0
        self.end_time = 0.0

    def begin(self) -> None:
        """Begin a step; it may be within others."""
        self.count += 1
        self.depth += 1
        self.end_time = self.end_time or time.monotonic() + _MAX_SECONDS
        if self.count > _MAX_STEPS or self.depth > _MAX_NESTED_STEPS or time.monotonic() > self.end_time:
            raise TimeoutError("it takes too many steps")


def _make_server_name(name: Any) -> str:
    """Return a name that servers accept: 1 to 64 letters, digits, hyphens and underscores."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", str(name or "")).strip("_")[:64] or "answer"


def _dump_bounded_text(schema: Mapping[str, Any]) -> str:
    """Return the schema as JSON.

    Raises:
        ResponseFormatError: the schema is not JSON, or it is nested too deeply or too large.
    """
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size, depth = len(text.encode()), _compute_depth(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResponseFormatError(
            f"the schema cannot be written as JSON: {error}", hint="Use JSON values only."
        ) from error
    if size > MAX_SCHEMA_BYTES:
        raise ResponseFormatError(
            f"the schema must have at most {MAX_SCHEMA_BYTES:,} bytes, got {size:,} (it is in every answer prompt)",
            hint="Ask for fewer fields, or shorten their descriptions.",
        )
    if len(re.findall(r"[{tf]", _JSON_STRING.sub("", text))) > _MAX_OBJECTS:
        raise ResponseFormatError(
            f"the schema must have at most {_MAX_OBJECTS:,} objects and Booleans",
            hint="Ask for fewer fields, or use fewer alternatives.",
        )
    if depth > MAX_SCHEMA_DEPTH:
        raise ResponseFormatError(
            f"the schema must be nested at most {MAX_SCHEMA_DEPTH} levels deep, got {depth}",
            hint="Use $defs, or fewer levels.",
        )
    return text


def _compute_depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_compute_depth, children), default=0) if isinstance(value, dict | list) else 0


def _iter_subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its subschemas, but not data such as the values of `enum`."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        subschemas: Iterable[Any] = ()
        if keyword in _MAPPING_KEYWORDS and isinstance(value, dict):
            subschemas = value.values()
        elif keyword in _SUBSCHEMA_KEYWORDS:
            subschemas = value if isinstance(value, list) else (value,)
        for subschema in subschemas:
            yield from _iter_subschemas(subschema)


def _is_strict(schema: Mapping[str, Any]) -> bool:
    """Return whether OpenAI's strict mode accepts a schema: every field is required, and no others are allowed."""
    if "properties" not in schema and schema.get("type") != "object":
        return True
    return schema.get("additionalProperties") is False and set(schema.get("required", ())) == set(
        schema.get("properties", ())
    )


def _require_supported(schema: dict[str, Any]) -> None:
    """Check that a schema is valid and uses only supported keywords.

    Raises:
        ResponseFormatError: the schema is not valid, or uses an unsupported keyword.
        MissingExtraError: the extra "schema" is not installed.
    """
    needed_for = "a JSON schema as response_format (a Pydantic model needs no extra)"
    jsonschema = load_extra("jsonschema", "schema", needed_for)
    try:
        dialect = {"$schema": str(schema.get("$schema", ""))}
        validator = jsonschema.validators.validator_for(dialect, jsonschema.Draft202012Validator)
        validator.check_schema(_cut_lists(schema), format_checker=None)
    except Exception as error:  # URLs and patterns of any text raise errors of many kinds
        path, message = getattr(error, "absolute_path", ()), getattr(error, "message", str(error))
        raise ResponseFormatError(
            f"this is not a JSON schema: {_describe_problem(path, message)}",
            hint="Correct it; https://json-schema.org has the keywords.",
        ) from error
    if validator is jsonschema.Draft3Validator:
        raise ResponseFormatError("the schema is of draft 3, which is not supported", hint="Write it in a later draft.")
    # Only these are checked: a reference may lead to nothing else, and all have the validator and base of the root.
    subschemas = {id(subschema): subschema for subschema in _iter_subschemas(schema)}
    root_keywords = {"$schema", "id"} if validator is jsonschema.Draft4Validator else {"$schema"}
    for subschema in subschemas.values():
        unsupported_keywords = {*_UNSUPPORTED_KEYWORDS, *(() if subschema is schema else root_keywords)}
        if keyword := min(unsupported_keywords & subschema.keys(), default=None):
            raise ResponseFormatError(
                f"the schema uses {keyword}, which is not supported",
                hint="List the fields in properties, forbid others with additionalProperties, and refer to shared "
                "parts with $ref and $defs.",
            )
        target = _find_target(schema, str(subschema.get("$ref", "#")))
        if id(target) not in subschemas and not isinstance(target, bool):
            raise ResponseFormatError(
                f"the schema refers to {_shorten(subschema['$ref'])}, which is not one of its schemas",
                hint='Copy that part to $defs, and refer to it as "#/$defs/NAME".',
            )
    patterns = {str(subschema["pattern"]) for subschema in subschemas.values() if "pattern" in subschema}
    if len(patterns) > _MAX_PATTERNS:
        raise ResponseFormatError(f"the schema has more than {_MAX_PATTERNS} patterns", hint="Leave some out.")
    for pattern in patterns:
        try:
            _compile_pattern(pattern)
        except PydanticSchemaError as error:
            # The last line of the message of the engine for regular expressions.
            reason = str(error).rpartition("rror: ")[2].rstrip(".")
            raise ResponseFormatError(
                f"the pattern {_shorten(pattern)} is not supported: {reason}",
                hint="Patterns are matched in linear time, without look-around and back-references.",
            ) from error


def _cut_lists(value: Any, *, is_whole: bool = False) -> Any:
    """Return a schema with short lists, except lists of schemas: its check compares each item of others with each."""
    if isinstance(value, dict):
        return {key: _cut_lists(member, is_whole=key in _SUBSCHEMA_KEYWORDS) for key, member in value.items()}
    if isinstance(value, list):
        return [_cut_lists(item) for item in (value if is_whole else value[:_MAX_CHECKED_ITEMS])]
    return value


def _find_target(schema: Any, reference: str) -> Any:
    """Return the target of a reference within a schema; None if it does not exist."""
    root, *parts = unquote(reference).split("/")
    target = schema if root == "#" else None
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and len(key) < 6 and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target


@lru_cache(maxsize=_MAX_COMPILED_PATTERNS)
def _compile_pattern(pattern: str) -> SchemaValidator:
    """Return a validator of texts that matches a pattern in linear time."""
    return SchemaValidator(core_schema.str_schema(pattern=pattern))


def _unify_numbers(value: Any) -> Any:
    """Return a JSON value with integers in place of floats such as 1.0, which are equal in a schema."""
    if isinstance(value, dict):
        return {key: _unify_numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_unify_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _make_validator(schema: dict[str, Any], counter: _KeywordCounter) -> Any:
    """Return a validator that raises `TimeoutError` after the last step, and fetches nothing."""
    import jsonschema  # noqa: PLC0415  an extra, slow to import
    import referencing  # noqa: PLC0415  of jsonschema

    base_validator: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)

    def match_pattern(validator: Any, expression: str, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not _compile_pattern(expression).isinstance_python(instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {expression!r}")

    def compare_items(validator: Any, is_unique: bool, instance: Any, _: Any) -> Iterator[Any]:
        items = instance if is_unique and validator.is_type(instance, "array") else []
        if len({json.dumps(item, sort_keys=True) for item in _unify_numbers(items)}) < len(items):
            yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")

    def count_steps(keyword: Any) -> Any:
        def apply(*arguments: Any) -> Iterator[Any]:
            try:
                counter.begin()
                yield from keyword(*arguments) or ()
            finally:
                counter.depth -= 1

        return apply

    keywords = {**base_validator.VALIDATORS, "pattern": match_pattern, "uniqueItems": compare_items}
    counted_keywords = {name: count_steps(keyword) for name, keyword in keywords.items()}
    validator_class = jsonschema.validators.extend(base_validator, counted_keywords)
    # With $schema, a reference to the root would have jsonschema's own validator, without these keywords.
    root = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
    return validator_class(root, registry=referencing.Registry())


def _find_candidates(reply: str) -> Iterator[str]:
    """Yield candidates for the answer: the whole reply, then its fenced blocks and JSON values, the last ones first."""
    text = reply.strip()
    yield text
    yield from (block.strip() for block in reversed(_FENCED_BLOCK.findall(text)))
    decoder, end, values = json.JSONDecoder(), 0, list[str]()
    starts = (match.start() for match in re.finditer(r"[{\[]", text))
    for start in islice((start for start in starts if start >= end), _MAX_JSON_STARTS):
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        values.append(text[start:end])
    yield from reversed([value for value in values if value != text])


def _shorten(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _MAX_PROBLEM_CHARACTERS else line[:_MAX_PROBLEM_CHARACTERS] + "..."


def _describe_problem(path: Iterable[Any], message: str) -> str:
    return ": ".join(filter(None, (".".join(map(str, path)), _shorten(message))))


def _list_problems(problems: Iterable[tuple[Iterable[Any], str]]) -> str:
    """Return the first problems and their paths as a text, which is empty if there are none."""
    texts = [_describe_problem(path, message) for path, message in islice(problems, _MAX_PROBLEMS + 1)]
    return "; ".join(texts[:_MAX_PROBLEMS]) + ("; and more" if len(texts) > _MAX_PROBLEMS else "")
