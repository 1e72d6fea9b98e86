"""Structured answers on a real vLLM server: random weights write valid JSON only with guided decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from memagent_graph import Budget, EventKind, MemAgent, OpenAICompatiblePolicy, ResponseFormat, RunLog, SamplingParams
from memagent_graph.events import StopReason
from memagent_graph.policy import Message
from memagent_graph.prompts import load_prompts
from memagent_training.serving.vllm_server import VLLMServer

WINDOW = 2048
TEXT = "The lighthouse was built by Ann in May. It is open on Sundays. " * 40
BUDGET = Budget(context_window=WINDOW, question_tokens=100, memory_tokens=60, chunk_tokens=200, answer_tokens=300)


class Lighthouse(BaseModel):
    """Without numbers and free text, which random weights would never end."""

    model_config = ConfigDict(extra="forbid")
    built_by: Literal["Ann", "Bob", "nobody"]
    is_open: bool


@pytest.fixture(scope="module")
def server(vllm_python: Path, random_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer(random_policy, log_file=log_file, options=("--max-model-len", str(WINDOW))) as server:
        yield server


def test_only_the_answer_is_guided_by_the_schema(server, random_policy, tmp_path) -> None:
    log = RunLog(tmp_path / "runs.sqlite")
    reader = MemAgent(
        OpenAICompatiblePolicy(base_url=server.base_url),
        tokenizer=random_policy,
        budget=BUDGET,
        prompts=load_prompts(),
        sampling=SamplingParams(temperature=1.0, seed=1),  # greedy random weights may write endless white space
        store=tmp_path / "documents",
        run_log=log,
    )
    with reader:
        result = reader.read(TEXT, "Who built the lighthouse?", response_format=Lighthouse)
    assert result.stop_reason is StopReason.ANSWERED
    assert isinstance(result.value, Lighthouse)
    assert result.answer is not None
    assert Lighthouse.model_validate_json(result.answer) == result.value
    assert not {EventKind.SCHEMA_REFUSED, EventKind.INVALID_ANSWER} & {event.kind for event in result.events}
    *updates, answer = log.conversations(result.run_id)
    assert answer.role == "answer"
    assert answer.sampling["json_schema"] is True
    assert answer.token_ids is not None
    assert answer.logprobs is not None
    assert len(answer.token_ids) == len(answer.logprobs)
    assert updates
    assert not any("json_schema" in update.sampling for update in updates)
    log.close()


def test_the_same_policy_writes_no_json_without_guided_decoding(server) -> None:
    response_format = ResponseFormat.of(Lighthouse)
    prompt = [Message(role="user", content=f"Who built the lighthouse? Reply with JSON: {response_format.schema_json}")]

    async def ask(schema: str | None) -> str:
        policy = OpenAICompatiblePolicy(base_url=server.base_url)
        sampling = SamplingParams(max_tokens=300, temperature=1.0, seed=2, json_schema=schema)
        completion = await policy.complete(prompt, sampling)
        await policy.aclose()
        assert not completion.notes
        return completion.text

    assert isinstance(response_format.parse(asyncio.run(ask(None))), str)
    guided_reply = asyncio.run(ask(response_format.server_schema_json))
    assert isinstance(response_format.parse_value(guided_reply), Lighthouse)
