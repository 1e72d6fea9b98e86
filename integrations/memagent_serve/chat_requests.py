"""Parses the necessary fields of a chat request. Texts are decoded only when they are needed."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw

from memagent_graph.policy import SamplingParams
from memagent_serve.api_errors import APIError, make_bad_request_error

Fields: TypeAlias = Mapping[str, Raw]
"""A JSON object's values, as raw JSON."""

_MAX_MESSAGES: Final = 100_000
"""Also the maximum number of all parts of the messages."""
_MAX_NAME_LENGTH: Final = 512
_SMALL_BODY_BYTES: Final = 4 << 20
_MAX_STRINGS: Final = 1_000_000
_JSON_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or what begins like one and never ends: it matches at every quote, so the time is linear."""
_EMPTY_VALUES: Final = frozenset({b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""'})
_DEFAULTS: Final = {"response_format": {"type": "text"}, "modalities": ["text"]}

_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_list_decoder: Final = msgspec.json.Decoder(list[Raw])


class Options(msgspec.Struct, frozen=True):
    """The fields that determine how a request is read. Other fields are passed on without being parsed."""

    model: Annotated[str, Meta(max_length=_MAX_NAME_LENGTH)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """For both fields, a value below 1 means no limit."""

    @property
    def answer_tokens(self) -> int | None:
        """The maximum length of the reply: the lower limit, if there are two."""
        return min(
            (limit for limit in (self.max_tokens, self.max_completion_tokens) if limit and limit > 0), default=None
        )

    def make_sampling(self, base: SamplingParams) -> SamplingParams:
        """Return a policy's sampling with the request's choices."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "seed")}
        return replace(base, **{name: value for name, value in values.items() if value is not None})

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts at which the reply ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed reply ends with its usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class FileContent(msgspec.Struct, frozen=True):
    """The file of a file part: the id of an uploaded file, or the file's bytes."""

    file_id: Annotated[str, Meta(max_length=_MAX_NAME_LENGTH)] | None = None
    filename: Annotated[str, Meta(max_length=_MAX_NAME_LENGTH)] | None = None
    file_data: Raw = Raw(b"")


@dataclass(frozen=True, slots=True)
class JSONText:
    """A text in a request, as JSON."""

    raw: Raw

    @classmethod
    def of(cls, raw: Raw) -> JSONText | None:
        """Return the text; None if the JSON value is not a string."""
        view = memoryview(raw)
        return cls(raw) if len(view) >= 2 and view[0] == ord('"') else None

    @property
    def size(self) -> int:
        """The size of the JSON in bytes; the text has at most as many."""
        return len(memoryview(self.raw)) - 2

    def decode(self) -> str:
        """Return the text.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: the JSON is not well formed.
        """
        return msgspec.json.decode(self.raw, type=str)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A part of a message: a text, a file, or something else."""

    kind: str
    text: JSONText | None = None
    file: FileContent | None = None
    raw: Raw | None = None
    """The part as raw JSON; None if the message's content is one text."""


@dataclass(frozen=True, slots=True, order=True)
class PartPosition:
    """The position of a part: the index of its message, and its index in the message."""

    message: int
    part: int


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `fields` has all its fields, `parts` the parts of its content."""

    role: str
    fields: Fields
    parts: tuple[MessagePart, ...]

    def get_field(self, name: str) -> Any:
        """Return the value of a small field; None if it is missing."""
        return msgspec.json.decode(self.fields[name]) if name in self.fields else None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a chat completion."""

    fields: Fields
    messages: tuple[ChatMessage, ...]

    @property
    def options(self) -> Options:
        """The options.

        Raises:
            APIError: 400; an option has an invalid value.
        """
        option_fields = {name: self.fields[name] for name in Options.__struct_fields__ if name in self.fields}
        with refuse_invalid_json():
            return msgspec.convert(msgspec.json.decode(msgspec.json.encode(option_fields)), Options, strict=False)

    def has_value(self, name: str) -> bool:
        """Return whether a field has a value other than its default: not null, false, 0, empty, or text."""
        if name not in self.fields or _is_one_of(self.fields[name], _EMPTY_VALUES):
            return False
        return name not in _DEFAULTS or msgspec.json.decode(self.fields[name]) != _DEFAULTS[name]

    @property
    def parts(self) -> dict[PartPosition, MessagePart]:
        """The parts of all messages, in order."""
        return {
            PartPosition(index, part_index): part
            for index, message in enumerate(self.messages)
            for part_index, part in enumerate(message.parts)
        }

    @property
    def has_files(self) -> bool:
        """Whether a file is attached."""
        return any(part.kind == "file" for part in self.parts.values())

    @property
    def unreadable_kind(self) -> str | None:
        """The kind of the first part that cannot be read as text, if there is one."""
        kinds = (part.kind for part in self.parts.values())
        return next((kind for kind in kinds if kind not in {"text", "file", "refusal"}), None)


def parse_fields(body: bytes) -> dict[str, Raw]:
    """Return the fields of a body. Their values are not parsed.

    Raises:
        APIError: 400, it is not a JSON object; 413, it has too many values.
    """
    _require_few_values(body)
    try:
        for _ in codecs.iterdecode((body[start : start + 2**20] for start in range(0, len(body), 2**20)), "utf-8"):
            pass  # a field that is not parsed here may have bytes that are not UTF-8
        return _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_bad_request_error(f"the body is not a JSON object: {error}", code="invalid_json") from error


def parse_chat(fields: Fields) -> ChatRequest:
    """Parse the messages of a request.

    Raises:
        APIError: 400; the message says what is wrong.
    """
    with refuse_invalid_json("messages"):
        raw_messages = _list_decoder.decode(fields["messages"]) if "messages" in fields else []
        _require_few(len(raw_messages), "messages")
        messages, part_count = list[ChatMessage](), 0
        for raw in raw_messages:
            messages.append(_parse_message(_fields_decoder.decode(raw)))
            part_count += len(messages[-1].parts)
            _require_few(part_count, "parts of messages")
    if not messages:
        raise make_bad_request_error("there are no messages; send at least one", "messages", "empty_array")
    return ChatRequest(fields, tuple(messages))


def _require_few_values(body: bytes) -> None:
    """Refuse a large body with a huge number of small values, which would need many times their size in memory.

    In a normal request only strings are long, so they are skipped, and the other bytes are counted.
    """
    if len(body) <= _SMALL_BODY_BYTES:
        return
    other_bytes = position = 0
    for string_index, string in enumerate(_JSON_STRING.finditer(body)):
        other_bytes += string.start() - position
        position = string.end()
        if string_index > _MAX_STRINGS or other_bytes > _SMALL_BODY_BYTES:
            break
    else:
        other_bytes += len(body) - position
        if other_bytes <= _SMALL_BODY_BYTES:
            return
    raise APIError(
        413, "the request has too many values besides its texts; send fewer messages", code="too_many_values"
    )


def _require_few(count: int, noun: str) -> None:
    if count > _MAX_MESSAGES:
        raise make_bad_request_error(f"at most {_MAX_MESSAGES:,} {noun} are allowed, got {count:,}", "messages")


def _parse_message(fields: dict[str, Raw]) -> ChatMessage:
    role = msgspec.json.decode(fields.get("role", Raw(b"null")), type=str)
    content = fields.get("content")
    if content is None or _is_one_of(content, _EMPTY_VALUES):
        return ChatMessage(role, fields, ())
    if (text := JSONText.of(content)) is not None:
        return ChatMessage(role, fields, (MessagePart("text", text),))
    raw_parts = _list_decoder.decode(content)
    _require_few(len(raw_parts), "parts of messages")
    return ChatMessage(role, fields, tuple(map(_parse_part, raw_parts)))


def _is_one_of(raw: Raw, values: frozenset[bytes]) -> bool:
    """Return whether a value is one of a few short values. A long value is not copied for the comparison."""
    view = memoryview(raw)
    return len(view) <= max(map(len, values)) and bytes(view) in values


def _parse_part(raw: Raw) -> MessagePart:
    if (text := JSONText.of(raw)) is not None:
        return MessagePart("text", text, raw=raw)
    fields = _fields_decoder.decode(raw)
    kind = msgspec.json.decode(fields.get("type", Raw(b"null")), type=str)
    if kind in {"file", "input_file"}:
        # The Responses API has the same fields next to the type.
        content = msgspec.json.decode(fields.get("file", raw), type=FileContent)
        return MessagePart("file", file=content, raw=raw)
    # The text of a part, including input_text, output_text, and a tool's result.
    name = {"tool_result": "content", "refusal": "refusal"}.get(kind, "text")
    text = JSONText.of(fields.get(name, Raw(b"")))
    return MessagePart(kind if text is None else "text", text, raw=raw)


@contextmanager
def refuse_invalid_json(param: str | None = None) -> Iterator[None]:
    """Raise an `APIError`, 400, if a part of a request is not valid JSON, or a field (`param`) has an invalid value."""
    try:
        yield
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.([^`\[]+)", str(error))  # as in "Expected `int` - at `$.n`"
        raise make_bad_request_error(f"the request is not valid: {error}", param or (field and field[1])) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_bad_request_error(f"the request is not valid JSON: {error}", code="invalid_json") from error


def require_readable(request: ChatRequest) -> None:
    """Refuse a request with options or parts that are not possible when it is read.

    Raises:
        APIError: 400, naming the field.
    """
    if (request.options.n or 1) != 1:
        raise make_bad_request_error(
            "this request is longer than the policy's window, so it is read, and a read gives one answer; send n=1", "n"
        )
    if (kind := request.unreadable_kind) is not None:
        raise make_bad_request_error(
            f"this request must be read, and a part of type {kind!r} cannot be; send text or files", "messages"
        )
