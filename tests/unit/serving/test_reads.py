"""Reads that outlive connections, processes and failures: never done twice, never lost, never another key's."""

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
from unit.serving.test_attacks import POST_CHAT, head, until

from memagent_graph import Document, SamplingParams, ScriptedPolicy
from memagent_graph.reading.state import Limits
from memagent_serve import completions
from memagent_serve.api_errors import ApiError
from memagent_serve.keys import LOCAL, Keys, Owner
from memagent_serve.ledger import Entry, Ledger, ReadState
from memagent_serve.metrics import Metrics
from memagent_serve.reads import ReadManager, ReadRequest
from memagent_serve.serve_settings import ServeSettings

LONG = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 12."}, words=900)
QUESTION = "What is the key of harbor?"


def body(question: str = QUESTION, document: str = LONG, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": document}, {"role": "user", "content": question}]
    return {"model": "fake", "messages": messages, **options}


def post(
    api: str, content: dict[str, Any], *, key: str = ALICE, timeout: float = 60, **headers: str
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}", **headers}
    return httpx2.post(f"{api}/chat/completions", json=content, headers=headers, timeout=timeout)


def answer(reply: httpx2.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def sections(upstream: FakeServer) -> Counter[str]:
    """How often each chunk was asked about."""
    prompts = [request["messages"][-1]["content"] for request in upstream.requests]
    return Counter(extract(prompt, "section") for prompt in prompts if "<section>" in prompt)


def _ask_and_go_away(api: str, upstream: FakeServer) -> None:
    """Send a request, and close the connection once its read is at work."""
    content = json.dumps(body()).encode()
    before, at = len(upstream.requests), httpx2.URL(api)
    with socket.create_connection((at.host, at.port)) as connection:
        connection.sendall(head(*POST_CHAT, f"Content-Length: {len(content)}") + content)
        until(lambda: len(upstream.requests) > before + 2)


# The same again


def test_a_client_that_asks_again_meets_its_own_read_while_it_runs(slow: FakeServer, tmp_path: Path) -> None:
    with serve(slow.base_url, tmp_path) as server:
        _ask_and_go_away(server.api, slow)
        reply = post(server.api, body())
        again = post(server.api, body(stream=False))
    assert answer(reply) == answer(again) == "4711"
    assert reply.headers["X-Memagent-Read"] == "joined"
    assert again.headers["X-Memagent-Read"] == "repeated"
    assert reply.headers["X-Memagent-Run-Id"] == again.headers["X-Memagent-Run-Id"]
    assert set(sections(slow).values()) == {1}
    assert reply.json()["usage"] == again.json()["usage"]


def test_an_explicit_new_try_reads_afresh_and_later_asks_meet_that_one(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path) as server:
        first = post(server.api, body())
        new = post(server.api, body(), **{"X-Memagent-New-Read": "1"})
        later = post(server.api, body())
    ids = [reply.headers["X-Memagent-Run-Id"] for reply in (first, new, later)]
    assert ids[0] != ids[1] == ids[2]
    assert set(sections(upstream).values()) == {2}


def test_a_read_that_ended_too_long_ago_is_done_again(upstream: FakeServer, tmp_path: Path) -> None:
    with serve(upstream.base_url, tmp_path, keep_seconds=0.0) as server:
        first, second = post(server.api, body()), post(server.api, body())
    assert second.headers["X-Memagent-Read"] == "started"
    assert first.headers["X-Memagent-Run-Id"] != second.headers["X-Memagent-Run-Id"]


def test_another_question_or_sampling_is_another_read(upstream: FakeServer, tmp_path: Path) -> None:
    others = ({}, {"temperature": 0.7}, {"seed": 3}, {"max_tokens": 20}, {"question": "Which castle?"})
    with serve(upstream.base_url, tmp_path) as server, ThreadPoolExecutor(len(others)) as pool:
        replies = list(pool.map(lambda other: post(server.api, body(**other)), others))
    assert {reply.headers["X-Memagent-Read"] for reply in replies} == {"started"}
    assert len({reply.headers["X-Memagent-Run-Id"] for reply in replies}) == len(others)


def test_a_read_that_failed_continues_at_its_chunk(tmp_path: Path) -> None:
    broken = True

    def respond(request: dict[str, Any], number: int) -> Any:
        if broken and number == 5:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return read_perfectly(request["messages"][-1]["content"])

    with FakeServer(respond, window=1000) as upstream, serve(upstream.base_url, tmp_path) as server:
        failure = post(server.api, body())
        broken = False
        reply = post(server.api, body())
    assert failure.status_code == 503
    assert failure.json()["error"]["code"] == "policy_server_unavailable"
    assert "Retry-After" in failure.headers
    assert reply.headers["X-Memagent-Read"] == "resumed"
    assert answer(reply) == "4711"
    assert sorted(sections(upstream).values())[-2:] == [1, 2], "only the chunk that failed was asked about again"


def test_a_read_that_a_limit_stopped_says_so_and_continues_when_asked_again(
    upstream: FakeServer, tmp_path: Path
) -> None:
    with serve(upstream.base_url, tmp_path, limits=Limits(max_chunks=5)) as server:
        replies = [post(server.api, body())]
        while replies[-1].json()["choices"][0]["finish_reason"] == "length":
            assert "Ask the same again, and it continues." in answer(replies[-1])
            replies.append(post(server.api, body()))
    assert len(replies) > 2
    assert answer(replies[-1]) == "4711"
    assert set(sections(upstream).values()) == {1}


# Closing, cancelling


def test_a_client_that_goes_away_ends_the_read_only_where_that_is_set(slow: FakeServer, tmp_path: Path) -> None:
    for cancels in (False, True):
        with serve(slow.base_url, tmp_path / str(cancels), cancel_on_close=cancels) as server:
            _ask_and_go_away(server.api, slow)
            if cancels:
                until(lambda server=server: not len(server.resources.manager))
            entry = server.resources.ledger.search("local", "", newest=1)[0][0]
            assert entry.state is (ReadState.CANCELLED if cancels else ReadState.RUNNING)
            assert answer(post(server.api, body())) == "4711"
    assert set(sections(slow).values()) <= {2, 3}, "two servers read, and one of them was at a chunk when it stopped"


def test_a_read_is_seen_and_cancelled_by_its_id_and_continues_when_asked_again(
    slow: FakeServer, tmp_path: Path
) -> None:
    key = {"Authorization": f"Bearer {ALICE}"}
    with serve(slow.base_url, tmp_path, keys=KEYS) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server.api, body())
        until(lambda: len(slow.requests) > 3)
        (read,) = httpx2.get(f"{server.api}/reads", headers=key).json()["data"]
        details = httpx2.get(f"{server.api}/reads/{read['run_id']}", headers=key).json()
        assert details["state"] == "running"
        assert details["chunks"] > 1
        assert "owner" not in details
        reply = httpx2.post(f"{server.api}/reads/{read['run_id']}/cancel", headers=key)
        assert reply.json()["state"] == "cancelled"
        assert waiting.result().status_code == 409
        assert answer(post(server.api, body())) == "4711"


# Keys


def test_another_keys_reads_are_invisible_and_equal_requests_of_two_keys_are_two_reads(
    upstream: FakeServer, tmp_path: Path
) -> None:
    with serve(upstream.base_url, tmp_path, keys=KEYS) as server:
        first, second = post(server.api, body()), post(server.api, body(), key=BOB)
        run_id = first.headers["X-Memagent-Run-Id"]
        assert second.headers["X-Memagent-Run-Id"] != run_id
        assert second.headers["X-Memagent-Read"] == "started"
        reads = httpx2.get(f"{server.api}/reads", headers={"Authorization": f"Bearer {BOB}"}).json()["data"]
        assert [item["run_id"] for item in reads] == [second.headers["X-Memagent-Run-Id"]]
    assert set(sections(upstream).values()) == {2}


def test_each_key_has_a_salt_of_its_own_where_the_server_caches_by_salt(tmp_path: Path) -> None:
    with FakeServer(window=1000, vllm=True) as upstream, serve(upstream.base_url, tmp_path, keys=KEYS) as server:
        post(server.api, body())
        salts = {request["cache_salt"] for request in upstream.requests}
        post(server.api, body(), key=BOB)
        both = {request["cache_salt"] for request in upstream.requests}
    assert len(salts) == 1
    assert len(both) == 2


# Bounds


def test_beyond_the_bounds_a_request_is_refused_with_the_time_to_wait(slow: FakeServer, tmp_path: Path) -> None:
    with (
        serve(slow.base_url, tmp_path, max_reads=1, max_waiting=1, max_reads_per_key=2) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        places = [pool.submit(post, server.api, body(f"What is the key of harbor? {n}")) for n in range(2)]
        until(lambda: len(server.resources.manager) == 2)
        texts = list((tmp_path / "documents" / "texts").iterdir())
        refusal = post(server.api, body("A third question?", f"{LONG} more"))
        assert refusal.status_code == 429
        assert list((tmp_path / "documents" / "texts").iterdir()) == texts, "a refused request leaves no text"
        assert int(refusal.headers["Retry-After"]) >= 1
        assert refusal.json()["error"]["type"] == "rate_limit_error"
        more = [post(server.api, body(f"Question {n}?")) for n in range(2)]
        waits = [int(reply.headers["Retry-After"]) for reply in (refusal, *more)]
        assert waits == sorted(set(waits)), "the more are refused, the later they are to come back"
        short = post(server.api, {"model": "fake", "messages": [{"role": "user", "content": "<problem>x</problem>"}]})
        assert short.status_code == 200, "short requests are not reads"
        assert [answer(entry.result()) for entry in places] == ["4711", "4711"]
        assert answer(post(server.api, body("What is the key of harbor? 0"))) == "4711"


def test_one_key_cannot_take_all_places(slow: FakeServer, tmp_path: Path) -> None:
    with (
        serve(slow.base_url, tmp_path, max_reads=2, max_waiting=8, max_reads_per_key=1, keys=KEYS) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(post, server.api, body())
        until(lambda: len(server.resources.manager) == 1)
        assert post(server.api, body("Another?")).status_code == 429
        assert answer(post(server.api, body(), key=BOB)) == "4711"
        assert answer(first.result()) == "4711"


def test_a_key_may_have_lower_limits_of_its_own(upstream: FakeServer, tmp_path: Path) -> None:
    keys = Keys([(Owner("alice", max_tokens=500, max_bytes=20_000), ALICE), (Owner("bob"), BOB)])
    with serve(upstream.base_url, tmp_path, keys=keys) as server:
        stopped, whole = post(server.api, body()), post(server.api, body(), key=BOB)
        assert post(server.api, body(document="x" * 20_000)).status_code == 413
    assert stopped.json()["memagent"]["stop_reason"] == "max_tokens_total"
    assert stopped.json()["choices"][0]["finish_reason"] == "length"
    assert answer(whole) == "4711"


def test_signs_of_life_keep_a_stream_open(slow: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "HEARTBEAT_SECONDS", 0.01)
    with serve(slow.base_url, tmp_path) as server:
        lines = post(server.api, body(stream=True)).text.splitlines()
    assert any(line.startswith(": ping") for line in lines)
    assert "data: [DONE]" in lines


# The ledger


def test_the_ledger_knows_and_finds_the_reads_of_their_owner_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "reads.sqlite")
    for number, owner in enumerate(("alice", "bob", "alice")):
        ledger.begin(Entry(f"r{number}", owner, "same", "100% _?", "d", float(number)))
    ledger.mark("r0", ReadState.FAILED, "why")
    ledger.mark("r2", ReadState.PAUSED)
    ledger.mark_edited("r2")
    assert [read.run_id for read in ledger.find_by_request("alice", "same")] == ["r2", "r0"]
    assert ledger.get("bob", "r0") is None
    newest, failed = ledger.search("alice", "", newest=5)[0]
    assert (failed.state, failed.error, failed.ended is None) == (ReadState.FAILED, "why", False)
    assert (newest.edited, newest.state.has_ended) == (True, True)
    assert [read.run_id for read in ledger.search("bob", "0% _", newest=9)[0]] == ["r1"]
    assert ledger.search("alice", "%x", newest=9) == ([], 0)
    ledger.close()


async def test_a_read_that_is_cancelled_twice_is_gone_like_one_that_is_cancelled_once(make_reader, tmp_path) -> None:
    class SlowLedger(Ledger):
        def mark(self, *arguments: Any, **options: Any) -> None:
            time.sleep(0.05)
            super().mark(*arguments, **options)

    reader = make_reader(ScriptedPolicy(read_perfectly, delay=0.05), checkpoints=tmp_path / "checkpoints.sqlite")
    manager = ReadManager(reader, SlowLedger(tmp_path / "ledger.sqlite"), ServeSettings(folder=tmp_path), Metrics())
    document = reader.store.add(Document.from_text(LONG))
    read, _ = await manager.start(
        ReadRequest(owner=LOCAL, document=document, question=QUESTION, sampling=SamplingParams())
    )
    await asyncio.sleep(0.2)
    first = asyncio.create_task(manager.cancel(read))
    await asyncio.sleep(0.02)
    await asyncio.gather(first, manager.cancel(read))
    assert len(manager) == 0
    assert read.state is ReadState.CANCELLED
    with pytest.raises(ApiError, match="was cancelled"):
        async for _ in manager.follow(read):
            pass
