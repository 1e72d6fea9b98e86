"""`memagent serve` in front of a real vLLM server: unchanged clients, a request of any length, and kills."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.asking_process import AskingProcess
from support.clients import CLIENTS, ClientsNotInstalledError
from support.serving import ServingProcess

from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_evaluation.tasks.haystacks import reference_topics
from memagent_graph import load_tokenizer
from memagent_graph.run_log import RunLog
from memagent_serve.ledger import Ledger, ReadState
from memagent_training.serving.vllm_server import VLLMServer

FACTS = PlantedFacts(3, held_out=True, number_share=1.0)
FACT = FACTS.fact()
OTHER_FACT = FACTS.fact(exclude=frozenset({FACT.entity.lower()}))
MODEL = "memagent-embedded"
KEY, OTHER_KEY = "a-key-of-the-integration-tests", "another-key-of-the-tests"


def document(tokens: int, fact: Fact = FACT) -> str:
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
    paragraphs.insert(len(paragraphs) // 2, fact.statement)
    return "\n\n".join(paragraphs)


def long_request(tokens: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": document(tokens)}, {"role": "user", "content": FACT.question}]
    return {"model": MODEL, "messages": messages, **options}


@pytest.fixture
def serving(embedded_server: VLLMServer, tmp_path: Path) -> Iterator[ServingProcess]:
    environment = {"MEMAGENT_KEYS": f"tests:{KEY},others:{OTHER_KEY}"}
    with ServingProcess(embedded_server.base_url, tmp_path / "home", model=MODEL, environment=environment) as server:
        yield server


@pytest.fixture
def client(serving: ServingProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serving.api, api_key=KEY, timeout=1800, max_retries=0) as api:
        yield api


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)


def test_a_short_request_is_answered_as_the_model_server_answers_it(
    serving: ServingProcess, embedded_server: VLLMServer
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

    there, here = post(embedded_server.base_url, body), post(serving.api, body)
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

    assert streamed(serving.api) == streamed(embedded_server.base_url)
    wrong = {**body, "model": "nobody"}
    assert post(serving.api, wrong).json() == post(embedded_server.base_url, wrong).json()


def test_the_official_client_reads_a_long_document_plain_and_streaming(client: openai.OpenAI, tmp_path: Path) -> None:
    request = long_request(12_000)
    reply: Any = client.chat.completions.create(**request)
    assert FACT.value in reply.choices[0].message.content
    assert reply.usage.prompt_tokens > 12_000
    assert any(FACT.value in annotation.url_citation.quote for annotation in reply.choices[0].message.annotations)
    assert (
        RunLog(tmp_path / "home" / "runs.sqlite").get(reply.memagent["run_id"]).answer
        == reply.choices[0].message.content
    )
    streamed: Any = client.chat.completions.create(
        **{**request, "seed": 1}, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(streamed)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert FACT.value in "".join(delta.content or "" for delta in deltas)
    assert "% read" in "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert chunks[-1].usage.prompt_tokens > 12_000


def _asked_by(name: str, api: str, messages: list[dict[str, str]], folder: Path, *, streams: bool) -> str:
    """What a client of the name is answered."""
    try:
        return "".join(CLIENTS[name](api, KEY, MODEL, messages, folder, streams=streams))
    except ClientsNotInstalledError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shared(embedded_server: VLLMServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    """A server that the clients ask in turn: what two of them ask alike is read once."""
    environment = {"MEMAGENT_KEYS": f"tests:{KEY}"}
    folder = tmp_path_factory.mktemp("home")
    with ServingProcess(embedded_server.base_url, folder, model=MODEL, environment=environment) as server:
        yield server


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


def test_an_uploaded_file_is_read(client: openai.OpenAI) -> None:
    file = client.files.create(file=("book.html", f"<pre>{document(4000)}</pre>".encode()), purpose="user_data")
    part = {"type": "file", "file": {"file_id": file.id}}
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": FACT.question}]}]
    reply: Any = client.chat.completions.create(model=MODEL, messages=messages)
    assert FACT.value in reply.choices[0].message.content
    assert reply.memagent["read"] == ["book.html"]


@pytest.mark.timeout(3600)
def test_whatever_is_killed_each_read_is_done_once_and_for_its_own_key(
    serving: ServingProcess,
    embedded_server: VLLMServer,
    tmp_path: Path,
    size: Callable[[int, int], int],
    record_property: Callable[[str, Any], None],
) -> None:
    """`kill -9` of server, model server and client in turn, each time while both clients wait for a read."""
    rounds, moments = size(1, 3), random.Random(3)
    facts = {KEY: FACT, OTHER_KEY: OTHER_FACT}
    completions = -_completions(embedded_server)
    with ExitStack() as stack:
        clients = {
            key: stack.enter_context(AskingProcess(serving.api, key, _reads_of(fact), tmp_path))
            for key, fact in facts.items()
        }
        for _ in range(rounds):
            for victim in moments.sample([serving, embedded_server, moments.choice(list(clients.values()))], 3):
                time.sleep(moments.uniform(0.5, 4.0))
                if victim is embedded_server:
                    completions += _completions(embedded_server)
                victim.kill()
                time.sleep(moments.choice([0.0, 1.0]))
                victim.start()
        assert [client.finish() for client in clients.values()] == [0, 0]
        answers = {key: client.answers() for key, client in clients.items()}
    completions += _completions(embedded_server)

    log, ledger = RunLog(tmp_path / "home" / "runs.sqlite"), Ledger(tmp_path / "home" / "serve" / "reads.sqlite")
    logged = 0
    for owner, key in (("tests", KEY), ("others", OTHER_KEY)):
        assert {answer["status"] for answer in answers[key]} == {200}
        assert all(facts[key].value in answer["content"] for answer in answers[key])
        ids = [answer["run_id"] for answer in answers[key]]
        entries, _ = ledger.search(owner, "", newest=10**6)
        assert sorted(ids) == sorted(entry.run_id for entry in entries), "each request is one read of its key"
        assert {entry.state for entry in entries} == {ReadState.FINISHED}
        positions = [
            [conversation.position for conversation in log.conversations(run_id, with_ids=False)] for run_id in ids
        ]
        assert all(position == list(range(len(position))) for position in positions), (
            "a chunk counts twice, or is missing"
        )
        assert len({len(position) for position in positions}) == 1, "each read of one document has as many chunks"
        logged += sum(map(len, positions))
    ledger.close()
    kills_of_servers = rounds * 2
    assert completions <= logged + kills_of_servers * len(clients), "more than the chunks at hand was read again"
    record_property("reads", sum(map(len, answers.values())))
    record_property("chunks", logged)
    record_property("completions", completions)


def _reads_of(fact: Fact) -> list[dict[str, Any]]:
    """Requests that differ in their seed alone, so that each is a read of its own."""
    messages = [{"role": "user", "content": document(4000, fact)}, {"role": "user", "content": fact.question}]
    return [{"model": MODEL, "messages": messages, "temperature": 0, "seed": number} for number in range(200)]


def _completions(server: VLLMServer) -> int:
    """How many requests a model server has answered since it started."""
    return int(server.metrics().get("vllm:request_success_total", 0))
