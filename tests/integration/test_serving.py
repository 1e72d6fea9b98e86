"""`memagent serve` in front of a real vLLM server: unchanged clients, and a request of any length."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.clients import CLIENTS, ClientsNotInstalledError
from support.serving import ServingProcess

from memagent_evaluation.planted_facts import PlantedFacts
from memagent_evaluation.tasks.haystacks import reference_topics
from memagent_graph import load_tokenizer
from memagent_training.serving.vllm_server import VLLMServer

FACT = PlantedFacts(3, held_out=True, number_share=1.0).fact()
MODEL = "memagent-embedded"
KEY = "a-key-of-the-integration-tests"


def document(tokens: int) -> str:
    """About so many tokens of prose with one fact in the middle."""
    tokenizer = load_tokenizer("embedded")
    topics = list(islice(reference_topics(), 4000))
    counts = [tokenizer.count(topic) + 2 for topic in topics]
    paragraphs: list[str] = []
    length = 0
    while length < tokens:
        place = len(paragraphs) % len(topics)
        paragraphs.append(topics[place])
        length += counts[place]
    paragraphs.insert(len(paragraphs) // 2, FACT.statement)
    return "\n\n".join(paragraphs)


def long_request(tokens: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": document(tokens)}, {"role": "user", "content": FACT.question}]
    return {"model": MODEL, "messages": messages, **options}


@pytest.fixture(scope="module")
def shared(embedded_server: VLLMServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    """A server that the clients ask in turn: what two of them ask alike is read once."""
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

    def streamed(url: str) -> tuple[Any, ...]:
        """What a stream says. A busy vLLM joins parts, and its log-probs differ a little from batch to batch."""
        lines = post(url, {**body, "stream": True, "stream_options": {"include_usage": True}}).text.splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for part in parts for choice in part["choices"]]
        said = [token["token"] for choice in choices for token in (choice["logprobs"] or {}).get("content", ())]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        return content, said, choices[-1]["finish_reason"], parts[-1]["usage"], lines[-2], {*parts[0]}, {*choices[0]}

    assert streamed(shared.api) == streamed(embedded_server.base_url)
    wrong = {**body, "model": "nobody"}
    assert post(shared.api, wrong).json() == post(embedded_server.base_url, wrong).json()


def _asked_by(name: str, api: str, messages: list[dict[str, str]], folder: Path, *, streams: bool) -> str:
    """What a client of the name is answered."""
    try:
        return "".join(CLIENTS[name](api, KEY, MODEL, messages, folder, streams=streams))
    except ClientsNotInstalledError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streaming"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_unchanged_but_for_the_url_is_answered_as_by_the_model_server(
    name: str, streams: bool, shared: ServingProcess, embedded_server: VLLMServer, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": FACT.question}]
    direct = _asked_by(name, embedded_server.base_url, messages, tmp_path, streams=streams)
    assert _asked_by(name, shared.api, messages, tmp_path, streams=streams) == direct


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streaming"])
@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "llm"])
def test_a_client_unchanged_but_for_the_url_reads_a_long_document(
    name: str, streams: bool, shared: ServingProcess, tmp_path: Path, size: Callable[[int, int], int]
) -> None:
    """At full size half a million tokens; small, the official client alone reads as many, in the test below.

    `llm` sends document and question in one message, so the question has a paragraph of the document with it. The
    embedded policy answers nothing but bare questions; tests/clients has `llm` with one that understands.
    """
    messages: list[dict[str, str]] = long_request(size(20_000, 500_000))["messages"]
    assert FACT.value in _asked_by(name, shared.api, messages, tmp_path, streams=streams)


@pytest.mark.timeout(3600)
def test_half_a_million_tokens_are_answered_right(shared: ServingProcess) -> None:
    with openai.OpenAI(base_url=shared.api, api_key=KEY, timeout=3600, max_retries=0) as client:
        reply: Any = client.chat.completions.create(**long_request(500_000, temperature=0))
    assert FACT.value in reply.choices[0].message.content
    assert reply.memagent["document_tokens"] > 480_000  # blank lines are counted otherwise in one text
