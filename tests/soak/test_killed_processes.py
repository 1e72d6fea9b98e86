"""After kills of both servers and lost clients, each read is done once, and only for its own key."""

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

MAX_READS = 2
NAMES = {ALICE: "alice", BOB: "bob"}
KEYS_OF_HARBOR = {ALICE: "4711", BOB: "8523"}
SHARED_KEY = "600"
REQUEST_COUNT = 400


def make_requests(key: str) -> list[dict[str, Any]]:
    """Return the requests of a client, alternately about its own document and one that both clients have."""
    own_text = make_document({0.4: f"The key of harbor is {KEYS_OF_HARBOR[key]}."}, words=900)
    shared_text = make_document({0.5: f"The key of harbor is {SHARED_KEY}."}, words=900)
    return [
        {
            "model": "fake",
            "messages": [
                {"role": "user", "content": shared_text if number % 2 else own_text},
                {"role": "user", "content": f"What is the key of harbor? Asked by {NAMES[key]}, {number}."},
            ],
        }
        for number in range(REQUEST_COUNT)
    ]


def send_requests(api: str, key: str, stop: Event) -> list[httpx2.Response]:
    """Send the requests of a client until `stop` is set, and return the replies."""
    rng, replies = random.Random(key), []
    with httpx2.Client(headers={"Authorization": f"Bearer {key}"}) as client:
        for request in make_requests(key):
            replies.append(send_until_answered(client, f"{api}/chat/completions", request, rng))
            if stop.is_set():
                break
    return replies


def send_until_answered(
    client: httpx2.Client, url: str, request: dict[str, Any], rng: random.Random
) -> httpx2.Response:
    """Send a request until it is answered, in spite of killed servers and timeouts of the client."""
    while True:
        with suppress(httpx2.TransportError):
            reply = client.post(url, json=request, timeout=rng.choice([0.2, 60]))
            if reply.status_code not in {429, 503}:
                return reply
        time.sleep(0.1)


def test_after_any_kill_each_read_is_done_once_for_its_own_key(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    kill_count, rng = size(2, 40), random.Random(5)
    home, stop = tmp_path / "home", Event()
    environment = {"MEMAGENT_KEYS": f"alice:{ALICE},bob:{BOB}"}
    kills: Counter[str] = Counter()
    options = (*SMALL_OPTIONS, "--retries", "0", "--max-reads", str(MAX_READS))
    with (
        PolicyProcess(tmp_path / "requests", 20) as policy,
        ServingProcess(policy.base_url, home, *options, environment=environment) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        clients = [pool.submit(send_requests, server.api, key, stop) for key in NAMES]
        processes: dict[str, Any] = {"policy server": policy, "server": server}
        for number in range(kill_count):
            time.sleep(rng.uniform(0.1, 1.2))
            name = list(processes)[number] if number < len(processes) else rng.choice(list(processes))
            processes[name].kill()
            kills[name] += 1
            time.sleep(rng.choice([0.0, 0.3]))
            processes[name].start()
        stop.set()
        replies = dict(zip(NAMES, (client.result() for client in clients), strict=True))

    for key, replies_to_key in replies.items():
        assert {reply.status_code for reply in replies_to_key} == {200}
        expected = [SHARED_KEY if number % 2 else KEYS_OF_HARBOR[key] for number in range(len(replies_to_key))]
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies_to_key] == expected

    ledger, log = Ledger(home / "serve" / "reads.sqlite"), RunLog(home / "runs.sqlite")
    read_count = 0
    for key, owner in NAMES.items():
        entries, _ = ledger.search(owner, "", newest=10**6)
        assert {entry.state for entry in entries} == {ReadState.FINISHED}
        ids = [reply.headers["X-Memagent-Run-Id"] for reply in replies[key]]
        assert sorted(ids) == sorted(entry.run_id for entry in entries), "each request is one read of its key"
        assert len(set(ids)) == len(ids)
        for run_id in ids:
            positions = [conversation.position for conversation in log.conversations(run_id, with_ids=False)]
            assert positions == list(range(len(positions))), "a chunk is logged twice, or is missing"
        read_count += len(ids)
    ledger.close()

    requests = policy.read_requests()
    prompts = Counter((request["problem"], request["section"]) for request in requests)
    repeated = sum(prompts.values()) - len(prompts)
    assert repeated <= kills.total() * MAX_READS, "more chunks than those in flight were read again"
    salts = {(request["salt"], name) for request in requests for name in NAMES.values() if name in request["problem"]}
    assert len(salts) == len({salt for salt, _ in salts}) > 1, "each key has its own part of the cache"
    record_property("killed", dict(kills))
    record_property("reads", read_count)
    record_property("chunks", len(prompts))
    record_property("chunks read again", repeated)
