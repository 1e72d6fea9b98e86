"""`memagent serve` with a real vLLM server: a short request is relayed, and half a million tokens are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from support.serving import ServingProcess
from test_reading import FACT, make_text

from memagent_training.serving.vllm_server import VLLMServer

MODEL = "memagent-embedded"
KEY = "a-key-of-the-integration-tests"


def make_long_request(tokens: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": make_text(tokens)}, {"role": "user", "content": FACT.question}]
    return {"model": MODEL, "messages": messages, **options}


@pytest.fixture(scope="module")
def server(embedded_server: VLLMServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    environment = {"MEMAGENT_KEYS": f"tests:{KEY}"}
    folder = tmp_path_factory.mktemp("home")
    with ServingProcess(embedded_server.base_url, folder, model=MODEL, environment=environment) as process:
        yield process


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)


def test_a_short_request_gets_the_reply_of_the_policy_server(
    server: ServingProcess, embedded_server: VLLMServer
) -> None:
    messages = [{"role": "user", "content": FACT.question}]
    options = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    body = {"model": MODEL, "messages": messages, **options}

    def drop_id_and_time(reply: httpx2.Response) -> dict[str, Any]:
        return {name: value for name, value in reply.json().items() if name not in {"id", "created"}}

    direct_reply, reply = post(embedded_server.base_url, body), post(server.api, body)
    assert reply.status_code == direct_reply.status_code == 200
    assert drop_id_and_time(reply) == drop_id_and_time(direct_reply)

    def read_stream(url: str) -> tuple[Any, ...]:
        """Return the content of a stream without log-probs and sizes of events, which depend on vLLM's batches."""
        lines = post(url, {**body, "stream": True, "stream_options": {"include_usage": True}}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        tokens = [token["token"] for choice in choices for token in (choice["logprobs"] or {}).get("content", ())]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        ends = choices[-1]["finish_reason"], events[-1]["usage"], lines[-2]
        return content, tokens, *ends, {*events[0]}, {*choices[0]}

    assert read_stream(server.api) == read_stream(embedded_server.base_url)
    wrong_body = {**body, "model": "nobody"}
    assert post(server.api, wrong_body).json() == post(embedded_server.base_url, wrong_body).json()


@pytest.mark.timeout(3600)
def test_a_question_on_half_a_million_tokens_is_answered(server: ServingProcess) -> None:
    with openai.OpenAI(base_url=server.api, api_key=KEY, timeout=3600, max_retries=0) as client:
        reply: Any = client.chat.completions.create(**make_long_request(500_000, temperature=0))
    assert FACT.value in reply.choices[0].message.content
    assert reply.memagent["document_tokens"] > 480_000  # empty lines are counted differently in one text
