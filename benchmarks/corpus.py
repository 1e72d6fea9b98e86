"""A corpus against a bare loop over the same requests, with 256 in flight; and its memory from few to many documents.

A local server answers every request after two seconds, about as fast as a good server writes a memory. The bare loop
sends bodies of the same size through the same HTTP client, a document's one after another and 256 documents at once,
and does nothing else. The corpus opens documents, cuts chunks, fills prompts, saves a checkpoint at every chunk, finds
evidence, keeps its ledger and writes Parquet. They take turns in the order A B B A. Documents are short and many, so
that what is measured is not the end, where few are left.

Memory is that of processes that read tables of tiny documents with a policy that answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks import throughput
from benchmarks.figures import Figure
from benchmarks.text import prose_of
from benchmarks.throughput import slow_server, take_turns
from memagent_graph import (
    Budget,
    Completion,
    FinishReason,
    MemAgent,
    OpenAICompatiblePolicy,
    SamplingParams,
    load_prompts,
)
from memagent_graph.corpus import CorpusReader, TableFolder, open_inputs
from memagent_graph.corpus.corpus_run import exclusive, run_corpus
from memagent_graph.policy import Messages, TokenIds, TokenUsage

IN_FLIGHT: Final = 256
DOCUMENTS: Final = 1536
CHUNKS: Final = 2
CHUNK_TOKENS: Final = 1000
DELAY_MS: Final = 2000
FEW, MANY = 350, int(os.environ.get("MEMAGENT_BENCHMARK_DOCUMENTS", "10000"))
QUESTION: Final = "What is said of it?"


async def read_table(table: Path, out: Path, policy: Any, *, chunk_tokens: int) -> int:
    """Read a table as `memagent corpus` does; how many calls it took."""
    inputs, folder = open_inputs(str(table)), TableFolder(str(out))
    with exclusive(folder) as work:
        agent = MemAgent(
            policy,
            tokenizer="embedded",
            budget=Budget(chunk_tokens=chunk_tokens),
            prompts=load_prompts(),
            store=work / "documents",
            checkpoints=work / "checkpoints.sqlite",
            run_log=False,
        )
        reader = CorpusReader(agent, [QUESTION], inputs.access)
        await run_corpus(inputs, reader, folder, documents_in_flight=IN_FLIGHT * 5 // 4)
        await reader.aclose()
    return sum(row["usage"]["calls"] for row in folder.rows(["usage"]))


async def _compare(url: str, folder: Path) -> tuple[float, float]:
    """The corpus's rate over the bare loop's, and its processor milliseconds per request."""
    table = folder / "table.jsonl"
    texts = list(prose_of(CHUNK_TOKENS * CHUNKS, DOCUMENTS))
    table.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    runs = 0

    async def corpus() -> int:
        nonlocal runs
        runs += 1
        policy = OpenAICompatiblePolicy("slow", base_url=url, max_concurrency=IN_FLIGHT)
        return await read_table(table, folder / f"out-{runs}", policy, chunk_tokens=CHUNK_TOKENS)

    await corpus()
    turns = [row["usage"]["calls"] for row in TableFolder(str(folder / "out-1")).rows(["usage"])]
    prompts = load_prompts()
    messages = prompts.update_messages(QUESTION, "what was kept " * 30, texts[0][: len(texts[0]) // CHUNKS])
    body = {"model": "slow", "messages": messages, "max_tokens": 1024, "temperature": 0.0}

    async def bare() -> int:
        slots = asyncio.Semaphore(IN_FLIGHT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as client:

            async def one(count: int) -> None:
                async with slots:
                    for _ in range(count):
                        async with client.post(f"{url}/chat/completions", data=msgspec.json.encode(body)) as reply:
                            msgspec.json.decode(await reply.read())

            await asyncio.gather(*map(one, turns))
        return sum(turns)

    first: Callable[[], Awaitable[int]] = bare
    ratio, _, cost = await take_turns(first, corpus)
    return ratio, cost


_MEMORY: Final = """
import asyncio, resource, sys
from pathlib import Path
from benchmarks.corpus import AtOnce, read_table
asyncio.run(read_table(Path(sys.argv[1]), Path(sys.argv[2]), AtOnce(), chunk_tokens=200))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


class AtOnce:
    """A policy that costs nothing, and keeps nothing."""

    name = "at once"

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Write always the same."""
        is_update = "<section>" in prompt[0]["content"]  # type: ignore[index]
        text = "kept" if is_update else "\\boxed{x}"
        return Completion(text, FinishReason.STOP, self.name, TokenUsage(100, 10))


def peak_megabytes(documents: int) -> float:
    """The most memory of a process that reads a table of so many tiny documents."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.jsonl"
        with table.open("w") as file:
            for number in range(documents):
                file.write(json.dumps({"text": f"Document {number} says nothing much about anything."}) + "\n")
        command = [sys.executable, "-c", _MEMORY, str(table), str(Path(folder) / "out")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return float(done.stdout.split()[-1])


def measure() -> list[Figure]:
    """Throughput, processor time, and memory."""
    throughput.DELAY_MS, before, rounds = DELAY_MS, throughput.DELAY_MS, throughput.ROUNDS
    throughput.ROUNDS = 1
    try:
        with slow_server(0) as url, tempfile.TemporaryDirectory() as folder:
            ratio, cost = asyncio.run(_compare(url, Path(folder)))
    finally:
        throughput.DELAY_MS, throughput.ROUNDS = before, rounds
    few, many = peak_megabytes(FEW), peak_megabytes(MANY)
    return [
        Figure(f"requests/s, corpus : bare loop, {IN_FLIGHT} in flight", ratio, "x", ">= 0.9", ratio >= 0.9),
        Figure("corpus, processor time per request", cost, "ms", "", True),
        Figure(f"corpus of {FEW:,} documents: peak memory", few, "MB", "", True),
        Figure(f"corpus of {MANY:,} documents: peak memory", many, "MB", "at most 60 more", many - few <= 60),
    ]
