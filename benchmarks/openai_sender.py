"""Compare the cost of the openai package's client with that of our sender: `python -m benchmarks openai_sender`.

The client uses its aiohttp transport and returns raw replies, which costs it least. Both senders read the same
documents and alternate as in `benchmarks.throughput`. benchmarks/RESULTS.md has the decision.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai

from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import generate_documents
from benchmarks.throughput import (
    CHUNK_TOKENS,
    CHUNKS,
    DELAY_MS,
    DOCUMENTS,
    make_pass,
    make_reader,
    take_turns,
)
from memagent_graph import Document, DocumentStore, MemAgent, OpenAICompatiblePolicy

_Result = TypeVar("_Result")


class _OpenAISender:
    """Replaces `sending.Sender`, with the methods that a read without faults needs."""

    def __init__(self, base_url: str) -> None:
        self.slots = asyncio.Semaphore(DOCUMENTS)
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key="none", max_retries=4, timeout=300.0, http_client=openai.DefaultAioHttpClient()
        )

    async def send(
        self, url: str, body: bytes | None, decode: Callable[[bytes], _Result], **_: Mapping[str, Any]
    ) -> tuple[_Result, int]:
        headers = {"Content-Type": "application/json"}
        if body is None:
            reply = await self._client.get(url, cast_to=httpx2.Response)
        else:
            reply = await self._client.post(url, cast_to=httpx2.Response, content=body, options={"headers": headers})
        return decode(reply.content), 0

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()


def _make_openai_reader(url: str, store: DocumentStore, *, logprobs: bool) -> MemAgent:
    reader = make_reader(url, store, logprobs=logprobs)
    policy = reader.policy
    assert isinstance(policy, OpenAICompatiblePolicy)
    connections: Any = policy._connections
    connections._make, connections._close = lambda: _OpenAISender(url), _OpenAISender.close
    return reader


async def _compare(url: str, logprobs: bool, folder: Path) -> tuple[float, float, float]:
    store = DocumentStore(folder)
    readers = make_reader(url, store, logprobs=logprobs), _make_openai_reader(url, store, logprobs=logprobs)
    texts = generate_documents(CHUNK_TOKENS * CHUNKS // 2, DOCUMENTS)
    references = [store.add(Document.from_text(text)) for text in texts]
    our_pass, openai_pass = (make_pass(reader, references) for reader in readers)
    await our_pass()
    await openai_pass()
    comparison = await take_turns(our_pass, openai_pass)
    for reader in readers:
        await reader.aclose()
    return comparison


def measure() -> list[Figure]:
    """Return the ratio of the openai client's rate to ours, and the processor time that it adds to a chunk."""
    figures = []
    for tokens in (0, 800):
        with run_slow_server(DELAY_MS, tokens) as url, tempfile.TemporaryDirectory() as folder:
            ratio, our_ms, openai_ms = asyncio.run(_compare(url, tokens > 0, Path(folder)))
        replies = f"{tokens} log-probs a reply" if tokens else "plain replies"
        setting = f"{DOCUMENTS} documents at {DELAY_MS} ms, {replies}"
        figures.append(Figure.at_least(f"chunks/s, openai client : our sender, {setting}", ratio, "x", 0.85))
        difference = openai_ms - our_ms
        figures.append(Figure.at_most(f"processor time that it adds to a chunk, {replies}", difference, "ms", 1.0))
    return figures
