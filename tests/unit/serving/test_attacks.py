"""Attacks: other keys' data, forged hosts and origins, oversized requests, malicious names, and endless replies."""

from __future__ import annotations

import asyncio
import base64
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
from support.server_faults import OVERSIZED
from support.serving import ALICE, BOB, KEYS, Server, serve

from memagent_graph import bounded_http
from memagent_graph.documents import DocumentStore
from memagent_graph.errors import PolicyUnreachableError
from memagent_serve import completions, short_requests
from memagent_serve.api_errors import APIError, to_api_error
from memagent_serve.app import make_app
from memagent_serve.chat_replies import RUN_ID_HEADER
from memagent_serve.chat_requests import parse_chat, parse_fields
from memagent_serve.keys import Keys, Owner
from memagent_serve.live import LivePage
from memagent_serve.page_sessions import SIGN_IN_PATH

LONG_TEXT = make_document({0.3: "The key of harbor is 4711."}, words=1000)
ALICE_HEADERS = {"Authorization": f"Bearer {ALICE}"}
BOB_HEADERS = {"Authorization": f"Bearer {BOB}"}
MEGABYTE = 2**20
PRIVATE_TEXT = "private-4711"
ALICE_HEADER, JSON_HEADER = f"Authorization: Bearer {ALICE}", "Content-Type: application/json"
BOB_HEADER = f"Authorization: Bearer {BOB}"
POST_CHAT = ("POST /v1/chat/completions HTTP/1.1", ALICE_HEADER, JSON_HEADER)
POST_FILE = ("POST /v1/files HTTP/1.1", ALICE_HEADER, "Content-Type: multipart/form-data; boundary=x")


def make_chat(content: Any, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **options}


@pytest.fixture(scope="module")
def running_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Server]]:
    folder = tmp_path_factory.mktemp("served")
    bounds = {"max_body": 3 * MEGABYTE, "request_memory": 4 * MEGABYTE, "storage": MEGABYTE, "idle_seconds": 0.5}
    with FakeServer(window=1000) as upstream, serve(upstream.base_url, folder, keys=KEYS, **bounds) as server:
        yield upstream, server


@pytest.fixture
def upstream(running_servers: tuple[FakeServer, Server]) -> FakeServer:
    """The policy server of all tests, with its default reply."""
    upstream, _ = running_servers
    upstream.respond = lambda body, number: "said"
    return upstream


@pytest.fixture
def server(running_servers: tuple[FakeServer, Server], upstream: FakeServer) -> Server:
    return running_servers[1]


def post(server: Server, body: dict[str, Any], headers: dict[str, str] = ALICE_HEADERS) -> httpx2.Response:
    return httpx2.post(f"{server.api}/chat/completions", json=body, headers=headers, timeout=60)


def upload(server: Server, name: str, data: bytes, headers: dict[str, str] = ALICE_HEADERS) -> httpx2.Response:
    files = {"file": (name, data)}
    return httpx2.post(f"{server.api}/files", files=files, data={"purpose": "user_data"}, headers=headers, timeout=30)


# Keys


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", "Bearer \xff\xfe"],
)
def test_requests_without_a_valid_key_are_refused(server: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    for path in ("/v1/models", "/v1/reads", "/metrics", "/nothing"):
        reply = httpx2.get(f"{server.url}{path}", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"


def test_client_fields_cannot_redirect_calls_of_the_policy(server: Server, upstream: FakeServer) -> None:
    requests_before = len(upstream.requests)
    for content in ("hello", LONG_TEXT):
        body = make_chat(content, base_url="http://evil.example/v1", api_key="stolen", extra_headers={"Host": "evil"})
        headers = {**ALICE_HEADERS, "X-Forwarded-Host": "evil.example", "OpenAI-Organization": "evil"}
        assert post(server, body, headers).status_code == 200
    assert len(upstream.requests) > requests_before + 1
    assert {request["model"] for request in upstream.requests[requests_before:]} == {"fake"}


# Hosts, pages, headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.com", "localhost@evil", "", "a/b"])
def test_unknown_host_name_is_refused(server: Server, host: str) -> None:
    forwarded_headers = {"X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
    for path in ("/", "/v1/models", "/health"):
        reply = httpx2.get(f"{server.url}{path}", headers={**ALICE_HEADERS, **forwarded_headers, "Host": host})
        assert reply.status_code in {400, 421}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"])
def test_foreign_origin_is_refused_without_cors_headers(server: Server, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        headers = {**ALICE_HEADERS, "Origin": origin, "Access-Control-Request-Method": "GET"}
        reply = httpx2.request(method, f"{server.api}/models", headers=headers)
        assert reply.status_code == 403
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_local_and_configured_origins_are_allowed(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, origins=("https://Chat.example/",)) as server:
        for origin, cors_origin in ((f"http://localhost:{server.port}", None), ("https://chat.example",) * 2):
            reply = httpx2.get(f"{server.api}/models", headers={"Origin": origin})
            assert (reply.status_code, reply.headers.get("access-control-allow-origin")) == (200, cors_origin)
        assert httpx2.get(f"{server.api}/models", headers={"Origin": "https://evil.example"}).status_code == 403
        headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,x-stainless-os"  # of the client for JavaScript
        assert httpx2.options(f"{server.api}/chat/completions", headers=headers).status_code == 200


def test_form_content_types_are_refused(server: Server) -> None:
    body = json.dumps(make_chat("hello"))
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = httpx2.post(
            f"{server.api}/chat/completions", content=body, headers={**ALICE_HEADERS, "Content-Type": content_type}
        )
        assert reply.status_code == 415


@pytest.mark.parametrize("path", ["/v1/models/../files", "/v1/../../etc/passwd", "/v1/chat/completions/../../x",
                                  "//v1/models", "/v1/%2e%2e/%2e%2e/etc/passwd"])  # fmt: skip
def test_path_traversal_is_not_found(server: Server, path: str) -> None:
    assert send_raw(server, f"GET {path} HTTP/1.1", ALICE_HEADER).startswith(b"HTTP/1.1 404")


def make_request_head(*lines: str) -> bytes:
    """Return the head of a request; a test sends the body itself."""
    host = [] if any(line.startswith("Host:") for line in lines) else ["Host: localhost"]
    return "\r\n".join([*lines, *host, "", ""]).encode("latin-1")


def send_raw(server: Server, *lines: str, body: bytes = b"") -> bytes:
    """Send raw bytes; return the response."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(make_request_head(*lines, "Connection: close") + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_line_breaks_in_names_reach_no_header_or_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    reply = post(server, make_chat(LONG_TEXT, model="fake\r\nX-Evil: 1"))
    assert reply.status_code == 404
    assert "x-evil" not in reply.headers
    file = upload(server, "a\r\nX-Evil: 1\x1b[31m.txt", b"text").json()
    assert not set("\r\n\x1b") & set(file["filename"])
    content = httpx2.get(f"{server.api}/files/{file['id']}/content", headers=ALICE_HEADERS)
    assert content.content == b"text"
    assert content.headers["content-type"] == "application/octet-stream", "a browser must not run what was uploaded"
    assert content.headers["x-content-type-options"] == "nosniff"
    assert "x-evil" not in content.headers
    assert not [record for record in caplog.records if "\x1b" in record.getMessage() or "\n" in record.getMessage()]


def test_policy_server_errors_are_logged_on_one_line(
    server: Server, upstream: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: dict[str, Any], number: int) -> web.Response:
        return web.json_response({"error": {"message": "no\r\nWARNING: forged\x1b[31m"}}, status=400)

    upstream.respond = refuse
    assert post(server, make_chat(f"{LONG_TEXT} It was not read before.")).status_code == 502
    assert [record for record in caplog.records if "forged" in record.getMessage()]
    assert not [record for record in caplog.records if set("\r\n\x1b") & set(record.getMessage())]


# Reads


@pytest.mark.parametrize("run_id", ["' OR '1'='1", "%", "_", "..%2f..%2freads.sqlite", "x\x00", "a" * 4000])
def test_malicious_read_ids_are_not_found(server: Server, run_id: str) -> None:
    assert post(server, make_chat(LONG_TEXT)).status_code == 200
    for method, path in (("GET", ""), ("POST", "/cancel")):
        url = f"{server.api}/reads/{run_id if '%2f' in run_id else quote(run_id)}{path}"
        assert httpx2.request(method, url, headers=BOB_HEADERS).status_code == 404


def test_no_route_returns_data_of_another_key(upstream: FakeServer, tmp_path: Path) -> None:
    text = f"{LONG_TEXT} The key of castle is {PRIVATE_TEXT}."
    with serve(upstream.base_url, tmp_path, keys=KEYS, page=True) as server:
        file = upload(server, f"{PRIVATE_TEXT}.txt", text.encode()).json()
        run_id = post(server, make_chat(text)).headers[RUN_ID_HEADER]
        own_urls = [f"{server.api}/files", f"{server.api}/reads/{run_id}"]
        contents_before = [httpx2.get(url, headers=ALICE_HEADERS).content for url in own_urls]
        page_headers = {"X-Memagent-Page": "1", "Origin": server.url}
        sign_in_reply = httpx2.post(f"{server.url}{SIGN_IN_PATH}", json={"token": BOB}, headers=page_headers)
        cookie = sign_in_reply.headers["Set-Cookie"].partition(";")[0]
        foreign_headers = [BOB_HEADERS, {**page_headers, "Cookie": cookie}, {**BOB_HEADERS, "X-Api-Key": ALICE}]
        foreign_headers.append({"Authorization": f"Basic {ALICE}"})
        routes = make_app(server.resources, LivePage(server.resources, server.sessions).make_routes()).routes
        query = f"a={run_id}&b={run_id}&run={run_id}&q={PRIVATE_TEXT}&chunk=0&file={file['id']}&id={file['id']}"
        request_count = 0
        for route in routes:
            assert isinstance(route, Route) and route.methods
            ids = (run_id, file["id"]) if "{" in route.path else (run_id,)
            for resource_id, method in itertools.product(ids, sorted(route.methods - {"HEAD"})):
                if route.path == SIGN_IN_PATH:
                    continue
                url = f"{server.url}{re.sub('{.*}', resource_id, route.path)}?{query}"
                body = make_chat([{"type": "file", "file": {"file_id": resource_id}}])
                body |= dict.fromkeys(("file", "document"), resource_id)
                body |= {"question": "Which key?", "memory": "changed", "up": True}
                for headers in foreign_headers:
                    with httpx2.stream(method, url, headers=headers, timeout=20, json=body) as reply:
                        assert reply.status_code < 500
                        is_endless = reply.headers.get("Content-Type", "").startswith("text/event-stream")
                        for content in itertools.islice(reply.iter_bytes(), 1 if is_endless else None):
                            assert PRIVATE_TEXT.encode() not in content
                    request_count += 1
        assert request_count >= 69
        assert contents_before == [httpx2.get(url, headers=ALICE_HEADERS).content for url in own_urls]
        assert PRIVATE_TEXT in httpx2.get(f"{server.api}/files/{file['id']}/content", headers=ALICE_HEADERS).text


# Files


@pytest.mark.parametrize(
    "file_id", ["../reads.sqlite", "file-" + "0" * 31 + "/", "file-" + "0" * 32, "..%2f..%2fx", "x"]
)
def test_malicious_file_ids_are_not_found(server: Server, file_id: str) -> None:
    assert httpx2.get(f"{server.api}/files/{file_id}", headers=ALICE_HEADERS).status_code == 404
    assert post(server, make_chat([{"type": "file", "file": {"file_id": file_id}}])).status_code == 404


def test_too_large_and_empty_files_are_refused(server: Server) -> None:
    large_reply = upload(server, "large.txt", b"x" * (2 * MEGABYTE))
    assert large_reply.status_code == 413 and "--storage for an upload" in large_reply.text
    assert upload(server, "empty.txt", b"").status_code == 400
    texts = [f"{LONG_TEXT} {number}".encode() * (400_000 // len(LONG_TEXT)) for number in range(3)]
    files = [{"filename": "a.txt", "file_data": base64.b64encode(text).decode()} for text in texts]
    reply = post(server, make_chat([{"type": "file", "file": file} for file in files]))
    assert reply.status_code == 413, "a request does not remove its own texts"


def test_form_with_too_many_parts_is_refused(server: Server) -> None:
    fields = {f"field{number}": "x" for number in range(100)}
    files = [("file", (f"{number}.txt", b"text")) for number in range(100)]
    for form in ({"files": files[:1], "data": fields}, {"files": files}):
        reply = httpx2.post(f"{server.api}/files", **form, headers=ALICE_HEADERS)
        assert reply.status_code == 400


def test_compressed_bodies_are_refused(server: Server) -> None:
    headers = {**ALICE_HEADERS, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert httpx2.post(f"{server.api}/chat/completions", content=b"\x1f\x8b", headers=headers).status_code == 415


# Heads and bodies


@pytest.mark.parametrize(
    ("status", "content_type"), [(200, "application/json"), (200, "text/event-stream"), (500, "application/json")]
)
def test_policy_key_in_a_reply_is_hidden_from_clients(
    server: Server, upstream: FakeServer, status: int, content_type: str
) -> None:
    body = b'data: {"x": "the-server\'s-own-key"}\n\n'
    upstream.respond = lambda *_: web.Response(body=body, status=status, content_type=content_type)
    reply = post(server, make_chat("hello"))
    assert reply.status_code == status
    assert reply.content == b'data: {"x": "[hidden]"}\n\n'


@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/html"])
def test_policy_reply_of_another_content_type_is_not_relayed(
    server: Server, upstream: FakeServer, content_type: str
) -> None:
    body = b"<p>the-server's-own-key timed out at http://db.corp:80/v1"
    upstream.respond = lambda *_: web.Response(body=body, content_type=content_type)
    reply = post(server, make_chat("hello"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "bad_gateway")
    assert not re.search("the-server's-own-key|corp", reply.text)


@pytest.mark.parametrize("text", ["/srv/My Documents/a b/x.txt", "unix:///run/x.sock", r"C:\a b\x", "('fd00::5', 80)",
                                  "10.0.0.5", "100.127.0.5", "8.8.8.8:80", "connection to 8.8.8.8",
                                  "connecting to host d:5", "connection to host d:5"])  # fmt: skip
def test_paths_and_addresses_in_errors_are_hidden(text: str) -> None:
    kept = "See https://platform.openai.com/api-keys. Version 1.2.3.4.5 or 1.2.3.400. Send it to /v1/responses. "
    kept += "/messages/0/content: How to host parties.pdf, Plan 12.11.20.26 b.txt, 10.11.20.26.docx."
    message = to_api_error(PolicyUnreachableError(f"Connect call failed {text}. It is gone", hint=kept)).message
    phrase = re.match(r"(?:connecti\w+ to (?:host )?)?", text)[0]
    assert message == f"Connect call failed {phrase}[hidden]. It is gone. {kept}"


@pytest.mark.parametrize(("content", "stream"), [(LONG_TEXT, True), ("hello", False)])
@pytest.mark.parametrize("name", OVERSIZED)
def test_endless_policy_reply_is_cut_off_with_an_error(
    name: str, stream: bool, content: str, server: Server, upstream: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply_endlessly(body: dict[str, Any], number: int) -> Any:
        text = body["messages"][-1]["content"]
        if "<problem>" in text:
            return read_perfectly(text)
        reply = OVERSIZED[name]()
        if body.get("stream"):
            reply.content_type = "text/event-stream"
        return reply

    monkeypatch.setattr(short_requests, "_MAX_REPLY_BYTES", MEGABYTE)
    upstream.respond = reply_endlessly
    reply = post(server, make_chat(content, stream=stream, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert len(reply.content) < MEGABYTE
    event = reply.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    assert json.loads(event)["error"]["code"] in {"bad_gateway", "policy_server_failed"}


def test_connection_without_a_complete_head_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEADER_SECONDS", 0.2)
    for partial_head in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(partial_head)
            assert connection.recv(100) == b""


@pytest.mark.parametrize("is_paused", [True, False])
def test_connection_that_takes_no_reply_is_closed(server: Server, monkeypatch: Any, is_paused: bool) -> None:
    for name in ("SEND_SECONDS", "HEADER_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(bounded_http, name, 0.1)
    if not is_paused:  # as if the server could write all of it at once
        monkeypatch.setattr(bounded_http.BoundedProtocol, "pause_writing", lambda protocol: None)
    file_id = upload(server, "a.txt", b"x" * (MEGABYTE // 2), BOB_HEADERS).json()["id"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(make_request_head(f"GET /v1/files/{file_id}/content HTTP/1.1", BOB_HEADER) * 40)
        time.sleep(2)
        received_bytes = sum(len(data) for data in iter(lambda: connection.recv(MEGABYTE), b""))
    assert received_bytes < 20 * MEGABYTE


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_request_smuggling_with_two_body_lengths_is_refused(server: Server, host: str) -> None:
    lines = ("POST /v1/files HTTP/1.1", f"Host: {host}", "Content-Length: 4", "Transfer-Encoding: chunked")
    reply = send_raw(server, *lines, body=b"0\r\n\r\n" + make_request_head("GET /v1/files HTTP/1.1"))
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1 ") == 1


def test_stopping_server_and_full_disk_are_retryable_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as pool, FakeServer(window=1000, delay=3) as slow_upstream:
        with serve(slow_upstream.base_url, tmp_path) as server:
            plain_request, stream_request = (
                pool.submit(post, server, make_chat(LONG_TEXT, stream=stream)) for stream in (False, True)
            )
            reads = server.resources.manager._reads
            wait_until(lambda: [read.followers for read in list(reads.values())] == [2])  # both follow one read
            monkeypatch.setattr(DocumentStore, "_make_folders", raise_disk_full)
            refusal = post(server, make_chat(f"{LONG_TEXT} more"))
        stopped_reply, events = plain_request.result(), stream_request.result().text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert (stopped_reply.status_code, stopped_reply.json()["error"]["code"]) == (503, "server_stopping")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (507, "insufficient_storage")
    assert str(tmp_path) not in refusal.text
    assert {"Retry-After"} <= set(map(str.title, refusal.headers)) & set(map(str.title, stopped_reply.headers))


def raise_disk_full(store: DocumentStore) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_endless_headers_are_refused_early(server: Server) -> None:
    """Clients without a key can send them too."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            for _ in range(64):
                connection.sendall(b"x" * MEGABYTE)
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_too_large_body_is_refused_before_it_is_received(server: Server) -> None:
    assert send_raw(server, *POST_CHAT, "Content-Length: 999999999999").startswith(b"HTTP/1.1 413")
    chunked_body = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(49))
    refusal = send_raw(server, *POST_CHAT, "Transfer-Encoding: chunked", body=chunked_body)
    assert b"413" in refusal[:20]
    assert b"POST /v1/files" in refusal, "the error names the upload endpoint for longer documents"
    assert server.resources.request_quota.used_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "fake", "messages": [' + b"{}," * 1_500_000 + b"{}]}",
        b'{"model": "fake", "messages": [' + b'"",' * 1_500_000 + b'""]}',
        b'{"model": "fake", "messages": []' + b', "a": "b"' * 600_000 + b"}",
    ],
)
def test_json_with_too_many_values_is_refused_before_parsing(body: bytes) -> None:
    with pytest.raises(APIError, match="too many values") as error:
        parse_fields(body)
    assert error.value.status == 413


def test_a_body_that_is_no_object_or_has_invalid_utf8_in_any_field_is_refused() -> None:
    for body in (b"[]", b'"' + b'\\"' * 2_200_000, b'{"model": "\x80ake"}', b'{"messages": [{"content": "\xff"}]}'):
        with pytest.raises(APIError, match="not a JSON object") as error:
            parse_fields(body)
        assert (error.value.status, error.value.code) == (400, "invalid_json")


def test_long_text_of_escapes_and_quotes_is_accepted() -> None:
    text = '{"a": [1, "\\"]}, ' * 500_000
    chat_request = parse_chat(parse_fields(json.dumps(make_chat(text)).encode()))
    assert chat_request.messages[0].parts[0].text is not None
    assert chat_request.messages[0].parts[0].text.decode() == text


def test_slow_bodies_time_out(server: Server) -> None:
    assert send_raw(server, *POST_CHAT, "Content-Length: 100", body=b"{").startswith(b"HTTP/1.1 408")
    assert send_raw(server, *POST_FILE, "Content-Length: 100", body=b"--x\r\n").startswith(b"HTTP/1.1 408")


def test_large_requests_share_a_memory_quota_that_is_released(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, request_memory=4 * MEGABYTE) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(make_request_head(*POST_CHAT, f"Content-Length: {3 * MEGABYTE}") + b"x" * (2 * MEGABYTE))
            wait_until(lambda: server.resources.request_quota.used_bytes == 3 * MEGABYTE)
            reply = post(server, make_chat("word " * 300_000))
            assert reply.status_code == 429
            assert int(reply.headers["Retry-After"]) >= 1
        wait_until(lambda: server.resources.request_quota.used_bytes == 0)


def test_uploads_in_progress_share_a_quota_and_have_a_deadline(upstream: FakeServer, tmp_path: Path) -> None:
    part_head = b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
    bounds = {"storage": MEGABYTE // 2, "total_storage": 2 * MEGABYTE, "body_seconds": 1.5, "idle_seconds": 1.0}
    keys = Keys([(Owner("alice", max_bytes=2 * MEGABYTE), ALICE)])  # more than --storage
    with serve(upstream.base_url, tmp_path, keys=keys, **bounds) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(make_request_head(*POST_FILE, "Content-Length: 2000000") + part_head)
            connection.sendall(b"x" * (MEGABYTE * 3 // 2))
            wait_until(lambda: server.resources.upload_quota.used_bytes > MEGABYTE)
            assert upload(server, "b.txt", b"x" * MEGABYTE).status_code == 429
            for _ in range(20):  # a client that is never idle
                connection.sendall(b"x")
                time.sleep(0.1)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        wait_until(lambda: server.resources.upload_quota.used_bytes == 0)
        assert upload(server, "b.txt", b"x" * MEGABYTE).status_code == 200


def test_conversions_block_no_other_key_and_end_with_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = block_conversions(monkeypatch)
    file_part = {"type": "file", "file": {"filename": "a.txt", "file_data": "aGVsbG8="}}
    with FakeServer(window=1000) as upstream, serve(upstream.base_url, tmp_path, keys=KEYS) as server:
        with send_large_requests(server, 2, [file_part]):
            wait_until(lambda: conversions == ["begun"] * 2)
            assert post(server, make_chat("hello", padding="x" * MEGABYTE), BOB_HEADERS).status_code == 200
        wait_until(lambda: conversions == ["begun"] * 2 + ["ended"] * 2)


def block_conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no conversion end; return a list to which each conversion adds "begun", and "ended" if it is cancelled."""
    conversions: list[str] = []

    async def convert_forever(store: DocumentStore, document: Any) -> None:
        conversions.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            conversions.append("ended")

    monkeypatch.setattr(DocumentStore, "add_async", convert_forever)
    return conversions


def test_large_requests_of_one_key_are_parsed_one_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_lengths: list[int] = []
    may_finish = Event()

    def parse_slowly(body: bytes) -> Any:
        if b"of alice" in body:
            parsed_lengths.append(len(body))
            assert may_finish.wait(30)
        return parse_fields(body)

    monkeypatch.setattr(completions, "parse_fields", parse_slowly)
    with send_large_requests(server, 4, "of alice"):
        wait_until(lambda: parsed_lengths)
        assert post(server, make_chat("hello", padding="x" * MEGABYTE), BOB_HEADERS).status_code == 200
        assert len(parsed_lengths) == 1
        may_finish.set()


@contextmanager
def send_large_requests(server: Server, count: int, content: Any) -> Iterator[None]:
    """Send large requests of Alice without reading the replies."""
    body = json.dumps(make_chat(content, padding="x" * MEGABYTE)).encode()
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(make_request_head(*POST_CHAT, f"Content-Length: {len(body)}") + body)
        yield


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true; return its value."""
    for _ in range(600):
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


# Streams


def test_unread_streams_do_not_block_other_requests(tmp_path: Path) -> None:
    with FakeServer(window=1000) as upstream, serve(upstream.base_url, tmp_path) as server, ExitStack() as stack:
        body = json.dumps(make_chat(LONG_TEXT, stream=True)).encode()
        for _ in range(50):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(make_request_head(*POST_CHAT, f"Content-Length: {len(body)}") + body)
        reply = post(server, make_chat(LONG_TEXT))
        assert reply.status_code == 200
        assert reply.headers["X-Memagent-Read"] in {"started", "joined", "repeated"}
        assert len(httpx2.get(f"{server.api}/reads").json()["data"]) == 1, "fifty streams of one request are one read"


def test_connections_above_the_limit_are_refused_until_others_close(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, max_connections=8) as server, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: httpx2.get(f"{server.api}/models").status_code == 503)
        stack.close()
        wait_until(lambda: httpx2.get(f"{server.api}/models").status_code == 200)
