"""Compare a corpus run with a bare request loop at 256 requests in flight, and measure peak memory.

A local server answers every request after two seconds, which is about the time that a good server needs to write a
memory. The bare loop only sends requests of the same size through the same HTTP client, with 256 documents in flight.
The corpus run also opens documents, cuts chunks, fills prompts, saves a checkpoint after every chunk, finds evidence,
writes its ledger and writes Parquet. The two take turns in the order A B B A. There are many short documents, so that
the end of a run, when few documents are left, has little weight.

Peak memory is measured in separate processes, which read a table of tiny documents with a policy that answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import generate_documents
from benchmarks.throughput import take_turns
from memagent_corpus import CorpusReader, TableFolder, open_inputs
from memagent_corpus.corpus_run import lock_table, run_corpus
from memagent_graph import (
    Budget,
    Completion,
    FinishReason,
    MemAgent,
    OpenAICompatiblePolicy,
    SamplingParams,
    load_prompts,
)
from memagent_graph.policy import Messages, TokenUsage

IN_FLIGHT: Final = 256
DOCUMENTS: Final = 1536
CHUNKS: Final = 2
CHUNK_TOKENS: Final = 1000
DELAY_MS: Final = 2000
FEW_DOCUMENTS, MANY_DOCUMENTS = 350, int(os.environ.get("MEMAGENT_BENCHMARK_DOCUMENTS", "10000"))
QUESTION: Final = "What does it say?"


async def read_table(table: Path, out: Path, policy: Any, *, chunk_tokens: int) -> int:
    """Read a table as `memagent corpus` does, and return the number of calls."""
    inputs, folder = open_inputs(str(table)), TableFolder(str(out))
    with lock_table(folder) as work_folder:
        agent = MemAgent(
            policy,
            tokenizer="embedded",
            budget=Budget(chunk_tokens=chunk_tokens),
            prompts=load_prompts(),
            store=work_folder / "documents",
            checkpoints=work_folder / "checkpoints.sqlite",
            run_log=False,
        )
        reader = CorpusReader(agent, [QUESTION], inputs.access)
        await run_corpus(inputs, reader, folder, documents_in_flight=IN_FLIGHT * 5 // 4)
        await reader.agent.aclose()
    return sum(row["usage"]["calls"] for row in folder.rows(["usage"]))


async def _compare(url: str, folder: Path) -> tuple[float, float]:
    """Return the ratio of the corpus run's rate to the bare loop's, and the run's CPU time in ms per request."""
    table = folder / "table.jsonl"
    texts = list(generate_documents(CHUNK_TOKENS * CHUNKS, DOCUMENTS))
    table.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run_count = 0

    async def run_table() -> int:
        nonlocal run_count
        run_count += 1
        policy = OpenAICompatiblePolicy("slow", base_url=url, max_concurrency=IN_FLIGHT)
        return await read_table(table, folder / f"out-{run_count}", policy, chunk_tokens=CHUNK_TOKENS)

    await run_table()
    calls_per_document = [row["usage"]["calls"] for row in TableFolder(str(folder / "out-1")).rows(["usage"])]
    prompts = load_prompts()
    messages = prompts.messages(
        "update", QUESTION, memory="what was kept " * 30, chunk=texts[0][: len(texts[0]) // CHUNKS]
    )
    body = {"model": "slow", "messages": messages, "max_tokens": 1024, "temperature": 0.0}

    async def run_bare_loop() -> int:
        slots = asyncio.Semaphore(IN_FLIGHT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as client:

            async def send_requests(count: int) -> None:
                async with slots:
                    for _ in range(count):
                        async with client.post(f"{url}/chat/completions", data=msgspec.json.encode(body)) as reply:
                            msgspec.json.decode(await reply.read())

            await asyncio.gather(*map(send_requests, calls_per_document))
        return sum(calls_per_document)

    ratio, _, cpu_ms = await take_turns(run_bare_loop, run_table, rounds=1)
    return ratio, cpu_ms


_MEMORY_PROGRAM: Final = """
import asyncio, sys
from pathlib import Path
from benchmarks.corpus import InstantPolicy, read_table
asyncio.run(read_table(Path(sys.argv[1]), Path(sys.argv[2]), InstantPolicy(), chunk_tokens=200))
status = Path("/proc/self/status").read_text()  # getrusage() may count the parent's peak
print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)
"""


class InstantPolicy:
    """A policy that returns a fixed text without waiting."""

    name = "at once"

    async def complete(self, prompt: Messages, sampling: SamplingParams) -> Completion:
        """Return a fixed memory or answer."""
        is_update = "<section>" in prompt[0]["content"]
        text = "kept" if is_update else "\\boxed{x}"
        return Completion(text, FinishReason.STOP, self.name, TokenUsage(100, 10))


def measure_peak_megabytes(document_count: int) -> float:
    """Return the peak memory, in MB, of a process that reads a table of tiny documents."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.jsonl"
        with table.open("w") as file:
            for index in range(document_count):
                file.write(json.dumps({"text": f"Document {index} says nothing much about anything."}) + "\n")
        command = [sys.executable, "-c", _MEMORY_PROGRAM, str(table), str(Path(folder) / "out")]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return float(process.stdout.split()[-1])


def measure() -> list[Figure]:
    """Return the figures on throughput, CPU time and peak memory."""
    with run_slow_server(DELAY_MS) as url, tempfile.TemporaryDirectory() as folder:
        ratio, cpu_ms = asyncio.run(_compare(url, Path(folder)))
    small_peak, large_peak = measure_peak_megabytes(FEW_DOCUMENTS), measure_peak_megabytes(MANY_DOCUMENTS)
    return [
        Figure.at_least(f"requests/s, corpus : bare loop, {IN_FLIGHT} in flight", ratio, "x", 0.9),
        Figure("corpus, CPU time per request", cpu_ms, "ms"),
        Figure(f"corpus of {FEW_DOCUMENTS:,} documents: peak memory", small_peak, "MB"),
        Figure(
            f"corpus of {MANY_DOCUMENTS:,} documents: peak memory",
            large_peak,
            "MB",
            "at most 60 more",
            large_peak - small_peak <= 60,
        ),
    ]
