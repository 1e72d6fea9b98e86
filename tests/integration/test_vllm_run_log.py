"""The log of a read through a real vLLM server has the exact tokens and log-probs of the server."""

from __future__ import annotations

import asyncio

import httpx2
from test_reading import FACT, make_text

from memagent_graph import DocumentStore, MemAgent, OpenAICompatiblePolicy, RunLog, SamplingParams, load_tokenizer
from memagent_graph.run_log import Conversation
from memagent_graph.timeline.view import load_run_view
from memagent_training.serving.vllm_server import VLLMServer

CHUNKS = 700


async def rescore(client: httpx2.AsyncClient, server: VLLMServer, row: Conversation) -> list[float]:
    """Return the server's log-probs of a logged completion's ids after its prompt's ids."""
    body = {
        "model": "memagent-embedded",
        "prompt": [*row.prompt_token_ids, *row.token_ids],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    reply = await client.post(f"{server.base_url}/completions", json=body)
    reply.raise_for_status()
    scores_by_token = reply.json()["choices"][0]["prompt_logprobs"][len(row.prompt_token_ids) :]
    return [scores[str(token)]["logprob"] for scores, token in zip(scores_by_token, row.token_ids, strict=True)]


async def test_a_read_of_700_chunks_is_logged_exactly(embedded_server: VLLMServer, tmp_path) -> None:
    log, store = RunLog(tmp_path / "runs.sqlite"), DocumentStore(tmp_path / "documents")
    policy = OpenAICompatiblePolicy(base_url=embedded_server.base_url, policy_version="first edition")
    agent = MemAgent(policy, store=store, run_log=log)
    result = await agent.aread(make_text(256 * CHUNKS), FACT.question, run_id="r")
    context, tokenizer = await agent.aprepare(), load_tokenizer("embedded")
    rows = list(log.conversations("r"))
    view = load_run_view(log, "r", store)
    assert result.chunks_read >= CHUNKS
    assert len(rows) == result.chunks_read + 1 == result.usage.turns
    assert [update.memory for update in view.trace.updates] == [update.memory for update in result.updates]
    assert sum(row.prompt_tokens for row in rows) == result.usage.prompt_tokens
    gaps: list[float] = []
    slots = asyncio.Semaphore(32)

    async def check(row: Conversation, memory_before: str) -> None:
        assert row.has_ids
        assert row.policy_version == "first edition"
        assert len(row.prompt_token_ids) == row.prompt_tokens
        assert len(row.token_ids) == len(row.logprobs) == row.completion_tokens
        # The last id ends the turn and has no text.
        ids = list(row.token_ids[:-1] if row.finish_reason == "stop" else row.token_ids)
        assert tokenizer._backend.decode(ids, skip_special_tokens=False) == row.text
        if row.role == "update":
            chunk = store.read(result.document, row.span.start_byte, row.span.end_byte)
            messages = context.prompts.messages("update", FACT.question, memory=memory_before, chunk=chunk)
        else:
            messages = context.prompts.messages("answer", FACT.question, memory=memory_before)
        async with slots:
            completion = await policy.complete(messages, SamplingParams(max_tokens=1, logprobs=True))
            assert completion.prompt_token_ids == row.prompt_token_ids
            scores = await rescore(client, embedded_server, row)
        gaps.extend(abs(score - logprob) for score, logprob in zip(scores, row.logprobs, strict=True))

    memories = ["", *(update.memory for update in result.updates)]
    async with httpx2.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(check(row, memory) for row, memory in zip(rows, memories, strict=True)))
    assert len(gaps) == sum(row.completion_tokens for row in rows)
    assert max(gaps) < 1e-2
    await agent.aclose()
    log.close()
