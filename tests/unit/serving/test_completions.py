"""Chat completions through a real server and the official client: short ones relayed, long ones read."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from aiohttp import web
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from support.server_faults import FINAL_ERRORS, MALFORMED, RETRIED_ERRORS, make_error
from support.serving import Server, serve

from memagent_graph import OpenAICompatiblePolicy, ScriptedPolicy

LONG_TEXT = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 12."}, words=900)
QUESTION = "What is the key of harbor?"


def reply_to_request(body: dict[str, Any], number: int) -> str:
    text = body["messages"][-1]["content"]
    return read_perfectly(text) if "<problem>" in text else f"said: {text[-40:]}\ud83d"


@pytest.fixture(scope="module")
def running_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Server]]:
    with FakeServer(window=1000) as upstream, serve(upstream.base_url, tmp_path_factory.mktemp("served")) as server:
        yield upstream, server


@pytest.fixture
def upstream(running_servers: tuple[FakeServer, Server]) -> FakeServer:
    """The policy server of all tests, with its default reply and no recorded requests."""
    upstream, _ = running_servers
    upstream.respond = reply_to_request
    for record in (upstream.requests, upstream.bodies, upstream.headers):
        record.clear()
    return upstream


@pytest.fixture
def server(running_servers: tuple[FakeServer, Server], upstream: FakeServer) -> Server:
    return running_servers[1]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """A client that asks for a new read of each request, even if another test sent the same."""
    headers = {"X-Memagent-New-Read": "1"}
    with openai.OpenAI(base_url=server.api, api_key="whatever", max_retries=0, default_headers=headers) as client:
        yield client


def ask(client: openai.OpenAI, *messages: dict[str, Any], **options: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=list(messages), **options)


def make_user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def post(server: Server, *messages: dict[str, Any], **options: Any) -> httpx2.Response:
    body = {"model": "fake", "messages": list(messages), **options}
    return httpx2.post(f"{server.api}/chat/completions", json=body, timeout=60)


# Short requests


def test_short_request_is_relayed_unchanged_with_the_servers_key(server: Server, upstream: FakeServer) -> None:
    body = b'{ "model":"fake",\n "messages":[{"role":"user","content":"h\\u00e9llo"}], "unknown": [1,  2] }'
    headers = {"Content-Type": "application/json", "Authorization": "Bearer the-client's-key"}
    reply = httpx2.post(f"{server.api}/chat/completions", content=body, headers=headers)
    assert (reply.status_code, upstream.bodies) == (200, [body])
    assert upstream.headers[0]["Authorization"] == "Bearer the-server's-own-key"
    direct_reply = httpx2.post(f"{upstream.base_url}/chat/completions", content=body, headers=headers)
    assert reply.content == direct_reply.content


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10.0, "max_completion_tokens": 12},
        {"temperature": "0.7", "top_p": 0, "seed": "1", "n": "1", "stop": 7, "stream_options": []},
        {"model": None},
        {"messages": "hello"},
        {"messages": [1]},
        {"messages": [{"role": "user", "content": {"type": "text"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}, {}]}]},
    ],
)
def test_invalid_fields_of_a_short_request_are_relayed_unchanged(
    server: Server, upstream: FakeServer, fields: dict[str, Any]
) -> None:
    upstream.respond = lambda body, number: web.json_response({"choices": []})
    body = json.dumps({"model": "fake", "messages": [make_user("hello")], **fields}, indent=3).encode()
    httpx2.post(f"{server.api}/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert upstream.bodies == [body]


def test_cache_salt_of_a_client_is_removed(server: Server, upstream: FakeServer) -> None:
    for content in ("hello", LONG_TEXT):
        assert (
            post(server, make_user(content), make_user(QUESTION), tools=[], cache_salt="another's").status_code == 200
        )
    assert upstream.requests[0]["tools"] == []
    assert not [request for request in upstream.requests if "cache_salt" in request]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": LONG_TEXT},
        {"type": "tool_result", "tool_use_id": "1", "content": LONG_TEXT},
    ],
)  # fmt: skip
def test_long_parts_of_every_type_are_read(client: openai.OpenAI, upstream: FakeServer, part: dict[str, Any]) -> None:
    reply = ask(client, make_user([part]), make_user(QUESTION))
    assert reply.choices[0].message.content == "4711"
    assert max(map(len, upstream.bodies)) < 4000


@pytest.mark.parametrize("is_one_message", [True, False])
def test_long_part_of_an_unreadable_type_is_refused_and_not_relayed(
    is_one_message: bool, server: Server, upstream: FakeServer
) -> None:
    results_part = {"type": "search_results", "results": [{"text": LONG_TEXT}]}
    question_part = {"type": "text", "text": QUESTION}
    parts = [[results_part, question_part]] if is_one_message else [[results_part], [question_part]]
    reply = post(server, *map(make_user, parts))
    assert reply.status_code == 400 and "search_results" in reply.json()["error"]["message"]
    assert upstream.requests == []


def test_title_task_of_a_chat_client_is_shortened_but_no_document(client: openai.OpenAI, upstream: FakeServer) -> None:
    task = f"### Task:\nSuggest a title.\n\n<chat_history>\n{LONG_TEXT}\n</chat_history>"
    ask(client, {"role": "system", "content": "Be brief."}, make_user(LONG_TEXT), make_user(task))
    (request,) = upstream.requests
    system, task_of_request = (message["content"] for message in request["messages"])
    assert system == "Be brief."
    assert task_of_request.startswith("### Task:\nSuggest a title.") and task_of_request.endswith("</chat_history>")
    assert len(task_of_request) < len(LONG_TEXT) / 2
    rag_request = make_user(f"### Task:\nRespond to the query.\n\n<context>\n{LONG_TEXT}\n</context>\n\n{QUESTION}")
    assert ask(client, rag_request).choices[0].message.content == "4711"


def test_policy_stream_is_relayed_unchanged(server: Server, upstream: FakeServer) -> None:
    events = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n: beat\n\ndata: [DONE]\n\n'
    upstream.respond = lambda body, number: web.Response(body=events, content_type="text/event-stream")
    reply = post(server, make_user("hello"), stream=True)
    assert reply.content == events
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_concurrency_limit_of_reads_does_not_apply_to_short_requests(tmp_path: Path) -> None:
    body = {"model": "fake", "messages": [make_user("hello")]}
    with FakeServer(reply_to_request, delay=0.5, window=1000) as upstream:
        policy = OpenAICompatiblePolicy("fake", base_url=upstream.base_url, api_key="x", max_concurrency=2)
        with serve(None, tmp_path, policy=policy) as server:
            async with httpx2.AsyncClient(timeout=60) as client:
                requests = [client.post(f"{server.api}/chat/completions", json=body) for _ in range(6)]
                replies = await asyncio.gather(*requests)
    assert {reply.status_code for reply in replies} == {200}
    assert upstream.peak_concurrency > 2


def test_policy_server_error_is_relayed(server: Server) -> None:
    reply = post(server, make_user("hello"), model="other")
    assert reply.status_code == 404
    assert reply.json() == {"error": {"message": "The model `other` does not exist.", "code": 404}}


def test_models_are_listed_from_the_policy_server(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("../../files")


# Long requests


def test_long_message_is_read_and_its_question_is_answered(client: openai.OpenAI, upstream: FakeServer) -> None:
    reply = ask(client, make_user(f"{LONG_TEXT}\n\n{QUESTION}"))
    assert reply.choices[0].message.content == "4711"
    assert reply.choices[0].finish_reason == "stop"
    calls = [body["messages"] for body in upstream.requests]
    assert all(len(json.dumps(call)) < 3000 for call in calls), "a prompt was longer than the window"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens == sum(upstream.count_tokens(item["content"]) for call in calls for item in call)
    assert reply.memagent["calls"] == len(calls) == reply.memagent["chunks_read"] + 1
    assert reply.memagent["read"] == ["the message"]


def test_question_with_tags_is_escaped_and_shortened_to_fit(client: openai.OpenAI, upstream: FakeServer) -> None:
    question = "Why does <section> stand in the <memory> of a </problem> here? " * 12 + QUESTION
    assert ask(client, make_user(f"{LONG_TEXT}\n\n{question}")).choices[0].finish_reason == "stop"
    problem = extract(upstream.requests[-1]["messages"][-1]["content"], "problem")
    assert QUESTION in problem
    assert "<\\section>" in problem


def test_answer_cites_its_source_passage(client: openai.OpenAI) -> None:
    reply = ask(client, make_user(LONG_TEXT), make_user(QUESTION))
    (citation, *_) = reply.choices[0].message.annotations
    assert citation.type == "url_citation"
    start, end = map(int, citation.url_citation.url.partition("#char=")[2].split(","))
    assert "harbor" in LONG_TEXT[start:end]
    assert citation.url_citation.quote == LONG_TEXT[start:end]
    assert citation.url_citation.end_index == len("4711")


def test_stream_has_progress_as_reasoning_and_then_the_answer(client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, make_user(LONG_TEXT), make_user(QUESTION), **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning.startswith("Reading message 1 (user).")
    assert "".join(delta.content or "" for delta in deltas) == "4711"
    assert chunks[-1].usage.prompt_tokens > 1000
    assert not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert any(getattr(delta, "annotations", None) for delta in deltas)


def test_header_and_body_have_the_id_of_the_logged_run_and_a_stop_string_ends_the_answer(server: Server) -> None:
    reply = post(server, make_user(LONG_TEXT), make_user(QUESTION), stop=["1"])
    run_id = reply.headers["X-Memagent-Run-Id"]
    assert reply.json()["memagent"]["run_id"] == run_id
    assert server.resources.reader.run_log.get(run_id).answer == "4711"
    assert reply.json()["choices"][0]["message"]["content"] == "47"


def test_several_long_parts_are_read_in_order_with_names(client: openai.OpenAI, upstream: FakeServer) -> None:
    first_text = make_document({0.5: "The key of harbor is 1."}, words=900)
    second_text = make_document({0.5: "The key of harbor is 2."}, words=900)
    reply = ask(client, make_user(first_text), make_user(second_text), make_user(QUESTION))
    assert reply.choices[0].message.content == "2"
    assert reply.memagent["read"] == ["message 1 (user)", "message 2 (user)"]
    prompts = "".join(body["messages"][-1]["content"] for body in upstream.requests)
    assert prompts.index("[1 of 2: message 1 (user)]") < prompts.index("[2 of 2: message 2 (user)]")


def test_long_tool_result_is_replaced_by_its_answer_and_relayed_with_tools(
    client: openai.OpenAI, upstream: FakeServer
) -> None:
    tools = [{"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "fetch", "arguments": '{"page": 3}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        make_user(QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": LONG_TEXT},
    ]
    reply = ask(client, *messages, tools=tools, temperature=0.5)
    last_request = upstream.requests[-1]
    assert last_request["tools"] == tools
    assert last_request["messages"][:3] == messages[:3]
    assert last_request["messages"][3]["tool_call_id"] == "c1"
    tool_content = last_request["messages"][3]["content"]
    assert "the result of fetch: too long to show" in tool_content
    assert "Answer: 4711" in tool_content
    assert len(tool_content) < 1000
    assert re.fullmatch("(?s)said:.*\ufffd", reply.choices[0].message.content), "half a pair could not be sent back"
    assert reply.usage.prompt_tokens > sum(len(str(message["content"]).split()) for message in last_request["messages"])
    assert reply.memagent["calls"] == len(upstream.requests) - 1
    assert [body["temperature"] for body in upstream.requests] == [0.5] * len(upstream.requests)


_FAULTY_EVENTS = {
    "an event that ends early": "{bad",
    "an event that is a list": "[1]",
    "an event nested without end": '{"choices": ' + "[" * 100_000,
    "usage of texts": '{"choices": [1], "usage": {"prompt_tokens": "x"}}',
    "a list of usage": '{"choices": [1], "usage": [1]}',
}


@pytest.mark.parametrize(
    ("fault", "is_stream"),
    [(name, True) for name in [*MALFORMED, *RETRIED_ERRORS, *FINAL_ERRORS, *_FAULTY_EVENTS]]
    + [(name, False) for name in MALFORMED],
)
def test_faulty_policy_replies_after_a_read_become_valid_api_replies(
    fault: str, is_stream: bool, server: Server, upstream: FakeServer
) -> None:
    def respond(body: dict[str, Any], number: int) -> Any:
        if "<problem>" in (text := body["messages"][-1]["content"]):
            return read_perfectly(text)
        if fault in _FAULTY_EVENTS:
            return web.Response(text=f"data: {_FAULTY_EVENTS[fault]}\n\n", content_type="text/event-stream")
        return {**MALFORMED, **RETRIED_ERRORS, **FINAL_ERRORS}[fault]()

    upstream.respond = respond
    reply = post(server, make_user(LONG_TEXT), make_user(QUESTION), tools=[{"type": "function"}], stream=is_stream)
    last_body = json.loads(reply.text.strip().rpartition("\n\n")[2].removeprefix("data: ") if is_stream else reply.text)
    if reply.status_code == 200 and "error" not in last_body:
        assert not is_stream
        assert isinstance(last_body["choices"], list)
    else:
        assert is_stream or reply.status_code >= 400
        assert last_body["error"].get("code") != "internal"


def test_stream_with_a_read_and_a_relayed_reply_is_one_stream(client: openai.OpenAI, upstream: FakeServer) -> None:
    def respond(body: dict[str, Any], number: int) -> Any:
        if "<problem>" in body["messages"][-1]["content"]:
            return read_perfectly(body["messages"][-1]["content"])
        assert body["stream_options"] == {"include_usage": True}
        events = [
            {"id": "up", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "do\ud83d"}}]},
            {"id": "up", "choices": [{"index": 0, "delta": {"content": "\ude00ne"}, "finish_reason": "stop"}]},
            {"id": "up", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}},
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    upstream.respond = respond
    tools = [{"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}]
    options: dict[str, Any] = {"tools": tools, "stream": True}
    chunks = list(ask(client, make_user(LONG_TEXT), make_user(QUESTION), **options))
    options["stream_options"] = {"include_usage": True}
    usage = list(ask(client, make_user(LONG_TEXT), make_user(QUESTION), **options))[-1].usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "do\ud83d\ude00ne"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.choices for chunk in chunks), "usage was sent without a request for it"
    assert usage.prompt_tokens > 1000
    assert usage.completion_tokens > 2


def test_old_messages_are_read_and_recent_ones_are_relayed(client: openai.OpenAI, upstream: FakeServer) -> None:
    history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(60):
        fact = "The key of harbor is 4711." if number == 5 else "nothing happened here today and so on"
        reply = f"noted {number} " + "well " * 12
        history += [make_user(f"note {number}: {fact}"), {"role": "assistant", "content": reply}]
    ask(client, *history, make_user(QUESTION))
    messages = upstream.requests[-1]["messages"]
    assert messages[0] == history[0]
    assert messages[-1] == make_user(QUESTION)
    assert messages[1]["content"].startswith("[Of earlier messages:]")
    assert "4711" in messages[1]["content"]
    assert messages[2:-1] == history[-len(messages[2:-1]) :], "recent messages are as they were"


def test_uploaded_files_and_inline_text_files_are_read(client: openai.OpenAI) -> None:
    file = client.files.create(file=("report.html", f"<p>{LONG_TEXT}</p>".encode()), purpose="user_data")
    data = f"data:text/plain;base64,{b64encode(LONG_TEXT.encode()).decode()}"
    inline_file = {"filename": "../../etc/notes.txt", "file_data": data}
    for file_fields, name in (({"file_id": file.id}, "report.html"), (inline_file, "notes.txt")):
        reply = ask(client, make_user([{"type": "file", "file": file_fields}, {"type": "text", "text": QUESTION}]))
        assert (reply.choices[0].message.content, reply.memagent["read"]) == ("4711", [name])
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.retrieve(file.id)


# Errors


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"n": 2}, 400, "send n=1"),
        ({"model": "another"}, 404, "cannot be used here for this request; 'fake' can"),
        ({"messages": LONG_TEXT}, 400, "array"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"messages": [make_user([{"type": "image_url", "image_url": {"url": "file:///x"}}]), make_user(LONG_TEXT)]},
         400, "image_url"),
        ({"messages": [make_user([{"type": "file", "file": {"file_id": "file-../../secret"}}])]}, 404, "no file"),
        ({"messages": [make_user([{"type": "file", "file": {}}])]}, 400, "neither file_id nor file_data"),
        ({"messages": [make_user(["a"] * 50_000)] * 3}, 400, "at most 100,000 parts"),
        ({"messages": [make_user("a")] * 100_001}, 400, "at most 100,000 messages are allowed, got 100,001"),
        ({"messages": [make_user([{"type": "file", "file": {"file_data": "data:x;base64,?"}}])]}, 400, "base64"),
        ({"messages": [make_user([{"type": "file", "file": {"file_data": "JVBERi0xLjQK", "filename": "a.pdf"}}])]}, 400,
         "cannot be opened"),
        ({"messages": [make_user([{"type": "file", "file": {"file_data": "AAECAwQFBgcICQ==", "filename": "a"}}])]}, 400,
         "a"),
    ],
)  # fmt: skip
def test_unsupported_options_are_errors_of_the_api(
    server: Server, upstream: FakeServer, options: dict[str, Any], status: int, message: str
) -> None:
    reply = post(server, make_user(LONG_TEXT), make_user(QUESTION), **options)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == "messages" or not re.search("array|at most", message)
    assert upstream.requests == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_malformed_json_is_refused(server: Server, body: bytes) -> None:
    reply = httpx2.post(f"{server.api}/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_endpoints_that_are_not_served_are_named_in_errors(server: Server) -> None:
    for method, path in (("POST", "responses"), ("GET", "responses/resp_1"), ("POST", "responses/resp_1/cancel")):
        reply = httpx2.request(method, f"{server.api}/{path}")
        assert reply.status_code == 404 and "Responses API is not served here" in reply.json()["error"]["message"]
    assert httpx2.get(f"{server.url}/v1/engines").json()["error"]["code"] == "not_found"
    assert httpx2.delete(f"{server.api}/chat/completions").json()["error"]["code"] == "method_not_allowed"


def test_unreachable_policy_server_is_an_error_and_shown_by_health(tmp_path: Path) -> None:
    with FakeServer() as stopped_server:
        url = stopped_server.base_url
    with serve(url, tmp_path) as server:
        for messages in ([make_user("hello")], [make_user(LONG_TEXT), make_user(QUESTION)]):
            reply = post(server, *messages)
            assert reply.status_code == 503 and url not in reply.text
            assert "Is the server running?" in reply.json()["error"]["message"]
            assert int(reply.headers["Retry-After"]) > 0
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()["parts"]["server"]) == (503, "ok")
        assert "cannot be reached" in health.json()["parts"]["policy"] and url not in health.text
    with FakeServer() as upstream, serve(upstream.base_url, tmp_path / "2") as server:
        upstream.models = make_error(404)
        assert post(server, make_user("hello")).status_code == 200
        assert httpx2.get(f"{server.url}/health").status_code == 200, "the model is named, so no list is needed"
        upstream.models = [{"id": "fake"}]
        assert httpx2.get(f"{server.api}/models").json()["data"] == upstream.models


def test_failure_during_a_stream_raises_an_error_in_the_client(client: openai.OpenAI, upstream: FakeServer) -> None:
    def fail(body: dict[str, Any], number: int) -> Any:
        return web.json_response({"error": {"message": "out of memory"}}, status=500) if number else "some memory"

    upstream.respond = fail
    with pytest.raises(openai.APIError, match="out of memory"):
        list(ask(client, make_user(LONG_TEXT), make_user(QUESTION), stream=True))


def test_health_is_ok_and_metrics_count_requests(server: Server, client: openai.OpenAI) -> None:
    def read_counters() -> list[float]:
        page = httpx2.get(f"{server.url}/metrics").text
        names = (
            r'completions_total{way="passed"}',
            r'completions_total{way="read"}',
            r'reads_ended_total{state="finished"}',
        )
        assert "memagent_reads 0.0" in page
        return [float(page.partition(f"memagent_{name} ")[2].partition("\n")[0] or 0) for name in names]

    counts_before = read_counters()
    ask(client, make_user("hello"))
    ask(client, make_user(LONG_TEXT), make_user(QUESTION))
    assert httpx2.get(f"{server.url}/health").json()["status"] == "ok"
    assert read_counters() == [count + 1 for count in counts_before]


# A policy without a server


def test_in_process_policy_answers_short_and_long_requests(tmp_path: Path) -> None:
    policy = ScriptedPolicy(
        lambda prompt: (read_perfectly(prompt) if "<problem>" in prompt else prompt[-5:] + "}").replace("}", "\ud83d}")
    )
    with (
        serve(None, tmp_path, policy=policy) as server,
        openai.OpenAI(base_url=server.api, api_key="x", max_retries=0) as client,
    ):
        model = policy.name
        assert [entry.id for entry in client.models.list()] == [client.models.retrieve(model).id] == [model]
        create = client.chat.completions.create
        short_messages: list[Any] = [make_user("hello")]
        text_options: Any = {"response_format": {"type": "text"}, "modalities": ["text"]}  # the API's defaults
        assert create(model=model, messages=short_messages, **text_options).choices[0].message.content == "hello\ufffd}"
        chunks = list(create(model=model, messages=short_messages, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello\ufffd}"
        assert chunks[-1].usage is not None
        long_messages: list[Any] = [make_user(LONG_TEXT), make_user(QUESTION)]
        assert create(model=model, messages=long_messages, **text_options).choices[0].message.content == "4711\ufffd"
        history: list[Any] = [make_user(f"note {number} " + "word " * 30) for number in range(60)]
        history[7] = make_user("The key of harbor is 4711.")
        history_chunks = create(model=model, messages=[*history, make_user(QUESTION)], stream=True)
        history_texts = [chunk.choices[0].delta.content or "" for chunk in history_chunks if chunk.choices]
        assert "".join(history_texts) == "4711\ufffd"
        for messages in (short_messages, long_messages):
            with pytest.raises(openai.BadRequestError, match="does not know tools"):
                create(model=model, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.NotFoundError):
            create(model="another", messages=short_messages)
        assert httpx2.get(f"{server.url}/health").json()["status"] == "ok"
