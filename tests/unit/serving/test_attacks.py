"""An attacker's hour: other keys' things, forged hosts and pages, bodies that are too much, names that lead astray."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from aiohttp import web
from starlette.routing import Route
from support.fake_server import FakeServer
from support.scripts import make_document, read_perfectly
from support.server_faults import TOO_LONG
from support.serving import ALICE, BOB, KEYS, Served, served

from memagent_graph import bounded_http
from memagent_graph.documents import DocumentStore
from memagent_serve import completions, short_requests
from memagent_serve.api_errors import ApiError
from memagent_serve.app import make_app
from memagent_serve.chat_replies import RUN_ID_HEADER
from memagent_serve.chat_requests import parse_chat, parse_fields
from memagent_serve.live import LivePage
from memagent_serve.page_sessions import SIGN_IN_PATH

LONG = make_document({0.3: "The key of harbor is 4711."}, words=1000)
KEY = {"Authorization": f"Bearer {ALICE}"}
OTHER = {"Authorization": f"Bearer {BOB}"}
MEGABYTE = 2**20
PRIVATE = "private-4711"
AS_ALICE, OF_JSON = f"Authorization: Bearer {ALICE}", "Content-Type: application/json"
POST_CHAT = ("POST /v1/chat/completions HTTP/1.1", AS_ALICE, OF_JSON)


def chat(content: Any, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **options}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Served]]:
    folder = tmp_path_factory.mktemp("served")
    bounds = {"max_body": 3 * MEGABYTE, "request_memory": 4 * MEGABYTE, "storage": MEGABYTE, "idle_seconds": 0.5}
    with FakeServer(window=1000) as upstream, served(upstream.base_url, folder, keys=KEYS, **bounds) as server:
        yield upstream, server


@pytest.fixture
def upstream(running: tuple[FakeServer, Served]) -> FakeServer:
    """The policy server of all tests; some let it reply otherwise."""
    upstream, _ = running
    upstream.respond = lambda body, number: "said"
    return upstream


@pytest.fixture
def server(running: tuple[FakeServer, Served], upstream: FakeServer) -> Served:
    return running[1]


def post(server: Served, body: dict[str, Any], headers: dict[str, str] = KEY) -> httpx2.Response:
    return httpx2.post(f"{server.api}/chat/completions", json=body, headers=headers, timeout=60)


def upload(server: Served, name: str, data: bytes, headers: dict[str, str] = KEY) -> httpx2.Response:
    form = {"file": (name, data)}
    return httpx2.post(f"{server.api}/files", files=form, data={"purpose": "user_data"}, headers=headers, timeout=30)


# Keys


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", "Bearer \xff\xfe"],
)
def test_nothing_is_had_without_a_key(server: Served, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    for path in ("/v1/models", "/v1/reads", "/metrics", "/nothing"):
        reply = httpx2.get(f"{server.url}{path}", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"


def test_a_clients_key_model_or_address_never_reaches_or_redirects_the_policys_calls(
    server: Served, upstream: FakeServer
) -> None:
    before = len(upstream.requests)
    for content in ("hello", LONG):
        body = chat(content, base_url="http://evil.example/v1", api_key="stolen", extra_headers={"Host": "evil"})
        headers = {**KEY, "X-Forwarded-Host": "evil.example", "OpenAI-Organization": "evil"}
        assert post(server, body, headers).status_code == 200
    assert len(upstream.requests) > before + 1
    assert {request["model"] for request in upstream.requests[before:]} == {"fake"}


# Hosts, pages, headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", "", "a/b"]
)
def test_a_host_of_another_name_is_refused(server: Served, host: str) -> None:
    forwarded = {"X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
    for path in ("/", "/v1/models", "/health"):
        reply = httpx2.get(f"{server.url}{path}", headers={**KEY, **forwarded, "Host": host})
        assert reply.status_code in {400, 421}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"])
def test_a_page_of_another_origin_is_refused_and_told_nothing(server: Served, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        headers = {**KEY, "Origin": origin, "Access-Control-Request-Method": "GET"}
        reply = httpx2.request(method, f"{server.api}/models", headers=headers)
        assert reply.status_code == 403
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_a_page_of_this_host_may_ask_and_others_where_they_are_named(upstream: FakeServer, tmp_path: Path) -> None:
    with served(upstream.base_url, tmp_path, origins=("https://chat.example",)) as server:
        own = httpx2.get(f"{server.api}/models", headers={"Origin": f"http://localhost:{server.port}"})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers
        named = httpx2.get(f"{server.api}/models", headers={"Origin": "https://chat.example"})
        assert named.headers["access-control-allow-origin"] == "https://chat.example"
        assert httpx2.get(f"{server.api}/models", headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_form_of_a_page_is_no_request(server: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = httpx2.post(
            f"{server.api}/chat/completions", content=json.dumps(chat("hello")), headers={**KEY, "Content-Type": kind}
        )
        assert reply.status_code == 415


@pytest.mark.parametrize("path", ["/v1/models/../files", "/v1/../../etc/passwd", "/v1/chat/completions/../../x",
                                  "//v1/models", "/v1/%2e%2e/%2e%2e/etc/passwd"])  # fmt: skip
def test_no_path_leads_to_a_file_or_to_another_path_of_the_policy_server(server: Served, path: str) -> None:
    assert raw(server, f"GET {path} HTTP/1.1", AS_ALICE).startswith(b"HTTP/1.1 404")


def head(*lines: str) -> bytes:
    """The head of a request, whose body a test sends as it likes."""
    host = [] if any(line.startswith("Host:") for line in lines) else ["Host: localhost"]
    return "\r\n".join([*lines, *host, "", ""]).encode("latin-1")


def raw(server: Served, *lines: str, body: bytes = b"") -> bytes:
    """What the server answers to bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head(*lines, "Connection: close") + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_line_breaks_in_names_reach_no_header_and_no_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    body = chat(LONG, model="fake\r\nX-Evil: 1")
    reply = post(server, body)
    assert reply.status_code == 404
    assert "x-evil" not in reply.headers
    file = upload(server, "a\r\nX-Evil: 1\x1b[31m.txt", b"text").json()
    assert "\r" not in file["filename"]
    assert "\x1b" not in file["filename"]
    assert "\n" not in file["filename"]
    content = httpx2.get(f"{server.api}/files/{file['id']}/content", headers=KEY)
    assert content.content == b"text"
    assert content.headers["content-type"] == "application/octet-stream", "a browser must not run what was uploaded"
    assert content.headers["x-content-type-options"] == "nosniff"
    assert "x-evil" not in content.headers
    assert not [record for record in caplog.records if "\x1b" in record.getMessage() or "\n" in record.getMessage()]


def test_error_texts_of_a_policy_server_are_one_line_in_the_log(
    server: Served, upstream: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: dict[str, Any], number: int) -> web.Response:
        return web.json_response({"error": {"message": "no\r\nWARNING: forged\x1b[31m"}}, status=400)

    upstream.respond = refuse
    reply = post(server, chat(f"{LONG} It was not read before."))
    assert reply.status_code == 502
    assert [record for record in caplog.records if "forged" in record.getMessage()]
    assert not [record for record in caplog.records if set("\r\n\x1b") & set(record.getMessage())]


# Reads


@pytest.mark.parametrize("run_id", ["' OR '1'='1", "%", "_", "..%2f..%2freads.sqlite", "x\x00", "a" * 4000])
def test_no_id_of_a_read_is_a_query_or_a_path(server: Served, run_id: str) -> None:
    assert post(server, chat(LONG)).status_code == 200
    for method, path in (("GET", ""), ("POST", "/cancel")):
        url = f"{server.api}/reads/{run_id if '%2f' in run_id else quote(run_id)}{path}"
        assert httpx2.request(method, url, headers=OTHER).status_code == 404


def test_no_route_gives_another_client_anything_of_a_key(upstream: FakeServer, tmp_path: Path) -> None:
    text = f"{LONG} The key of castle is {PRIVATE}."
    with served(upstream.base_url, tmp_path, keys=KEYS, page=True) as server:
        file = upload(server, f"{PRIVATE}.txt", text.encode()).json()
        run_id = post(server, chat(text)).headers[RUN_ID_HEADER]
        before = [httpx2.get(f"{server.api}/{path}", headers=KEY).content for path in ("files", f"reads/{run_id}")]
        own = {"X-Memagent-Page": "1", "Origin": server.url}
        signed_in = httpx2.post(f"{server.url}{SIGN_IN_PATH}", json={"token": BOB}, headers=own)
        cookie = signed_in.headers["Set-Cookie"].partition(";")[0]
        others = [OTHER, {**own, "Cookie": cookie}, {**OTHER, "X-Api-Key": ALICE}, {"Authorization": f"Basic {ALICE}"}]
        routes = make_app(server.serving, LivePage(server.serving, server.sessions).make_routes()).routes
        query = f"a={run_id}&b={run_id}&run={run_id}&q={PRIVATE}&chunk=0&file={file['id']}&id={file['id']}"
        tries = 0
        for route in routes:
            assert isinstance(route, Route) and route.methods
            ids = (run_id, file["id"]) if "{" in route.path else (run_id,)
            for key, method in itertools.product(ids, sorted(route.methods - {"HEAD"})):
                if route.path == SIGN_IN_PATH:
                    continue
                url = f"{server.url}{re.sub('{.*}', key, route.path)}?{query}"
                body = chat([{"type": "file", "file": {"file_id": key}}])
                body |= {"file": key, "document": key, "question": "Which key?", "memory": "changed", "up": True}
                for headers in others:
                    with httpx2.stream(method, url, headers=headers, timeout=20, json=body) as reply:
                        assert reply.status_code < 500
                        is_endless = reply.headers.get("Content-Type", "").startswith("text/event-stream")
                        for content in itertools.islice(reply.iter_bytes(), 1 if is_endless else None):
                            assert PRIVATE.encode() not in content
                    tries += 1
        assert tries >= 69
        assert before == [
            httpx2.get(f"{server.api}/{path}", headers=KEY).content for path in ("files", f"reads/{run_id}")
        ]
        assert PRIVATE in httpx2.get(f"{server.api}/files/{file['id']}/content", headers=KEY).text


# Files


@pytest.mark.parametrize(
    "file_id", ["../reads.sqlite", "file-" + "0" * 31 + "/", "file-" + "0" * 32, "..%2f..%2fx", "x"]
)
def test_no_file_id_names_a_path(server: Served, file_id: str) -> None:
    assert httpx2.get(f"{server.api}/files/{file_id}", headers=KEY).status_code == 404
    part = [{"type": "file", "file": {"file_id": file_id}}]
    assert post(server, chat(part)).status_code == 404


def test_a_file_that_is_too_large_or_empty_is_refused(server: Served) -> None:
    assert upload(server, "large.txt", b"x" * (2 * MEGABYTE)).status_code == 413
    assert upload(server, "empty.txt", b"").status_code == 400


def test_a_form_of_countless_parts_is_refused(server: Served) -> None:
    fields = {f"field{number}": "x" for number in range(100)}
    form = {"file": ("a.txt", b"text")}
    reply = httpx2.post(f"{server.api}/files", files=form, data=fields, headers=KEY)
    assert reply.status_code == 400
    files = [("file", (f"{number}.txt", b"text")) for number in range(100)]
    assert httpx2.post(f"{server.api}/files", files=files, headers=KEY).status_code == 400


def test_compressed_bodies_are_refused(server: Served) -> None:
    headers = {**KEY, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert httpx2.post(f"{server.api}/chat/completions", content=b"\x1f\x8b", headers=headers).status_code == 415


# Heads and bodies


@pytest.mark.parametrize(
    ("status", "kind"), [(200, "application/json"), (200, "text/event-stream"), (500, "application/json")]
)
def test_a_policy_server_that_repeats_its_key_tells_no_client(
    server: Served, upstream: FakeServer, status: int, kind: str
) -> None:
    body = b'data: {"x": "the-server\'s-own-key"}\n\n'
    upstream.respond = lambda *_: web.Response(body=body, status=status, content_type=kind)
    reply = post(server, chat("hello"))
    assert reply.status_code == status
    assert reply.content == b'data: {"x": "[hidden]"}\n\n'


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/html"])
def test_a_reply_of_the_policy_server_in_another_form_reaches_no_client(
    server: Served, upstream: FakeServer, kind: str
) -> None:
    upstream.respond = lambda *_: web.Response(body=b"<p>the-server's-own-key", content_type=kind)
    reply = post(server, chat("hello"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "bad_gateway")
    assert "the-server's-own-key" not in reply.text


@pytest.mark.parametrize(("content", "stream"), [(LONG, True), ("hello", False)])
@pytest.mark.parametrize("name", TOO_LONG)
def test_a_policy_server_that_sends_without_end_fills_no_memory(
    name: str, stream: bool, content: str, server: Served, upstream: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flood(body: dict[str, Any], number: int) -> Any:
        text = body["messages"][-1]["content"]
        if "<problem>" in text:
            return read_perfectly(text)
        reply = TOO_LONG[name]()
        if body.get("stream"):
            reply.content_type = "text/event-stream"
        return reply

    monkeypatch.setattr(short_requests, "_MAX_REPLY_BYTES", MEGABYTE)
    upstream.respond = flood
    reply = post(server, chat(content, stream=stream, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert len(reply.content) < MEGABYTE
    event = reply.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    assert json.loads(event)["error"]["code"] in {"bad_gateway", "policy_server_failed"}


def test_a_connection_on_which_no_request_begins_is_closed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEADER_SECONDS", 0.2)
    for beginning in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(beginning)
            assert connection.recv(100) == b""


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_a_body_with_two_lengths_is_refused_and_nothing_behind_it_is_a_request(server: Served, host: str) -> None:
    lines = ("POST /v1/files HTTP/1.1", f"Host: {host}", "Content-Length: 4", "Transfer-Encoding: chunked")
    reply = raw(server, *lines, body=b"0\r\n\r\n" + head("GET /v1/files HTTP/1.1"))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1 ") == 1


def test_a_server_that_stops_and_a_full_disk_are_errors_that_clients_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as pool, FakeServer(window=1000, delay=3) as slow:
        with served(slow.base_url, tmp_path) as server:
            waiting, streaming = (
                pool.submit(httpx2.post, f"{server.api}/chat/completions", json=chat(LONG, stream=stream), timeout=60)
                for stream in (False, True)
            )
            reads = server.serving.manager._reads
            until(lambda: [read.followers for read in list(reads.values())] == [2])  # both requests wait for one read
            monkeypatch.setattr(DocumentStore, "_make_folders", _full_disk)
            refusal = post(server, chat(f"{LONG} more"))
        stopped, events = waiting.result(), streaming.result().text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "server_stopping")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (507, "insufficient_storage")
    assert str(tmp_path) not in refusal.text
    assert {"Retry-After"} <= set(map(str.title, refusal.headers)) & set(map(str.title, stopped.headers))


def _full_disk(store: DocumentStore) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_headers_without_an_end_are_refused_before_they_take_memory(server: Served) -> None:
    """Whoever has no key can send them, too."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            for _ in range(64):
                connection.sendall(b"x" * MEGABYTE)
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_came(server: Served) -> None:
    assert raw(server, *POST_CHAT, "Content-Length: 999999999999").startswith(b"HTTP/1.1 413")
    chunked = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(49))
    refusal = raw(server, *POST_CHAT, "Transfer-Encoding: chunked", body=chunked)
    assert b"413" in refusal[:20]
    assert b"POST /v1/files" in refusal, "it says how a longer document can be sent"
    assert server.serving.request_quota.used_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "fake", "messages": [' + b"{}," * 1_500_000 + b"{}]}",
        b'{"model": "fake", "messages": [' + b'"",' * 1_500_000 + b'""]}',
        b'{"model": "fake", "messages": []' + b', "a": "b"' * 600_000 + b"}",
    ],
)
def test_countless_small_values_are_refused_before_they_take_memory(body: bytes) -> None:
    with pytest.raises(ApiError, match="too many values") as caught:
        parse_fields(body)
    assert caught.value.status == 413


def test_bytes_that_are_no_text_are_refused_wherever_they_are() -> None:
    for body in (b'{"model": "\x80ake", "messages": []}', b'{"messages": [{"role": "user", "content": "\xff"}]}'):
        with pytest.raises(ApiError, match="not a JSON object") as caught:
            parse_fields(body)
        assert caught.value.status == 400


def test_a_long_text_of_escapes_and_quotes_is_no_such_thing() -> None:
    text = '{"a": [1, "\\"]}, ' * 500_000
    parsed = parse_chat(parse_fields(json.dumps(chat(text)).encode()))
    assert parsed.messages[0].parts[0].text is not None
    assert parsed.messages[0].parts[0].text.decode() == text


def test_slow_bodies_are_given_up(server: Served) -> None:
    assert raw(server, *POST_CHAT, "Content-Length: 100", body=b"{").startswith(b"HTTP/1.1 408")
    form = ("POST /v1/files HTTP/1.1", AS_ALICE, "Content-Type: multipart/form-data; boundary=x", "Content-Length: 100")
    assert raw(server, *form, body=b"--x\r\n").startswith(b"HTTP/1.1 408")


def test_large_requests_share_a_quota_that_is_given_back(upstream: FakeServer, tmp_path: Path) -> None:
    with served(upstream.base_url, tmp_path, request_memory=4 * MEGABYTE) as server:
        memory = server.serving.request_quota
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head(*POST_CHAT, f"Content-Length: {3 * MEGABYTE}") + b"x" * (2 * MEGABYTE))
            until(lambda: memory.used_bytes == 3 * MEGABYTE)
            reply = post(server, chat("word " * 300_000))
            assert reply.status_code == 429
            assert int(reply.headers["Retry-After"]) >= 1
        until(lambda: memory.used_bytes == 0)


def test_uploads_that_arrive_share_a_quota_and_a_time(upstream: FakeServer, tmp_path: Path) -> None:
    form = ("POST /v1/files HTTP/1.1", "Content-Type: multipart/form-data; boundary=x", "Content-Length: 2000000")
    part = b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
    bounds = {"storage": 2 * MEGABYTE, "total_storage": 2 * MEGABYTE, "body_seconds": 1.5, "idle_seconds": 1.0}
    with served(upstream.base_url, tmp_path, **bounds) as server:
        arriving = server.serving.upload_quota
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head(*form) + part + b"x" * (MEGABYTE * 3 // 2))
            until(lambda: arriving.used_bytes > MEGABYTE)
            assert upload(server, "b.txt", b"x" * MEGABYTE).status_code == 429
            for _ in range(20):  # a client that is never idle
                connection.sendall(b"x")
                time.sleep(0.1)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        until(lambda: arriving.used_bytes == 0)
        assert upload(server, "b.txt", b"x" * MEGABYTE).status_code == 200


def test_conversions_of_one_key_hold_up_no_large_request_of_another_and_end_with_their_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = endless_conversions(monkeypatch)
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": "aGVsbG8="}}
    with FakeServer(window=1000) as upstream, served(upstream.base_url, tmp_path, keys=KEYS) as server:
        with large_requests(server, 2, [part]):
            until(lambda: conversions == ["begun"] * 2)
            large = chat("hello", padding="x" * MEGABYTE)
            assert post(server, large, OTHER).status_code == 200
        until(lambda: conversions == ["begun"] * 2 + ["ended"] * 2)


def endless_conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on no document is converted; the list says which conversions begin, and which are broken off."""
    conversions: list[str] = []

    async def last(store: DocumentStore, document: Any) -> None:
        conversions.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            conversions.append("ended")

    monkeypatch.setattr(DocumentStore, "add_async", last)
    return conversions


def test_many_large_requests_of_one_key_are_parsed_one_after_another(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    ended = Event()

    def parse_slowly(body: bytes) -> Any:
        if b"of alice" in body:
            lengths.append(len(body))
            assert ended.wait(30)
        return parse_fields(body)

    monkeypatch.setattr(completions, "parse_fields", parse_slowly)
    with large_requests(server, 4, "of alice"):
        until(lambda: lengths)
        large = chat("hello", padding="x" * MEGABYTE)
        assert post(server, large, OTHER).status_code == 200
        assert len(lengths) == 1
        ended.set()


@contextmanager
def large_requests(server: Served, number: int, content: Any) -> Iterator[None]:
    """Alice sends some requests, whose replies she does not read."""
    body = json.dumps(chat(content, padding="x" * MEGABYTE)).encode()
    with ExitStack() as stack:
        for _ in range(number):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(head(*POST_CHAT, f"Content-Length: {len(body)}") + body)
        yield


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something, and give what it is."""
    for _ in range(600):
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


# Streams


def test_a_stream_that_nobody_reads_holds_up_no_read(tmp_path: Path) -> None:
    with FakeServer(window=1000) as upstream, served(upstream.base_url, tmp_path) as server, ExitStack() as stack:
        body = json.dumps(chat(LONG, stream=True)).encode()
        for _ in range(50):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head(*POST_CHAT, f"Content-Length: {len(body)}") + body)
        reply = post(server, chat(LONG))
        assert reply.status_code == 200
        assert reply.headers["X-Memagent-Read"] in {"started", "joined", "repeated"}
        assert len(httpx2.get(f"{server.api}/reads").json()["data"]) == 1, "fifty streams of one request are one read"


def test_more_connections_than_there_may_be_are_refused_and_leave_the_server_well(
    upstream: FakeServer, tmp_path: Path
) -> None:
    with served(upstream.base_url, tmp_path, max_connections=8) as server, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: httpx2.get(f"{server.api}/models").status_code == 503)
        stack.close()
        until(lambda: httpx2.get(f"{server.api}/models").status_code == 200)
