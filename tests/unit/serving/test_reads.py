"""Reads outlive connections and failures: equal requests share one, failed ones resume, and keys are separate."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from support.serving import ALICE, BOB, KEYS, serve
from unit.serving.test_attacks import POST_CHAT, make_request_head, wait_until

from memagent_graph import Document, SamplingParams, ScriptedPolicy
from memagent_graph.reading.state import Limits
from memagent_serve import completions
from memagent_serve.api_errors import APIError
from memagent_serve.keys import LOCAL, Keys, Owner
from memagent_serve.ledger import Entry, Ledger, ReadState
from memagent_serve.metrics import Metrics
from memagent_serve.reads import ReadManager, ReadRequest
from memagent_serve.serve_settings import ServeSettings

LONG_TEXT = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 12."}, words=900)
QUESTION = "What is the key of harbor?"


def make_request(question: str = QUESTION, document: str = LONG_TEXT, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": document}, {"role": "user", "content": question}]
    return {"model": "fake", "messages": messages, **options}


def post(
    api: str, request_body: dict[str, Any], *, key: str = ALICE, timeout: float = 60, **headers: str
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}", **headers}
    return httpx2.post(f"{api}/chat/completions", json=request_body, headers=headers, timeout=timeout)


def get_answer(reply: httpx2.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def count_sections(upstream: FakeServer) -> Counter[str]:
    """Return how often each chunk was sent to the policy."""
    prompts = [request["messages"][-1]["content"] for request in upstream.requests]
    return Counter(extract(prompt, "section") for prompt in prompts if "<section>" in prompt)


def send_and_disconnect(api: str, upstream: FakeServer) -> None:
    """Send a request, and close the connection once its read has started."""
    content = json.dumps(make_request()).encode()
    count_before, address = len(upstream.requests), httpx2.URL(api)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(make_request_head(*POST_CHAT, f"Content-Length: {len(content)}") + content)
        wait_until(lambda: len(upstream.requests) > count_before + 2)


# Equal requests


@pytest.mark.parametrize("headers", [{}, {"X-Memagent-New-Read": "1", "X-Stainless-Retry-Count": "1"}])
def test_equal_request_joins_the_running_read_of_its_client(slow_upstream, tmp_path, headers) -> None:
    with serve(slow_upstream.base_url, tmp_path) as server:
        send_and_disconnect(server.api, slow_upstream)
        reply = post(server.api, make_request(), **headers)
        entries = server.resources.ledger.search("local", "", newest=1)
        repeated_reply = post(server.api, make_request(stream=False))
        assert server.resources.ledger.search("local", "", newest=1) == entries, "--keep-minutes count from the end"
    assert get_answer(reply) == get_answer(repeated_reply) == "4711"
    assert reply.headers["X-Memagent-Read"] == "joined"
    assert repeated_reply.headers["X-Memagent-Read"] == "repeated"
    assert reply.headers["X-Memagent-Run-Id"] == repeated_reply.headers["X-Memagent-Run-Id"]
    assert set(count_sections(slow_upstream).values()) == {1}
    assert reply.json()["usage"] == repeated_reply.json()["usage"]


def test_new_read_header_starts_a_read_that_later_requests_get(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path) as server:
        replies = [post(server.api, make_request(), **headers) for headers in ({}, {"X-Memagent-New-Read": "1"}, {})]
    ids = [reply.headers["X-Memagent-Run-Id"] for reply in replies]
    assert ids[0] != ids[1] == ids[2]
    assert set(count_sections(upstream).values()) == {2}


def test_expired_read_is_repeated(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, keep_seconds=0.0) as server:
        first_reply, second_reply = post(server.api, make_request()), post(server.api, make_request())
    assert second_reply.headers["X-Memagent-Read"] == "started"
    assert first_reply.headers["X-Memagent-Run-Id"] != second_reply.headers["X-Memagent-Run-Id"]


def test_other_question_or_sampling_starts_another_read(upstream: FakeServer, tmp_path: Path) -> None:
    changes = ({}, {"temperature": 0.7}, {"seed": 3}, {"max_tokens": 20}, {"question": "Which castle?"})
    with serve(upstream.base_url, tmp_path) as server, ThreadPoolExecutor(len(changes)) as pool:
        replies = list(pool.map(lambda change: post(server.api, make_request(**change)), changes))
    assert {reply.headers["X-Memagent-Read"] for reply in replies} == {"started"}
    assert len({reply.headers["X-Memagent-Run-Id"] for reply in replies}) == len(changes)


def test_failed_read_resumes_at_its_chunk(tmp_path: Path) -> None:
    is_broken = True

    def respond(request: dict[str, Any], number: int) -> Any:
        if is_broken and number == 5:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return read_perfectly(request["messages"][-1]["content"])

    with FakeServer(respond, window=1000) as upstream, serve(upstream.base_url, tmp_path) as server:
        failure = post(server.api, make_request())
        is_broken = False
        reply = post(server.api, make_request())
    assert (failure.status_code, failure.json()["error"]["code"]) == (503, "policy_server_unavailable")
    assert "Retry-After" in failure.headers
    assert reply.headers["X-Memagent-Read"] == "resumed"
    assert get_answer(reply) == "4711"
    assert sorted(count_sections(upstream).values())[-2:] == [1, 2], "only the chunk that failed was asked about again"


def test_read_stopped_by_a_limit_continues_with_an_equal_request(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, limits=Limits(max_chunks=5)) as server:
        replies = [post(server.api, make_request())]
        while replies[-1].json()["choices"][0]["finish_reason"] == "length":
            assert "Ask the same again, and it continues." in get_answer(replies[-1])
            replies.append(post(server.api, make_request()))
    assert len(replies) > 2 and get_answer(replies[-1]) == "4711"
    assert set(count_sections(upstream).values()) == {1}


# Closing, cancelling


def test_disconnect_cancels_the_read_only_with_cancel_on_close(slow_upstream: FakeServer, tmp_path: Path) -> None:
    for cancels in (False, True):
        with serve(slow_upstream.base_url, tmp_path / str(cancels), cancel_on_close=cancels) as server:
            send_and_disconnect(server.api, slow_upstream)
            if cancels:
                wait_until(lambda server=server: not len(server.resources.manager))
            entry = server.resources.ledger.search("local", "", newest=1)[0][0]
            assert entry.state is (ReadState.CANCELLED if cancels else ReadState.RUNNING)
            assert get_answer(post(server.api, make_request())) == "4711"
    assert set(count_sections(slow_upstream).values()) <= {2, 3}, "two servers read, and one was stopped at a chunk"


def test_read_is_shown_and_cancelled_by_id_and_resumes_on_request(slow_upstream: FakeServer, tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {ALICE}"}
    with serve(slow_upstream.base_url, tmp_path, keys=KEYS) as server, ThreadPoolExecutor(1) as pool:
        pending_reply = pool.submit(post, server.api, make_request())
        wait_until(lambda: len(slow_upstream.requests) > 3)
        (read,) = httpx2.get(f"{server.api}/reads", headers=key).json()["data"]
        details = httpx2.get(f"{server.api}/reads/{read['run_id']}", headers=key).json()
        assert details["state"] == read["state"] == "running"
        assert details["chunks"] > 1 and "owner" not in details
        assert httpx2.post(f"{server.api}/reads/{read['run_id']}/cancel", headers=key).json()["state"] == "cancelled"
        cancelled_reply = pending_reply.result()
        assert (cancelled_reply.status_code, cancelled_reply.headers["X-Should-Retry"]) == (409, "false")
        server.resources.ledger.mark(read["run_id"], ReadState.RUNNING)  # as a killed server leaves it
        for url in (f"{server.api}/reads", f"{server.api}/reads/{read['run_id']}"):
            assert '"state":"interrupted"' in httpx2.get(url, headers=key).text
        assert get_answer(post(server.api, make_request())) == "4711"


# Keys


def test_reads_of_another_key_are_neither_visible_nor_shared(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, keys=KEYS) as server:
        alice_reply, bob_reply = post(server.api, make_request()), post(server.api, make_request(), key=BOB)
        run_id = alice_reply.headers["X-Memagent-Run-Id"]
        assert bob_reply.headers["X-Memagent-Run-Id"] != run_id
        assert bob_reply.headers["X-Memagent-Read"] == "started"
        reads = httpx2.get(f"{server.api}/reads", headers={"Authorization": f"Bearer {BOB}"}).json()["data"]
        assert [read["run_id"] for read in reads] == [bob_reply.headers["X-Memagent-Run-Id"]]
    assert set(count_sections(upstream).values()) == {2}


def test_each_key_has_its_own_cache_salt(tmp_path: Path) -> None:
    with FakeServer(window=1000, vllm=True) as upstream, serve(upstream.base_url, tmp_path, keys=KEYS) as server:
        post(server.api, make_request())
        salts = {request["cache_salt"] for request in upstream.requests}
        post(server.api, make_request(), key=BOB)
        all_salts = {request["cache_salt"] for request in upstream.requests}
    assert (len(salts), len(all_salts)) == (1, 2)


# Bounds


def test_request_above_the_limits_is_refused_with_retry_after(slow_upstream: FakeServer, tmp_path: Path) -> None:
    with (
        serve(slow_upstream.base_url, tmp_path, max_reads=1, max_waiting=1, max_reads_per_key=2) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        requests = [make_request(f"What is the key of harbor? {number}") for number in range(2)]
        pending_replies = [pool.submit(post, server.api, request) for request in requests]
        wait_until(lambda: len(server.resources.manager) == 2)
        texts_before = list((tmp_path / "documents" / "temporary").iterdir())
        refusal = post(server.api, make_request("A third question?", f"{LONG_TEXT} more"))
        assert refusal.status_code == 429
        assert list((tmp_path / "documents" / "temporary").iterdir()) == texts_before, (
            "a refused request leaves no text"
        )
        assert int(refusal.headers["Retry-After"]) >= 1
        assert refusal.json()["error"]["type"] == "rate_limit_error"
        further_refusals = [post(server.api, make_request(f"Question {number}?")) for number in range(2)]
        waits = [int(reply.headers["Retry-After"]) for reply in (refusal, *further_refusals)]
        assert waits == sorted(set(waits)), "each further refusal asks for a longer wait"
        short = post(server.api, {"model": "fake", "messages": [{"role": "user", "content": "<problem>x</problem>"}]})
        assert short.status_code == 200, "short requests are not reads"
        assert [get_answer(reply.result()) for reply in pending_replies] == ["4711", "4711"]
        assert get_answer(post(server.api, make_request("What is the key of harbor? 0"))) == "4711"


def test_one_key_cannot_use_all_read_slots(slow_upstream: FakeServer, tmp_path: Path) -> None:
    with (
        serve(slow_upstream.base_url, tmp_path, max_reads=2, max_waiting=8, max_reads_per_key=1, keys=KEYS) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        pending_reply = pool.submit(post, server.api, make_request())
        wait_until(lambda: len(server.resources.manager) == 1)
        assert post(server.api, make_request("Another?")).status_code == 429
        assert get_answer(post(server.api, make_request(), key=BOB)) == "4711"
        assert get_answer(pending_reply.result()) == "4711"


def test_key_may_have_lower_limits(upstream: FakeServer, tmp_path: Path) -> None:
    keys = Keys([(Owner("alice", max_tokens=500, max_bytes=20_000), ALICE), (Owner("bob"), BOB)])
    with serve(upstream.base_url, tmp_path, keys=keys) as server:
        stopped_reply, complete_reply = post(server.api, make_request()), post(server.api, make_request(), key=BOB)
        assert post(server.api, make_request(document="x" * 20_000)).status_code == 413
    assert stopped_reply.json()["memagent"]["stop_reason"] == "max_tokens_total"
    assert stopped_reply.json()["choices"][0]["finish_reason"] == "length"
    assert get_answer(complete_reply) == "4711"


def test_heartbeats_keep_a_stream_open(slow_upstream: FakeServer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(completions, "HEARTBEAT_SECONDS", 0.01)
    with serve(slow_upstream.base_url, tmp_path) as server:
        lines = post(server.api, make_request(stream=True)).text.splitlines()
    assert any(line.startswith(": ping") for line in lines)
    assert "data: [DONE]" in lines


# The ledger


def test_ledger_finds_only_reads_of_the_owner(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "reads.sqlite")
    for number, owner in enumerate(("alice", "bob", "alice")):
        ledger.begin(Entry(f"r{number}", owner, "same", "100% _?", "d", float(number)))
    ledger.mark("r0", ReadState.FAILED, "why")
    ledger.mark("r2", ReadState.PAUSED)
    ledger.mark_edited("r2")
    assert [read.run_id for read in ledger.find_by_request("alice", "same")] == ["r2", "r0"]
    with pytest.raises(APIError, match="no such read"):
        ledger.get("bob", "r0")
    newest_read, failed_read = ledger.search("alice", "", newest=5)[0]
    assert (failed_read.state, failed_read.error, failed_read.ended is None) == (ReadState.FAILED, "why", False)
    assert (newest_read.edited, newest_read.state.has_ended) == (True, True)
    assert [read.run_id for read in ledger.search("bob", "0% _", newest=9)[0]] == ["r1"]
    assert ledger.search("alice", "%x", newest=9) == ([], 0)
    ledger.close()


async def test_cancelling_a_read_twice_equals_cancelling_it_once(make_reader, tmp_path) -> None:
    class SlowLedger(Ledger):
        def mark(self, *arguments: Any, **options: Any) -> None:
            time.sleep(0.05)
            super().mark(*arguments, **options)

    reader = make_reader(ScriptedPolicy(read_perfectly, delay=0.05), checkpoints=tmp_path / "checkpoints.sqlite")
    manager = ReadManager(reader, SlowLedger(tmp_path / "ledger.sqlite"), ServeSettings(folder=tmp_path), Metrics())
    document = reader.store.add(Document.from_text(LONG_TEXT))
    read, _ = await manager.start(
        ReadRequest(owner=LOCAL, document=document, question=QUESTION, sampling=SamplingParams())
    )
    await asyncio.sleep(0.2)
    first_cancellation = asyncio.create_task(manager.cancel(read))
    await asyncio.sleep(0.02)
    await asyncio.gather(first_cancellation, manager.cancel(read))
    assert len(manager) == 0 and read.state is ReadState.CANCELLED
    with pytest.raises(APIError, match="was cancelled"):
        async for _ in manager.follow(read):
            pass
