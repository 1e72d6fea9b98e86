"""What a policy server can do wrong, by name, as replies of a `FakeServer`; what must come of each is in the tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Fault = Callable[[], "web.Response | dict[str, Any]"]
ELSEWHERE = "http://elsewhere.example:8000/v1/chat/completions"
"""Another server, which must not be asked."""


def says(body: bytes | str, status: int = 200, **headers: str) -> Fault:
    content = body.encode() if isinstance(body, str) else body
    fields = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return lambda: web.Response(body=content, status=status, headers=fields)


def choice(**fields: Any) -> Fault:
    return says(json.dumps({"choices": [fields]}))


def error(status: int, words: str = "it broke") -> Fault:
    return says(json.dumps({"error": {"message": words}}), status)


_GOOD = '{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"%s}]}'

MALFORMED: dict[str, Fault] = {
    "nothing": says(""),
    "random bytes": says(bytes(range(256))),
    "a page": says("<html><title>Welcome</title></html>", Content_Type="text/html"),
    "JSON that ends early": says((_GOOD % "")[:40]),
    "JSON with more behind it": says((_GOOD % "") + "}"),
    "UTF-16": says((_GOOD % "").encode("utf-16")),
    "broken UTF-8": says((_GOOD % "").encode().replace(b'"x"', b'"\xff\xfe"')),
    "a list": says("[1, 2]"),
    "null": says("null"),
    "an error with the status of a success": says('{"error": {"message": "oh no"}}'),
    "no choices": says('{"object": "chat.completion"}'),
    "empty choices": says('{"choices": []}'),
    "a choice that is null": says('{"choices": [null]}'),
    "a choice without a message": choice(finish_reason="stop"),
    "a message without content": choice(message={}, finish_reason="stop"),
    "content that is null": choice(message={"content": None}, finish_reason="stop"),
    "content that is null, and no reason": choice(message={"content": None}),
    "content that is a number": choice(message={"content": 5}),
    "braces without end": says('{"a":' * 100_000),
    "braces without end, closed": says('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "nothing, which says 204": says("", 204),
    "a body that says gzip and is not": says(_GOOD % "", Content_Encoding="gzip"),
}
"""A success by its status, and no completion: asked for again, as after a 500."""

TOO_LONG: dict[str, Fault] = {
    "a text without end": choice(message={"content": "x" * 9_000_000}, finish_reason="stop"),
    "spaces before the reply": says(" " * 9_000_000 + _GOOD % ""),
    "little that unpacks to much": says(gzip.compress(b" " * 50_000_000), Content_Encoding="gzip"),
}
"""More than is taken in."""

BUSY: dict[str, Fault] = {str(status): error(status) for status in (408, 409, 429, 500, 502, 503, 504, 529)} | {
    "502 with a page": says("<html>Bad gateway</html>", 502),
    "500 with a body without end": says("x" * 9_000_000, 500),
}
"""Errors that a repetition can help."""

FINAL: dict[str, Fault] = {str(status): error(status) for status in (400, 401, 403, 404, 405, 413, 422)} | {
    "300": says("", 300),
    "304": says("", 304),
    "307 to another server": says("", 307, Location=ELSEWHERE),
    "308 to another server": says("", 308, Location=ELSEWHERE),
    "302 to another server": says("", 302, Location=ELSEWHERE),
    "301 to no address": says("", 301, Location="file:///etc/passwd"),
    "302 to half an address": says("", 302, Location="http://[::1/v1"),
    "307 without saying where": says("", 307),
    "307 to itself": says("", 307, Location="/v1/chat/completions"),
}
"""What stays as it is however often it is asked for."""

EMPTY: dict[str, Fault] = {
    "an empty text": choice(message={"content": ""}, finish_reason="stop"),
    "white space": choice(message={"content": " \n"}, finish_reason="stop"),
    "null, because it was cut off": choice(message={"content": None}, finish_reason="length"),
    "null, because it called a tool": choice(message={"content": None}, finish_reason="tool_calls"),
    "null, because it only thought": choice(message={"content": None, "reasoning": "hm"}, finish_reason="stop"),
    "null, because it refused": choice(message={"content": None, "refusal": "no"}, finish_reason="stop"),
    "null, because of a filter": choice(message={"content": None}, finish_reason="content_filter"),
}
"""Completions without a text that say why, for which the reader has rules."""
