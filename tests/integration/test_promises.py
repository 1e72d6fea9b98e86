"""The requests of one read to a real server, and the log of the read, are the recorded ones.

They are recorded with the embedded policy in float32, whose greedy answers do not depend on the start of the server:
`RECORD_PROMISES=1 pytest tests/integration/test_promises.py` writes the file if it does not exist.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from aiohttp import web
from promises.comparison import find_differences, normalise
from promises.scenarios import dump_bodies, dump_result, read_log_lines
from support.fake_server import FakeServer

from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, SamplingParams, load_prompts

RECORDED = Path(__file__).parents[1] / "promises" / "recorded" / "served" / "vllm.json"
TEXT = "The lighthouse keeper of Norwick is called Ada Brandt. " + "The wind turned and the boats came home. " * 80
QUESTION = "Who is the lighthouse keeper of Norwick?"
SMALL = Budget(context_window=1024, question_tokens=40, memory_tokens=48, chunk_tokens=200, answer_tokens=24)


def read(address: str, folder: Path) -> Any:
    """Read through a server that forwards to the real one, and return the result and the requests."""

    def forward(body: dict[str, Any], number: int) -> web.Response:
        request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return web.Response(body=reply.read(), content_type="application/json")

    with FakeServer(forward, model="memagent-embedded", vllm=True, window=1024) as proxy:
        policy = OpenAICompatiblePolicy(base_url=proxy.base_url, policy_version="first")
        with MemAgent(
            policy, tokenizer="embedded", budget=SMALL, prompts=load_prompts(), sampling=SamplingParams(),
            store=folder / "documents", run_log=folder / "runs.sqlite",
        ) as reader:  # fmt: skip
            result = reader.read(TEXT, QUESTION, run_id="served")
    return result, proxy.requests


def round_logprobs(value: Any) -> Any:
    """Return the value with log-probs rounded to four digits, because kernels differ in the last ones."""
    if isinstance(value, dict):
        return {
            key: [round(number, 4) for number in item]
            if key == "logprobs" and isinstance(item, list)
            else round_logprobs(item)
            for key, item in value.items()
        }
    return [round_logprobs(item) for item in value] if isinstance(value, list) else value


def test_a_greedy_read_sends_and_logs_the_recorded_values(embedded_server, tmp_path) -> None:
    result, requests = read(embedded_server.base_url, tmp_path)
    lines = read_log_lines(tmp_path / "runs.sqlite")
    actual = round_logprobs(
        normalise({"result": dump_result(result), "requests": dump_bodies(requests), "log": lines}, tmp_path)
    )
    if os.environ.get("RECORD_PROMISES") and not RECORDED.exists():
        RECORDED.parent.mkdir(parents=True, exist_ok=True)
        RECORDED.write_text(json.dumps(actual, indent=1) + "\n")
    assert find_differences(json.loads(RECORDED.read_text()), actual, 2e-3) == []
