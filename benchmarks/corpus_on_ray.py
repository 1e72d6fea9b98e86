"""Compare a corpus on Ray with the local engine at the same concurrency, and two actors with one. Needs `make ray`.

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

from benchmarks.figures import Figure
from benchmarks.slow_server import run_slow_server
from benchmarks.text import generate_documents
from memagent_corpus import CorpusDocument, CorpusReader, CorpusRow, TableFolder, open_inputs
from memagent_corpus.corpus_run import CHECKPOINTS_FILE, lock_table, run_corpus
from memagent_corpus.on_ray import ActorPlan, RayEngine, connect
from memagent_corpus.source_access import CorpusSize
from memagent_graph.reader import MemAgent
from memagent_graph.settings import ReadSettings

IN_FLIGHT_PER_ACTOR: Final = int(os.environ.get("MEMAGENT_BENCHMARK_IN_FLIGHT", "128"))
DOCUMENTS_PER_SLOT: Final = 4
"""The ratio of documents to documents in flight."""
CHUNKS: Final = 2
CHUNK_TOKENS: Final = 1000
DELAY_MS: Final = 5000
QUESTION: Final = "What does it say?"
_ACTOR_PROCESS: Final = b"ray::DocumentActor"


@dataclass
class RunClock:
    """Follows a run and measures it. Times are in seconds of the monotonic clock."""

    run_start: float = 0.0
    first_start: float = float("inf")
    """The start of the first document: its end minus its duration."""
    last_end: float = 0.0
    """The end of the last document."""
    calls: int = 0
    """The requests of all documents."""

    def on_start(self, total: CorpusSize) -> None:
        self.run_start = time.monotonic()

    def on_skip(self, documents: int, size: int) -> None:
        return

    def on_document(self, document: CorpusDocument, rows: Sequence[CorpusRow]) -> None:
        self.last_end = time.monotonic()
        self.first_start = min(self.first_start, self.last_end - max(row.usage.seconds for row in rows))
        self.calls += sum(row.usage.calls for row in rows)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.calls / (self.last_end - self.first_start)


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
                    if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(_ACTOR_PROCESS):
                        values = (folder / "stat").read_text().rpartition(")")[2].split()
                        self.seconds[int(folder.name)] = (int(values[11]) + int(values[12])) / ticks
                except (OSError, IndexError):
                    continue

    def stop(self) -> float:
        """Stop sampling, and return the total CPU time in seconds."""
        self._end.set()
        self.join()
        return sum(self.seconds.values())


async def read_with_actors(table: Path, out: Path, settings: ReadSettings, actors: int) -> RunClock:
    """Read a table with this many actors on the connected cluster, or in this process if there are 0."""
    inputs, folder, clock = open_inputs(str(table)), TableFolder(str(out)), RunClock()
    with ExitStack() as stack:
        work = stack.enter_context(lock_table(folder))
        checkpoints = str(work / CHECKPOINTS_FILE)
        engine: Any = None
        if actors:
            plan = ActorPlan(settings=settings, questions=(QUESTION,), access=inputs.access, checkpoints=checkpoints)
            engine = RayEngine(plan, actors, IN_FLIGHT_PER_ACTOR)
        agent = MemAgent(settings=settings, store=work / "documents", checkpoints=checkpoints, run_log=False)
        reader = CorpusReader(agent, [QUESTION], inputs.access)
        in_flight = settings.concurrency
        await run_corpus(inputs, reader, folder, engine=engine, documents_in_flight=in_flight, watcher=clock)
        await reader.agent.aclose()
    return clock


def measure() -> list[Figure]:
    """Return the figures on rates, CPU time, and the time until the first request."""
    with ExitStack() as stack:
        url = stack.enter_context(run_slow_server(DELAY_MS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(connect("local", num_cpus=4, object_store_memory=200 * 2**20))
        return _measure_on_cluster(url, folder)


def _measure_on_cluster(url: str, folder: Path) -> list[Figure]:
    texts = list(generate_documents(CHUNK_TOKENS * CHUNKS, 2 * IN_FLIGHT_PER_ACTOR * DOCUMENTS_PER_SLOT))
    for name, count in (("half", len(texts) // 2), ("all", len(texts))):
        lines = (json.dumps({"text": text}) for text in texts[:count])
        (folder / f"{name}.jsonl").write_text("\n".join(lines))

    def make_settings(concurrency: int) -> ReadSettings:
        return ReadSettings(
            model="slow", base_url=url, tokenizer="embedded", chunk_tokens=CHUNK_TOKENS, concurrency=concurrency
        )

    start_time = time.process_time()
    local_clock = asyncio.run(
        read_with_actors(folder / "all.jsonl", folder / "local", make_settings(2 * IN_FLIGHT_PER_ACTOR), 0)
    )
    local_ms = 1000 * (time.process_time() - start_time) / local_clock.calls
    one_actor_clock = asyncio.run(
        read_with_actors(folder / "half.jsonl", folder / "ray-1", make_settings(IN_FLIGHT_PER_ACTOR), 1)
    )
    actor_load, start_time = ActorLoad(), time.process_time()
    actor_load.start()
    two_actor_clock = asyncio.run(
        read_with_actors(folder / "all.jsonl", folder / "ray-2", make_settings(IN_FLIGHT_PER_ACTOR), 2)
    )
    driver_seconds, actor_seconds = time.process_time() - start_time, actor_load.stop()
    wall_seconds = two_actor_clock.last_end - two_actor_clock.first_start
    ray_ratio, speedup = two_actor_clock.rate / local_clock.rate, two_actor_clock.rate / one_actor_clock.rate
    cores_per_actor = actor_seconds / 2 / wall_seconds
    return [
        Figure(f"core, {2 * IN_FLIGHT_PER_ACTOR} in flight", local_clock.rate, "requests/s"),
        Figure(f"Ray, 2 actors with {IN_FLIGHT_PER_ACTOR} in flight each", two_actor_clock.rate, "requests/s"),
        Figure.at_least("Ray : core", ray_ratio, "x", 0.8),
        Figure.at_least("2 actors : 1 actor", speedup, "x", 1.8),
        Figure.below("CPU cores used by one actor", cores_per_actor, "", 0.3),
        Figure("core, CPU time per request", local_ms, "ms"),
        Figure("actors, CPU time per request", 1000 * actor_seconds / two_actor_clock.calls, "ms"),
        Figure("driver, CPU time per request", 1000 * driver_seconds / two_actor_clock.calls, "ms"),
        Figure("Ray, time until the first request", two_actor_clock.first_start - two_actor_clock.run_start, "s"),
        Figure("load average of the machine at the end", os.getloadavg()[0]),
    ]
