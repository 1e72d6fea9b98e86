"""`memagent serve` in front of a real vLLM server: a short request unchanged, and one of half a million tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from support.serving import ServingProcess
from test_reading import FACT, document

from memagent_training.serving.vllm_server import VLLMServer

MODEL = "memagent-embedded"
KEY = "a-key-of-the-integration-tests"


def long_request(tokens: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": document(tokens)}, {"role": "user", "content": FACT.question}]
    return {"model": MODEL, "messages": messages, **options}


@pytest.fixture(scope="module")
def shared(embedded_server: VLLMServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    """The server of all tests."""
    environment = {"MEMAGENT_KEYS": f"tests:{KEY}"}
    folder = tmp_path_factory.mktemp("home")
    with ServingProcess(embedded_server.base_url, folder, model=MODEL, environment=environment) as server:
        yield server


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)


def test_a_short_request_is_answered_as_the_model_server_answers_it(
    shared: ServingProcess, embedded_server: VLLMServer
) -> None:
    messages = [{"role": "user", "content": FACT.question}]
    body = {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 2,
    }

    def without_id_and_time(reply: httpx2.Response) -> dict[str, Any]:
        values = reply.json()
        return {name: value for name, value in values.items() if name not in {"id", "created"}}

    there, here = post(embedded_server.base_url, body), post(shared.api, body)
    assert here.status_code == there.status_code == 200
    assert without_id_and_time(here) == without_id_and_time(there)

    def read_stream(url: str) -> tuple[Any, ...]:
        """Return the content of a stream. A busy vLLM joins parts, and its log-probs vary a little by batch."""
        lines = post(url, {**body, "stream": True, "stream_options": {"include_usage": True}}).text.splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for part in parts for choice in part["choices"]]
        said = [token["token"] for choice in choices for token in (choice["logprobs"] or {}).get("content", ())]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        return content, said, choices[-1]["finish_reason"], parts[-1]["usage"], lines[-2], {*parts[0]}, {*choices[0]}

    assert read_stream(shared.api) == read_stream(embedded_server.base_url)
    wrong = {**body, "model": "nobody"}
    assert post(shared.api, wrong).json() == post(embedded_server.base_url, wrong).json()


@pytest.mark.timeout(3600)
def test_half_a_million_tokens_are_answered_right(shared: ServingProcess) -> None:
    with openai.OpenAI(base_url=shared.api, api_key=KEY, timeout=3600, max_retries=0) as client:
        reply: Any = client.chat.completions.create(**long_request(500_000, temperature=0))
    assert FACT.value in reply.choices[0].message.content
    assert reply.memagent["document_tokens"] > 480_000  # blank lines are counted otherwise in one text
