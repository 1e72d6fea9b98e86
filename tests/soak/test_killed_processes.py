"""Kill -9 of both servers, and clients that go away: no read done twice, none lost, none of another key."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
from support.policy_process import PolicyProcess
from support.scripts import SMALL_OPTIONS, make_document
from support.serving import ALICE, BOB, ServingProcess

from memagent_graph.run_log import RunLog
from memagent_serve.ledger import Ledger, ReadState

AT_WORK = 2
BOUNDS = ("--max-reads", str(AT_WORK))
NAMES = {ALICE: "alice", BOB: "bob"}
VALUES = {ALICE: "4711", BOB: "8523"}
SHARED = "600"
REQUESTS = 400


def requests(key: str) -> list[dict[str, Any]]:
    """What a client asks: in turn of a document of its own, and of one that both have."""
    own = make_document({0.4: f"The key of harbor is {VALUES[key]}."}, words=900)
    shared = make_document({0.5: f"The key of harbor is {SHARED}."}, words=900)
    return [
        {
            "model": "fake",
            "messages": [
                {"role": "user", "content": shared if number % 2 else own},
                {"role": "user", "content": f"What is the key of harbor? Asked by {NAMES[key]}, {number}."},
            ],
        }
        for number in range(REQUESTS)
    ]


def ask_in_turn(api: str, key: str, stop: Event) -> list[httpx2.Response]:
    """What a client is answered until `stop` is set."""
    chance, replies = random.Random(key), []
    with httpx2.Client(headers={"Authorization": f"Bearer {key}"}) as client:
        for request in requests(key):
            replies.append(ask_until_answered(client, f"{api}/chat/completions", request, chance))
            if stop.is_set():
                break
    return replies


def ask_until_answered(
    client: httpx2.Client, url: str, request: dict[str, Any], chance: random.Random
) -> httpx2.Response:
    """The reply, however often the server is away or has no policy to ask, or the client went away itself."""
    while True:
        with suppress(httpx2.TransportError):
            reply = client.post(url, json=request, timeout=chance.choice([0.2, 60]))
            if reply.status_code not in {429, 503}:
                return reply
        time.sleep(0.1)


def test_after_any_kill_each_read_is_done_once_for_its_own_key(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    kills, moments = size(2, 40), random.Random(5)
    home, stop = tmp_path / "home", Event()
    environment = {"MEMAGENT_KEYS": f"alice:{ALICE},bob:{BOB}"}
    killed: Counter[str] = Counter()
    with (
        PolicyProcess(tmp_path / "asked", 20) as policy,
        ServingProcess(
            policy.base_url, home, *SMALL_OPTIONS, "--retries", "0", *BOUNDS, environment=environment
        ) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        clients = [pool.submit(ask_in_turn, server.api, key, stop) for key in NAMES]
        victims: dict[str, Any] = {"policy server": policy, "server": server}
        for number in range(kills):
            time.sleep(moments.uniform(0.1, 1.2))
            kind = list(victims)[number] if number < len(victims) else moments.choice(list(victims))
            victims[kind].kill()
            killed[kind] += 1
            time.sleep(moments.choice([0.0, 0.3]))
            victims[kind].start()
        stop.set()
        replies = dict(zip(NAMES, (client.result() for client in clients), strict=True))

    for key, replies_to_key in replies.items():
        assert {reply.status_code for reply in replies_to_key} == {200}
        expected = [SHARED if number % 2 else VALUES[key] for number in range(len(replies_to_key))]
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies_to_key] == expected

    ledger, log = Ledger(home / "serve" / "reads.sqlite"), RunLog(home / "runs.sqlite")
    reads = 0
    for key, owner in NAMES.items():
        entries, _ = ledger.search(owner, "", newest=10**6)
        assert {entry.state for entry in entries} == {ReadState.FINISHED}
        ids = [reply.headers["X-Memagent-Run-Id"] for reply in replies[key]]
        assert sorted(ids) == sorted(entry.run_id for entry in entries), "each request is one read of its key"
        assert len(set(ids)) == len(ids)
        for run_id in ids:
            positions = [conversation.position for conversation in log.conversations(run_id, with_ids=False)]
            assert positions == list(range(len(positions))), "a chunk counts twice, or is missing"
        reads += len(ids)
    ledger.close()

    requests = policy.read_requests()
    prompts = Counter((request["problem"], request["section"]) for request in requests)
    again = sum(prompts.values()) - len(prompts)
    assert again <= (killed["server"] + killed["policy server"]) * AT_WORK, (
        "more than the chunks at hand was read again"
    )
    salts = {(request["salt"], name) for request in requests for name in NAMES.values() if name in request["problem"]}
    assert len(salts) == len({salt for salt, _ in salts}) > 1, "two keys share a part of the cache"
    record_property("killed", dict(killed))
    record_property("reads", reads)
    record_property("chunks", len(prompts))
    record_property("chunks read again", again)
