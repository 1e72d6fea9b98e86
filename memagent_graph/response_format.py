"""The form of an answer: a Pydantic model or a JSON schema that replies are checked against.

>>> ResponseFormat.of(Filing)                                          # doctest: +SKIP
>>> ResponseFormat.of({"type": "object", "properties": {"year": {"type": "integer"}}})  # doctest: +SKIP

Schemas may come from people who are not trusted (a client of the MCP server), and so may replies. So a schema has a
bounded size and depth, refers only to itself, and its patterns are matched in linear time; a check takes a bounded
number of steps. A Pydantic model is the caller's own code; only its size and depth are bounded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError as PydanticSchemaError
from pydantic_core import from_json

from memagent_graph.errors import MissingExtraError, ResponseFormatError
from memagent_graph.own_code import load_own, names_own_code

MOST_BYTES: Final = 32_768
"""Of a schema, as JSON: it stands in the prompt of every answer."""
MOST_DEPTH: Final = 32
_MOST_STEPS: Final = 30_000
"""Of one check: keywords that are applied. Nested alternatives could otherwise take longer than anyone waits."""
_MOST_PROBLEMS: Final = 8
_LONGEST_PROBLEM: Final = 240
_MOST_VALUES: Final = 64
"""JSON values that are looked for in a reply with other words in it."""
_MOST_OPTIONS: Final = 12

_OF_SCHEMAS: Final = ("properties", "$defs", "definitions", "dependentSchemas")
_WITH_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_WITH_SCHEMA: Final = (
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_REFUSED: Final = ("patternProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$id")
_FENCED: Final = re.compile(r"```(?:json|JSON)?[^\S\n]*\n(.*?)```", re.DOTALL)

ResponseFormatSource: TypeAlias = "type[BaseModel] | Mapping[str, Any] | ResponseFormat"
"""What `ResponseFormat.of` takes."""


@dataclass(frozen=True, slots=True)
class Fits:
    """A reply that has the form."""

    text: str
    """The JSON in it."""
    value: Any
    """An instance of the model, or, for a schema, plain JSON values."""


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """A reply that does not have the form."""

    reason: str


@dataclass(frozen=True)
class ResponseFormat:
    """The form that an answer must have. Make one with `of`.

    Attributes:
        name: what servers call it.
        text: the JSON schema, as JSON without superfluous spaces; it stands in the prompt.
        model: the Pydantic model, if it was made from one.
    """

    name: str
    text: str
    model: type[BaseModel] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: ResponseFormatSource) -> ResponseFormat:
        """The form that a model or a schema describes.

        Args:
            source: a subclass of `pydantic.BaseModel`; a JSON schema as a mapping, by itself or as servers take it,
                `{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}`; or what this returned before.

        Raises:
            ResponseFormatError: it is not a schema, too large, or uses what cannot be checked.
            MissingExtraError: a JSON schema without the extra "schema".
        """
        if isinstance(source, ResponseFormat):
            return source
        if isinstance(source, type) and issubclass(source, BaseModel):
            return cls._of_model(source)
        if not isinstance(source, Mapping):
            raise ResponseFormatError(
                f"{_named(source)} is not a response_format",
                hint="Give a subclass of pydantic.BaseModel, or a JSON schema as a dict.",
            )
        schema, name = source, None
        if source.get("type") == "json_schema":
            inner = source.get("json_schema")
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
                raise ResponseFormatError(
                    'a response_format of type "json_schema" has no schema in it',
                    hint='Write {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}, or the '
                    "schema by itself.",
                )
            schema, name = inner["schema"], inner.get("name")
        text = _bounded_text(schema)
        made = cls(_server_name(name or schema.get("title")), text)
        _check_schema(made.schema)
        return made

    @classmethod
    def _of_model(cls, model: type[BaseModel]) -> ResponseFormat:
        try:
            schema = model.model_json_schema()
        except (PydanticUserError, TypeError, ValueError) as error:
            raise ResponseFormatError(
                f"the model {model.__name__} has no JSON schema: {error}".split("\n")[0],
                hint="Give its fields types that JSON has, or describe them with pydantic.WithJsonSchema({...}).",
            ) from error
        return cls(_server_name(model.__name__), _bounded_text(schema), model)

    @classmethod
    def named(cls, text: str) -> ResponseFormat:
        """The form that a user names: a file with a JSON schema, or a Pydantic model as `file.py:Model`.

        Code is run only because the caller names it.

        Raises:
            ResponseFormatError: there is no such file or model, or it cannot be used.
            MissingExtraError: a JSON schema without the extra "schema".
        """
        if names_own_code(text) and not Path(text).is_file():
            hint = "Name a subclass of pydantic.BaseModel after the colon."
            found = load_own(text, what="a Pydantic model", error=ResponseFormatError, hint=hint)
            if not (isinstance(found, type) and issubclass(found, BaseModel)):
                raise ResponseFormatError(f"{text} is not a Pydantic model", hint=hint)
            return cls.of(found)
        try:
            with Path(text).expanduser().open("rb") as file:
                content = file.read(16 * MOST_BYTES)
            schema = json.loads(content)
        except OSError as error:
            raise ResponseFormatError(
                f"the schema {text} cannot be read: {error.strerror or error}",
                hint="Name a file with a JSON schema, or a Pydantic model as path/to/file.py:Model.",
            ) from error
        except (ValueError, RecursionError) as error:
            raise ResponseFormatError(
                f"the schema {text} is not JSON: {error}",
                hint="Name a file with a JSON schema, or a Pydantic model as path/to/file.py:Model.",
            ) from error
        return cls.of(schema)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        loaded: dict[str, Any] = json.loads(self.text)
        return loaded

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the schema."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def for_server(self) -> str:
        """What servers are asked for, as JSON: the `json_schema` of an OpenAI `response_format`."""
        asked: dict[str, Any] = {"name": self.name, "schema": self.schema}
        if all(map(_is_closed, _subschemas(self.schema))):
            asked["strict"] = True
        return json.dumps(asked, ensure_ascii=False)

    def checked(self, reply: str) -> Fits | DoesNotFit:
        """Look for an answer of this form in a reply: the whole reply, or the last JSON value in it that fits."""
        not_json, unfit = None, None
        for text in _candidates(reply):
            try:
                data = from_json(text, allow_inf_nan=False)
            except ValueError as error:
                not_json = not_json or DoesNotFit(f"the answer is not JSON: {error}")
                continue
            problems = self._problems(text, data)
            if not isinstance(problems, str):
                return problems
            unfit = unfit or DoesNotFit(f"the answer does not have the required form: {problems}")
        return unfit or not_json or DoesNotFit("the answer is not JSON: it is empty")

    def value(self, answer: str | None) -> Any:
        """The value of an answer that was checked; None if there is none, or it does not fit."""
        found = self.checked(answer) if answer else None
        return found.value if isinstance(found, Fits) else None

    def fields_in_words(self, *, short: bool = False) -> str:
        """What the answer will hold, for prompts that have no room for the schema; empty if it names no fields.

        Args:
            short: only the fields' names.
        """
        root = self._resolved(self.schema)
        if root.get("type") == "array":
            root = self._resolved(root.get("items"))
        properties = root.get("properties")
        if not isinstance(properties, dict) or not properties:
            return ""
        if short:
            return f"The answer will have these fields: {', '.join(properties)}."
        lines = (self._line(name, self._resolved(each)) for name, each in properties.items())
        return "\n".join(["The answer will have these fields:", *lines])

    def _line(self, name: str, schema: Mapping[str, Any]) -> str:
        described = schema.get("description")
        more = f": {' '.join(described.split())}" if isinstance(described, str) and described.strip() else ""
        return f"- {name} ({self._kind(schema)}){more}"

    def _kind(self, schema: Mapping[str, Any], depth: int = 2) -> str:
        """A type in a few words."""
        if isinstance(options := schema.get("enum"), list):
            shown = [json.dumps(each, ensure_ascii=False) for each in options[:_MOST_OPTIONS]]
            return f"one of {', '.join(shown)}{', ...' if len(options) > len(shown) else ''}"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(either := schema.get(keyword), list) and depth:
                return " or ".join(dict.fromkeys(self._kind(self._resolved(each), depth - 1) for each in either))
        kind = schema.get("type", "any")
        if kind == "array" and depth:
            return f"list of {self._kind(self._resolved(schema.get('items')), depth - 1)}"
        properties = schema.get("properties")
        if kind == "object" and isinstance(properties, dict) and properties:
            return f"object with {', '.join(properties)}"
        return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or what it refers to; its own words have priority."""
        for _ in range(MOST_DEPTH):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            target = _pointed_at(self.schema, reference)
            schema = {
                **(target if isinstance(target, dict) else {}),
                **{k: v for k, v in schema.items() if k != "$ref"},
            }
        return {}

    def _problems(self, text: str, data: Any) -> Fits | str:
        """The value, or what is wrong with it."""
        if self.model is not None:
            try:
                return Fits(text, self.model.model_validate_json(text))
            except ValidationError as error:
                found = error.errors(include_url=False, include_input=False, include_context=False)
                return _listed((_place(each["loc"]), each["msg"]) for each in found)
            except Exception as error:  # noqa: BLE001  a validator of the user's may raise anything
                return _listed([("", f"{type(error).__name__}: {error}")])
        steps = iter(range(_MOST_STEPS))
        try:
            errors = [*islice(_validator(self.schema, steps).iter_errors(data), _MOST_PROBLEMS)]
        except (_TooManyStepsError, RecursionError):
            return "it takes too many steps to compare it with the schema"
        return _listed((_place(each.absolute_path), each.message) for each in errors) if errors else Fits(text, data)


class _TooManyStepsError(Exception):
    """A check of a value against a schema has taken more steps than it may."""


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"


def _server_name(name: Any) -> str:
    """A name of 1 to 64 letters, digits, hyphens and underscores, which is what servers take."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", str(name or "")).strip("_")[:64] or "answer"


def _bounded_text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON.

    Raises:
        ResponseFormatError: it is not JSON, too deep or too large.
    """
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size, depth = len(text.encode()), _depth(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResponseFormatError(
            f"the schema cannot be written as JSON: {error}", hint="Use JSON values only."
        ) from error
    if size > MOST_BYTES:
        raise ResponseFormatError(
            f"the schema has {size:,} bytes and may have {MOST_BYTES:,}: it stands in the prompt of every answer",
            hint="Ask for fewer fields, or shorten their descriptions.",
        )
    if depth > MOST_DEPTH:
        raise ResponseFormatError(
            f"the schema is nested {depth} levels deep and may be {MOST_DEPTH}", hint="Use $defs, or fewer levels."
        )
    return text


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all in it; values that are data, such as those of `enum`, are left out."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in _OF_SCHEMAS:
        if isinstance(held := schema.get(keyword), dict):
            for each in held.values():
                yield from _subschemas(each)
    for keyword in _WITH_LIST:
        if isinstance(listed := schema.get(keyword), list):
            for each in listed:
                yield from _subschemas(each)
    for keyword in _WITH_SCHEMA:
        yield from _subschemas(schema.get(keyword))


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is one that OpenAI's strict mode takes: every field required, and no others allowed."""
    if "properties" not in schema and schema.get("type") != "object":
        return True
    return schema.get("additionalProperties") is False and set(schema.get("required", ())) == set(
        schema.get("properties", ())
    )


def _check_schema(schema: dict[str, Any]) -> None:
    """Check that a schema is one, and that replies can be checked against it.

    Raises:
        ResponseFormatError: it is not.
        MissingExtraError: the extra "schema" is not installed.
    """
    if importlib.util.find_spec("jsonschema") is None:
        raise MissingExtraError("schema", "a JSON schema as response_format (a Pydantic model needs no extra)")
    import jsonschema  # noqa: PLC0415  an extra, slow to import

    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        place = _place(error.absolute_path)
        raise ResponseFormatError(
            f"this is not a JSON schema: {place + ': ' if place else ''}{_short(error.message)}",
            hint="Correct it; https://json-schema.org has the keywords.",
        ) from error
    for each in _subschemas(schema):
        for keyword in _REFUSED:
            if keyword in each:
                raise ResponseFormatError(
                    f"the schema uses {keyword}, which is not supported",
                    hint="Name the fields in properties, and refer to shared parts with $ref and $defs.",
                )
        if "$ref" in each:
            reference = each["$ref"]
            if not (reference == "#" or reference.startswith("#/")):
                raise ResponseFormatError(
                    f"the schema refers to {_short(reference)}, which is outside of it",
                    hint='Copy that part to $defs, and refer to it as "#/$defs/NAME".',
                )
            if not isinstance(_pointed_at(schema, reference), dict | bool):
                raise ResponseFormatError(
                    f"the schema refers to {_short(reference)}, which it does not have",
                    hint="Add it to $defs, or correct the reference.",
                )
        if "pattern" in each:
            try:
                _matches(each["pattern"])
            except PydanticSchemaError as error:
                raise ResponseFormatError(
                    f"the pattern {_short(each['pattern'])} is not supported",
                    hint="Patterns are matched in linear time: leave out look-around and back-references.",
                ) from error


def _pointed_at(schema: Any, reference: str) -> Any:
    """What a reference within a schema leads to; None if there is nothing."""
    found = schema
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~").replace("%24", "$").replace("%25", "%")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _matches(pattern: str) -> Callable[[str], bool]:
    """A test whether a pattern occurs in a text, by an engine whose time is linear."""
    adapter: TypeAdapter[str] = TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])

    def matches(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return matches


def _validator(schema: dict[str, Any], steps: Iterator[int]) -> Any:
    """A validator that raises once it has used up the steps."""
    import jsonschema  # noqa: PLC0415  an extra, slow to import

    base: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    patterns: dict[str, Callable[[str], bool]] = {}

    def pattern(validator: Any, wanted: str, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string"):
            if wanted not in patterns:
                patterns[wanted] = _matches(wanted)
            if not patterns[wanted](instance):
                yield jsonschema.ValidationError(f"{instance!r} does not match {wanted!r}")

    def counted(check: Any) -> Any:
        def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            if next(steps, None) is None:
                raise _TooManyStepsError
            yield from check(validator, value, instance, schema) or ()

        return apply

    keywords = {**base.VALIDATORS, "pattern": pattern}
    made = jsonschema.validators.extend(base, {name: counted(check) for name, check in keywords.items()})
    return made(schema)


def _candidates(reply: str) -> Iterator[str]:
    """The texts in a reply that may be the answer: all of it, then fenced blocks and JSON values, the last first."""
    text = reply.strip()
    yield text
    yield from (each.strip() for each in reversed(_FENCED.findall(text)))
    decoder, end, found = json.JSONDecoder(), 0, list[str]()
    for start in islice((match.start() for match in re.finditer(r"[{\[]", text)), _MOST_VALUES):
        if start < end:
            continue
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        found.append(text[start:end])
    yield from reversed([each for each in found if each != text])


def _place(path: Any) -> str:
    return ".".join(map(str, path))


def _short(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST_PROBLEM else line[:_LONGEST_PROBLEM] + "..."


def _listed(problems: Any) -> str:
    """The first problems, each with its place."""
    found = [*islice(problems, _MOST_PROBLEMS + 1)]
    shown = [f"{place}: {_short(message)}" if place else _short(message) for place, message in found[:_MOST_PROBLEMS]]
    return "; ".join(shown) + ("; and more" if len(found) > _MOST_PROBLEMS else "")
