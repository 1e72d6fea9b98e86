"""Compare the reader with a bare request loop, with 128 documents in flight: chunks per second and processor time.

A local server answers every request after 250 ms. The bare loop sends the same bodies through the same HTTP client,
aiohttp, and decodes the replies as JSON. The reader also reads the documents from its store, cuts chunks, fills prompts
and runs the graph, but decodes only the fields that it uses. The two take turns in the order A B B A, so that a machine
that becomes slower or faster favours neither. The median of several such rounds counts.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import msgspec

from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import generate_documents
from memagent_graph import (
    Budget,
    Document,
    DocumentRef,
    DocumentStore,
    MemAgent,
    OpenAICompatiblePolicy,
    RunLog,
    SamplingParams,
)
from memagent_graph.prompts import load_prompts
from memagent_graph.reading.state import ReaderContext

DOCUMENTS = 128
CHUNKS = 24
DELAY_MS = 250
CHUNK_TOKENS = 1000

Pass: TypeAlias = Callable[[], Awaitable[int]]


async def take_turns(first: Pass, second: Pass, rounds: int = 3) -> tuple[float, float, float]:
    """Run two passes alternately; a pass reads all documents, and returns the number of chunks.

    Args:
        first: a pass.
        second: the other pass.
        rounds: the number of rounds, in each of which both run twice.

    Returns:
        the ratio of chunks per second, second to first, and the processor milliseconds per chunk of the first and of
        the second; all are medians.
    """
    ratios: list[float] = []
    processor_ms: dict[Pass, list[float]] = {first: [], second: []}
    for _ in range(rounds):
        seconds_per_chunk = {first: 0.0, second: 0.0}
        for read_pass in (first, second, second, first):
            start_time, processor_start = time.perf_counter(), time.process_time()
            chunks = await read_pass()
            seconds_per_chunk[read_pass] += (time.perf_counter() - start_time) / chunks
            processor_ms[read_pass].append(1000 * (time.process_time() - processor_start) / chunks)
        ratios.append(seconds_per_chunk[first] / seconds_per_chunk[second])
    return statistics.median(ratios), statistics.median(processor_ms[first]), statistics.median(processor_ms[second])


def make_reader(url: str, store: DocumentStore, *, logprobs: bool, run_log: RunLog | bool = False) -> MemAgent:
    """Return a reader of the slow server; with `logprobs` it treats the server as vLLM."""
    policy = OpenAICompatiblePolicy("slow", base_url=url)
    if logprobs:
        policy._model_entry = {"id": "slow", "owned_by": "vllm"}
    return MemAgent(
        policy,
        tokenizer="embedded",
        budget=Budget(chunk_tokens=CHUNK_TOKENS),
        prompts=load_prompts(),
        sampling=SamplingParams(logprobs=logprobs, seed=1),
        store=store,
        run_log=run_log,
    )


def make_pass(reader: MemAgent, references: Sequence[DocumentRef]) -> Pass:
    """Return a pass that reads all documents at once."""

    async def read_all() -> int:
        results = await asyncio.gather(*(reader.aread(reference, "What is said of it?") for reference in references))
        return sum(result.usage.turns for result in results)

    return read_all


async def _compare(url: str, logprobs: bool, folder: Path) -> tuple[float, float]:
    """Return the ratio of the reader's rate to the bare loop's, and the reader's processor milliseconds per chunk."""
    store = DocumentStore(folder)
    reader = make_reader(url, store, logprobs=logprobs)
    texts = list(generate_documents(CHUNK_TOKENS * CHUNKS, DOCUMENTS))
    references = [store.add(Document.from_text(text)) for text in texts]
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=DOCUMENTS))
    context = await reader.aprepare()
    bodies = [_make_body(context, text[: len(text) // CHUNKS], logprobs) for text in texts]

    async def send_chunks(body: dict[str, Any], turn_count: int) -> None:
        for _ in range(turn_count):
            async with client.post(f"{url}/chat/completions", data=msgspec.json.encode(body)) as reply:
                msgspec.json.decode(await reply.read())

    turn_counts = [
        result.usage.turns
        for result in await asyncio.gather(*(reader.aread(reference, "?") for reference in references))
    ]

    async def run_bare_loop() -> int:
        await asyncio.gather(
            *(send_chunks(body, turn_count) for body, turn_count in zip(bodies, turn_counts, strict=True))
        )
        return sum(turn_counts)

    await run_bare_loop()
    ratio, _, processor_ms = await take_turns(run_bare_loop, make_pass(reader, references))
    await client.close()
    await reader.aclose()
    return ratio, processor_ms


def _make_body(context: ReaderContext, chunk: str, logprobs: bool) -> dict[str, Any]:
    """Return the body of a request like the reader's own."""
    messages = context.prompts.messages("update", "What is said of it?", memory="what was kept " * 30, chunk=chunk)
    body: dict[str, Any] = {"model": "slow", "messages": messages, "max_tokens": 1024, "temperature": 0.0}
    return {**body, "logprobs": True, "return_token_ids": True} if logprobs else body


def measure() -> list[Figure]:
    """Return the figures of replies without log-probs, and with 800 ids and log-probs."""
    figures = []
    for tokens, max_ms in ((0, 2.5), (800, 6.0)):
        with run_slow_server(DELAY_MS, tokens) as url, tempfile.TemporaryDirectory() as folder:
            ratio, processor_ms = asyncio.run(_compare(url, tokens > 0, Path(folder)))
        replies = f"{tokens} log-probs a reply" if tokens else "plain replies"
        figures.append(
            Figure.at_least(f"chunks/s, reader : bare loop, {DOCUMENTS} documents, {replies}", ratio, "x", 0.9)
        )
        figures.append(Figure.at_most(f"processor time per chunk, {replies}", processor_ms, "ms", max_ms))
    return figures
