"""Kill -9 of the server, the policy server and the clients: no read done twice, none lost, none of another key."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.asking_process import AskingProcess
from support.policy_process import PolicyProcess
from support.scripts import document_with
from support.serving import ALICE, BOB, SMALL_OPTIONS, ServingProcess

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
    own = document_with({0.4: f"The key of harbor is {VALUES[key]}."}, words=900)
    shared = document_with({0.5: f"The key of harbor is {SHARED}."}, words=900)
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


def test_whatever_is_killed_each_read_is_done_once_and_for_its_own_key(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    kills, moments = size(3, 50), random.Random(5)
    home = tmp_path / "home"
    environment = {"MEMAGENT_KEYS": f"alice:{ALICE},bob:{BOB}"}
    killed: Counter[str] = Counter()
    with ExitStack() as stack:
        policy = stack.enter_context(PolicyProcess(tmp_path / "asked", 20))
        server = stack.enter_context(
            ServingProcess(policy.base_url, home, *SMALL_OPTIONS, *BOUNDS, environment=environment)
        )
        clients = [stack.enter_context(AskingProcess(server.api, key, requests(key), tmp_path)) for key in (ALICE, BOB)]
        victims: dict[str, list[Any]] = {"server": [server], "policy server": [policy], "client": clients}
        for number in range(kills):
            time.sleep(moments.uniform(0.1, 1.2))
            kind = sorted(victims)[number % len(victims)] if number < len(victims) else moments.choice(sorted(victims))
            victim = moments.choice(victims[kind])
            victim.kill()
            killed[kind] += 1
            time.sleep(moments.choice([0.0, 0.3]))
            victim.start()
        assert [client.finish() for client in clients] == [0, 0]
        answers = {client: client.answers() for client in clients}

    for key, client in zip((ALICE, BOB), clients, strict=True):
        assert {answer["status"] for answer in answers[client]} == {200}
        expected = [SHARED if number % 2 else VALUES[key] for number in range(len(answers[client]))]
        assert [answer["content"] for answer in answers[client]] == expected

    ledger, log = Ledger(home / "serve" / "reads.sqlite"), RunLog(home / "runs.sqlite")
    reads = 0
    for owner, client in zip(NAMES.values(), clients, strict=True):
        entries, _ = ledger.search(owner, "", newest=10**6)
        assert {entry.state for entry in entries} == {ReadState.FINISHED}
        ids = [answer["run_id"] for answer in answers[client]]
        assert sorted(ids) == sorted(entry.run_id for entry in entries), "each request is one read of its key"
        assert len(set(ids)) == len(ids)
        for run_id in ids:
            positions = [conversation.position for conversation in log.conversations(run_id, with_ids=False)]
            assert positions == list(range(len(positions))), "a chunk counts twice, or is missing"
        reads += len(ids)
    ledger.close()

    prompts = Counter((prompt["problem"], prompt["section"]) for prompt in policy.prompts())
    again = sum(prompts.values()) - len(prompts)
    assert again <= (killed["server"] + killed["policy server"]) * AT_WORK, (
        "more than the chunks at hand was read again"
    )
    salts = {
        (prompt["salt"], name) for prompt in policy.prompts() for name in NAMES.values() if name in prompt["problem"]
    }
    assert len(salts) == len({salt for salt, _ in salts}) > 1, "two keys share a part of the cache"
    record_property("killed", dict(killed))
    record_property("reads", reads)
    record_property("chunks", len(prompts))
    record_property("chunks read again", again)
