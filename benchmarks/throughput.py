"""Chunks per second and processor time per chunk with 128 documents in flight, against a bare loop.

A local server answers every request after 250 ms. The bare loop sends the same bodies through the same HTTP client,
decodes the replies as JSON, and does nothing else; the reader also reads the documents from its store, cuts chunks,
fills prompts, and runs the graph. It decodes only the fields it uses, which with 800 log-probs a reply makes it faster
than the bare loop. Both take turns, three times each; medians are compared.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai

from benchmarks.figures import Figure
from benchmarks.text import prose_of
from memagent_graph import (
    Budget,
    Document,
    DocumentRef,
    DocumentStore,
    MemAgent,
    OpenAICompatiblePolicy,
    SamplingParams,
)
from memagent_graph.prompts import load_prompts

DOCUMENTS = 128
CHUNKS = 24
DELAY_MS = 250
CHUNK_TOKENS = 1000


@contextmanager
def slow_server(tokens: int) -> Any:
    """The base URL of a server whose replies carry `tokens` ids and log-probs."""
    command = [sys.executable, "-m", "benchmarks.slow_server", str(DELAY_MS), str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            assert process.stdin is not None
            process.stdin.close()


async def measure_one(run: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """Chunks per second, and processor milliseconds per chunk, of one pass over all documents."""
    wall, processor = time.perf_counter(), time.process_time()
    chunks = await run()
    return chunks / (time.perf_counter() - wall), 1000 * (time.process_time() - processor) / chunks


async def compare(url: str, logprobs: bool, folder: Path) -> tuple[float, float]:
    """Median of the reader's rate over the bare loop's, and the reader's processor milliseconds per chunk."""
    store = DocumentStore(folder)
    reader = MemAgent(
        OpenAICompatiblePolicy("slow", base_url=url),
        tokenizer="embedded",
        budget=Budget(chunk_tokens=CHUNK_TOKENS),
        prompts=load_prompts(),
        sampling=SamplingParams(logprobs=logprobs, seed=1),
        store=store,
        run_log=False,
    )
    if logprobs:
        reader.policy._served = {"id": "slow", "owned_by": "vllm"}  # type: ignore[attr-defined]
    references = [store.add(Document.from_text(text)) for text in prose_of(CHUNK_TOKENS * CHUNKS, DOCUMENTS)]
    client = openai.AsyncOpenAI(
        base_url=url, api_key="none", http_client=openai.DefaultAioHttpClient(limits=httpx2.Limits(max_connections=160))
    )
    bodies = [_body(reader, await reader.aprepare(), reference, logprobs) for reference in references]

    async def with_reader() -> int:
        results = await asyncio.gather(*(reader.aread(reference, "What is said of it?") for reference in references))
        return sum(result.usage.turns for result in results)

    async def one_document(body: dict[str, Any], turns: int) -> None:
        for _ in range(turns):
            reply = await client.post("/chat/completions", body=body, cast_to=httpx2.Response)
            msgspec.json.decode(reply.content)

    turns = [result.usage.turns for result in await asyncio.gather(*(reader.aread(each, "?") for each in references))]

    async def bare() -> int:
        await asyncio.gather(*(one_document(body, n) for body, n in zip(bodies, turns, strict=True)))
        return sum(turns)

    await bare()
    ratios, costs = [], []
    for _ in range(3):
        bare_rate, _ = await measure_one(bare)
        rate, cost = await measure_one(with_reader)
        ratios.append(rate / bare_rate)
        costs.append(cost)
    await client.close()
    await reader.aclose()
    return statistics.median(ratios), statistics.median(costs)


def _body(reader: MemAgent, context: Any, reference: DocumentRef, logprobs: bool) -> dict[str, Any]:
    """A request like the reader's own."""
    size = reference["size"] or 0
    chunk = reader.store.read(reference, 0, size // CHUNKS)
    messages = context.prompts.update_messages("What is said of it?", "what was kept " * 30, chunk)
    body: dict[str, Any] = {"model": "slow", "messages": messages, "max_tokens": 1024, "temperature": 0.0}
    return {**body, "logprobs": True, "return_token_ids": True} if logprobs else body


def measure() -> list[Figure]:
    """Both comparisons, without and with 800 ids and log-probs per reply."""
    figures = []
    for tokens, bound in ((0, 2.5), (800, 6.0)):
        with slow_server(tokens) as url, tempfile.TemporaryDirectory() as folder:
            ratio, cost = asyncio.run(compare(url, tokens > 0, Path(folder)))
        replies = f"{tokens} log-probs a reply" if tokens else "plain replies"
        figures.append(
            Figure(
                f"chunks/s, reader : bare loop, {DOCUMENTS} documents, {replies}", ratio, "x", ">= 0.9", ratio >= 0.9
            )
        )
        figures.append(Figure(f"processor time per chunk, {replies}", cost, "ms", f"<= {bound}", cost <= bound))
    return figures
