"""Compares a corpus on Ray with the local engine at the same concurrency, and two actors with one. Needs `make ray`.

    .venv-ray/bin/python -m benchmarks corpus_on_ray

A local server answers every request after five seconds, so latency is the bottleneck. Rates are measured from the first
request to the last document. The time before the first request, when Ray starts its actors, is a separate figure. Each
actor has 128 documents in flight. All documents have the same length, so few actors are idle at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import throughput
from benchmarks.figures import Figure
from benchmarks.text import prose_of
from benchmarks.throughput import slow_server
from memagent_corpus import CorpusDocument, CorpusReader, CorpusRow, TableFolder, open_inputs
from memagent_corpus.corpus_run import CHECKPOINTS, lock_table, run_corpus
from memagent_corpus.on_ray import ActorPlan, RayEngine, connect
from memagent_corpus.source_access import CorpusSize
from memagent_graph.reader import MemAgent
from memagent_graph.settings import ReadSettings

PER_ACTOR: Final = int(os.environ.get("MEMAGENT_BENCHMARK_IN_FLIGHT", "128"))
WAVES: Final = 4
"""The number of documents, as a multiple of the documents in flight."""
CHUNKS: Final = 2
CHUNK_TOKENS: Final = 1000
DELAY_MS: Final = 5000
QUESTION: Final = "What does it say?"
_ACTOR: Final = b"ray::DocumentActor"


@dataclass
class Clock:
    """Measures a run; a `CorpusWatcher`. Times are in seconds of the monotonic clock."""

    began: float = 0.0
    first: float = float("inf")
    """The start of the first document: its end minus its duration."""
    last: float = 0.0
    """The end of the last document."""
    calls: int = 0

    def on_start(self, total: CorpusSize) -> None:
        self.began = time.monotonic()

    def on_skip(self, documents: int, size: int) -> None:
        return

    def on_document(self, document: CorpusDocument, rows: Sequence[CorpusRow]) -> None:
        self.last = time.monotonic()
        self.first = min(self.first, self.last - max(row.usage.seconds for row in rows))
        self.calls += sum(row.usage.calls for row in rows)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.calls / (self.last - self.first)


class ActorLoad(threading.Thread):
    """Samples the CPU time of all actor processes on this machine, in seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[int, float] = {}
        self._end = threading.Event()

    def run(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        while not self._end.wait(0.5):
            for folder in Path("/proc").iterdir():
                try:
                    if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(_ACTOR):
                        values = (folder / "stat").read_text().rpartition(")")[2].split()
                        self.seconds[int(folder.name)] = (int(values[11]) + int(values[12])) / ticks
                except (OSError, IndexError):
                    continue

    def stop(self) -> float:
        """Stop sampling, and return the total CPU time in seconds."""
        self._end.set()
        self.join()
        return sum(self.seconds.values())


async def read(table: Path, out: Path, settings: ReadSettings, actors: int) -> Clock:
    """Read a table with this number of actors on the connected cluster, or in this process if it is 0."""
    inputs, folder, clock = open_inputs(str(table)), TableFolder(str(out)), Clock()
    with ExitStack() as stack:
        work = stack.enter_context(lock_table(folder))
        checkpoints = str(work / CHECKPOINTS)
        engine: Any = None
        if actors:
            plan = ActorPlan(settings=settings, questions=(QUESTION,), access=inputs.access, checkpoints=checkpoints)
            engine = RayEngine(plan, actors, PER_ACTOR)
        agent = MemAgent(settings=settings, store=work / "documents", checkpoints=checkpoints, run_log=False)
        reader = CorpusReader(agent, [QUESTION], inputs.access)
        in_flight = settings.concurrency
        await run_corpus(inputs, reader, folder, engine=engine, documents_in_flight=in_flight, watcher=clock)
        await reader.aclose()
    return clock


def measure() -> list[Figure]:
    """Measure rates, CPU time, and the time until the first request."""
    throughput.DELAY_MS, default_delay = DELAY_MS, throughput.DELAY_MS
    try:
        with ExitStack() as stack:
            url = stack.enter_context(slow_server(0))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(connect("local", num_cpus=4, object_store_memory=200 * 2**20))
            return _figures(url, folder)
    finally:
        throughput.DELAY_MS = default_delay


def _figures(url: str, folder: Path) -> list[Figure]:
    texts = list(prose_of(CHUNK_TOKENS * CHUNKS, 2 * PER_ACTOR * WAVES))
    for name, count in (("one", len(texts) // 2), ("two", len(texts))):
        lines = (json.dumps({"text": text}) for text in texts[:count])
        (folder / f"{name}.jsonl").write_text("\n".join(lines))

    def settings(concurrency: int) -> ReadSettings:
        return ReadSettings(
            model="slow", base_url=url, tokenizer="embedded", chunk_tokens=CHUNK_TOKENS, concurrency=concurrency
        )

    start_time = time.process_time()
    core = asyncio.run(read(folder / "two.jsonl", folder / "core", settings(2 * PER_ACTOR), 0))
    core_cost = 1000 * (time.process_time() - start_time) / core.calls
    one_actor = asyncio.run(read(folder / "one.jsonl", folder / "ray-1", settings(PER_ACTOR), 1))
    load, start_time = ActorLoad(), time.process_time()
    load.start()
    two = asyncio.run(read(folder / "two.jsonl", folder / "ray-2", settings(PER_ACTOR), 2))
    driver, actors = time.process_time() - start_time, load.stop()
    wall = two.last - two.first
    ratio, growth, share = two.rate / core.rate, two.rate / one_actor.rate, actors / 2 / wall
    return [
        Figure(f"core, {2 * PER_ACTOR} in flight", core.rate, "requests/s", "", True),
        Figure(f"Ray, 2 actors with {PER_ACTOR} in flight each", two.rate, "requests/s", "", True),
        Figure("Ray : core", ratio, "x", ">= 0.8", ratio >= 0.8),
        Figure("2 actors : 1 actor", growth, "x", ">= 1.8", growth >= 1.8),
        Figure("CPU cores used by one actor", share, "", "< 0.3", share < 0.3),
        Figure("core, CPU time per request", core_cost, "ms", "", True),
        Figure("actors, CPU time per request", 1000 * actors / two.calls, "ms", "", True),
        Figure("driver, CPU time per request", 1000 * driver / two.calls, "ms", "", True),
        Figure("Ray, time until the first request", two.first - two.began, "s", "", True),
        Figure("load average of the machine at the end", os.getloadavg()[0], "", "", True),
    ]
