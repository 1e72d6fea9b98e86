"""Faulty replies of a policy server by name, for `FakeServer`; the tests say how each must be handled."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Fault = Callable[[], "web.Response | dict[str, Any]"]
OTHER_SERVER = "http://elsewhere.example:8000/v1/chat/completions"
"""The URL of another server, to which no request may go."""


def make_response(body: bytes | str, status: int = 200, **headers: str) -> Fault:
    content = body.encode() if isinstance(body, str) else body
    fields = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return lambda: web.Response(body=content, status=status, headers=fields)


def make_choice(**fields: Any) -> Fault:
    return make_response(json.dumps({"choices": [fields]}))


def make_error(status: int, message: str = "it broke") -> Fault:
    return make_response(json.dumps({"error": {"message": message}}), status)


_VALID_REPLY = '{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"%s}]}'

MALFORMED: dict[str, Fault] = {
    "an empty body": make_response(""),
    "random bytes": make_response(bytes(range(256))),
    "an HTML page": make_response("<html><title>Welcome</title></html>", Content_Type="text/html"),
    "JSON that ends early": make_response((_VALID_REPLY % "")[:40]),
    "JSON with a surplus brace": make_response((_VALID_REPLY % "") + "}"),
    "UTF-16": make_response((_VALID_REPLY % "").encode("utf-16")),
    "broken UTF-8": make_response((_VALID_REPLY % "").encode().replace(b'"x"', b'"\xff\xfe"')),
    "a list": make_response("[1, 2]"),
    "null": make_response("null"),
    "an error with status 200": make_response('{"error": {"message": "oh no"}}'),
    "no choices": make_response('{"object": "chat.completion"}'),
    "empty choices": make_response('{"choices": []}'),
    "a choice that is null": make_response('{"choices": [null]}'),
    "a choice without a message": make_choice(finish_reason="stop"),
    "a message without content": make_choice(message={}, finish_reason="stop"),
    "content that is null": make_choice(message={"content": None}, finish_reason="stop"),
    "content that is null, without a finish reason": make_choice(message={"content": None}),
    "content that is a number": make_choice(message={"content": 5}),
    "unclosed nested braces": make_response('{"a":' * 100_000),
    "deeply nested brackets": make_response('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "an empty body with status 204": make_response("", 204),
    "plain JSON declared as gzip": make_response(_VALID_REPLY % "", Content_Encoding="gzip"),
}
"""Replies with a success status but no completion; they are retried like a 500."""

OVERSIZED: dict[str, Fault] = {
    "a text of 9 MB": make_choice(message={"content": "x" * 9_000_000}, finish_reason="stop"),
    "9 MB of spaces before the reply": make_response(" " * 9_000_000 + _VALID_REPLY % ""),
    "50 MB in a small gzip body": make_response(gzip.compress(b" " * 50_000_000), Content_Encoding="gzip"),
}
"""Replies over the size limit."""

RETRIED_ERRORS: dict[str, Fault] = {
    str(status): make_error(status) for status in (408, 409, 429, 500, 502, 503, 504, 529)
} | {
    "502 with an HTML page": make_response("<html>It took longer than 60 s</html>", 502),
    "500 with a body of 9 MB": make_response("x" * 9_000_000, 500),
}
"""Errors that are retried."""

FINAL_ERRORS: dict[str, Fault] = {str(status): make_error(status) for status in (400, 401, 403, 404, 405, 413, 422)} | {
    "300": make_response("", 300),
    "304": make_response("", 304),
    "307 to another server": make_response("", 307, Location=OTHER_SERVER),
    "308 to another server": make_response("", 308, Location=OTHER_SERVER),
    "302 to another server": make_response("", 302, Location=OTHER_SERVER),
    "301 to a file": make_response("", 301, Location="file:///etc/passwd"),
    "302 to a malformed address": make_response("", 302, Location="http://[::1/v1"),
    "307 without a Location": make_response("", 307),
    "307 to itself": make_response("", 307, Location="/v1/chat/completions"),
}
"""Errors that are not retried."""

EMPTY_TEXTS: dict[str, Fault] = {
    "an empty text": make_choice(message={"content": ""}, finish_reason="stop"),
    "white space": make_choice(message={"content": " \n"}, finish_reason="stop"),
    "null, because it was cut off": make_choice(message={"content": None}, finish_reason="length"),
    "null, because it called a tool": make_choice(message={"content": None}, finish_reason="tool_calls"),
    "null, because it only thought": make_choice(message={"content": None, "reasoning": "hm"}, finish_reason="stop"),
    "null, because it refused": make_choice(message={"content": None, "refusal": "no"}, finish_reason="stop"),
    "null, because of a filter": make_choice(message={"content": None}, finish_reason="content_filter"),
}
"""Completions without text but with a finish reason; the reader has a rule for each."""
