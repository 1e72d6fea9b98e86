"""What a million documents cost: `python -m benchmarks.corpus_cost`, and `--measure` for this machine's share of it.

The GPUs' part is simulated (`benchmarks.cluster_simulation`), from figures that are published and were not measured
here: the arithmetic and memory bandwidth of an H100 SXM (NVIDIA's data sheet) and the shape of Qwen2.5-7B (its
config.json). A part of the cluster is simulated with as many documents as keep it busy, and what it does in a second is
scaled to all GPUs and documents. The client's part was measured; `--measure` and `python -m benchmarks corpus` do it
again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.cluster_simulation import Operation, Outcome, Replica, Workload, simulate
from memagent_graph.corpus.corpus_ledger import CorpusLedger
from memagent_graph.corpus.corpus_rows import Row, RowUsage
from memagent_graph.storage.checkpoints import open_saver

TURNOVER: Final = 4
"""Documents that are simulated, as a multiple of those in flight."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU and a model, as published."""

    flops: float = 989e12
    """Dense BF16 operations a second: H100 SXM, NVIDIA's data sheet."""
    efficiency: float = 0.5
    """The share of it that a server reaches while it reads prompts: assumed."""
    bandwidth: float = 3.35e12
    """Bytes a second: the same data sheet."""
    memory: float = 80e9
    usable: float = 0.9
    """vLLM's default for --gpu-memory-utilization."""
    parameters: float = 7.6e9
    """Qwen2.5-7B-Instruct, the model card; 2 bytes each."""
    cache_bytes_per_token: float = 2 * 28 * 4 * 128 * 2
    """Key and value, 28 layers, 4 key-value heads of 128, 2 bytes: its config.json."""

    def replica(self, tokens_per_sequence: float) -> Replica:
        """One GPU with the model, for sequences of this length."""
        room = self.memory * self.usable - 2 * self.parameters
        cache = tokens_per_sequence * self.cache_bytes_per_token
        return Replica(
            tokens_per_second=self.flops * self.efficiency / (2 * self.parameters),
            weights_seconds=2 * self.parameters / self.bandwidth,
            sequence_seconds=cache / self.bandwidth,
            batch=max(1, int(room // cache)),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    name: str
    workload: Workload
    operation: Operation


@dataclass(frozen=True, slots=True)
class Cost:
    """A setting, scaled to all documents and GPUs."""

    name: str
    hours: float
    gpu_hours: float
    requests: float
    requests_per_second: float
    computed: float
    """Prompt tokens that are computed, not taken from a prefix cache."""
    written: float
    busy: float
    median_seconds: float
    p99_seconds: float
    repeated: float
    """Share of the requests that were sent again."""


def settings_of(workload: Workload, operation: Operation) -> list[Setting]:
    """The table's rows."""
    eight = replace(workload, questions=8)
    half = replace(operation, requests_in_flight=operation.requests_in_flight // 4)
    faulty = replace(
        operation, hours_between_failures=2.0, hours_between_kills=1.0, slow_share=1 / 8, slow_rate=0.5
    )  # far more often than a real cluster, so that a short simulation has some
    return [
        Setting("overwrite, 1 question", workload, operation),
        Setting("overwrite, 1 question, a quarter of the requests in flight", workload, half),
        Setting("gated, 1 question", replace(workload, strategy="gated"), operation),
        Setting("segments of 8, 1 question", replace(workload, strategy="segments"), operation),
        Setting("parallel, 1 question", replace(workload, strategy="parallel"), operation),
        Setting("overwrite, 8 questions", eight, operation),
        Setting("overwrite, 8 questions, no prefix cache", replace(eight, shares_sections=False), operation),
        Setting("gated, 8 questions", replace(eight, strategy="gated"), operation),
        Setting("overwrite, 1 question, with failures", workload, faulty),
    ]


def cost_of(setting: Setting, hardware: Hardware, documents: int, gpus: int) -> Cost:
    """Simulate a part, and scale it."""
    workload, operation = setting.workload, setting.operation
    sequence = workload.chunk_tokens + 2 * workload.memory_tokens + workload.frame_tokens
    at_once = workload.questions * (workload.segments if workload.strategy == "segments" else 1)
    if workload.strategy == "parallel":
        at_once *= max(1, round(workload.mean_tokens / workload.chunk_tokens))
    part = max(64, TURNOVER * operation.requests_in_flight // at_once)
    outcome = simulate(hardware.replica(sequence), replace(workload, documents=part), operation)
    return scaled(setting.name, outcome, part, documents, gpus / operation.replicas, gpus)


def scaled(name: str, outcome: Outcome, part: int, documents: int, times: float, gpus: int) -> Cost:
    """The simulated part's figures for all documents on all GPUs."""
    seconds = documents / (outcome.rate * times)
    share = documents / part
    ordered = statistics.quantiles(outcome.latencies, n=100)
    return Cost(
        name=name,
        hours=seconds / 3600,
        gpu_hours=seconds / 3600 * gpus,
        requests=outcome.served * share,
        requests_per_second=outcome.served * share / seconds,
        computed=outcome.computed_tokens * share,
        written=outcome.written_tokens * share,
        busy=outcome.busy,
        median_seconds=ordered[49],
        p99_seconds=ordered[98],
        repeated=outcome.repeated / outcome.served,
    )


def alone_hours(workload: Workload, hardware: Hardware) -> float:
    """How long the longest document takes with a GPU to itself: nothing ends the run sooner than that."""
    replica = hardware.replica(workload.chunk_tokens)
    alone = replace(workload, documents=1, mean_tokens=workload.longest, spread=0.0, questions=1)
    return simulate(replica, alone, Operation(1, 1)).seconds / 3600


def table_of(costs: Sequence[Cost], client_ms: float, price: float | None) -> str:
    """The rows as Markdown."""
    head = ["setting", "days", "GPU hours", "requests, millions", "requests/s", "prompt tokens computed, billions",
            "tokens written, billions", "request, median and p99 s", "client cores", "sent again"]  # fmt: skip
    head += ["price"] if price else []
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for each in costs:
        line = [each.name, f"{each.hours / 24:.1f}", f"{each.gpu_hours:,.0f}", f"{each.requests / 1e6:,.0f}",
                f"{each.requests_per_second:,.0f}", f"{each.computed / 1e9:,.0f}", f"{each.written / 1e9:,.1f}",
                f"{each.median_seconds:.0f}, {each.p99_seconds:.0f}",
                f"{each.requests_per_second * client_ms / 1000:.1f}", f"{each.repeated:.2%}"]  # fmt: skip
        lines.append(line + ([f"{each.gpu_hours * price:,.0f}"] if price else []))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# What this machine does


async def _checkpoints(seconds: float, reads: int = 256) -> tuple[float, float]:
    """Checkpoints a second of so many reads at once, each of the size of a read's, and bytes for one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints.sqlite"
        saver = await open_saver(path)
        assert saver is not None
        saved, end = 0, time.monotonic() + seconds
        memory = "what was kept of the document so far, some hundreds of words of it. " * 40

        async def read(number: int) -> None:
            nonlocal saved
            while time.monotonic() < end:
                saved += 1
                values = {"memory": f"{saved} {memory}", "question": "What is said of it?"}
                identity = f"{saved:036d}"
                checkpoint = {"v": 4, "id": identity, "ts": "", "channel_values": values, "channel_versions": {},
                              "versions_seen": {}, "updated_channels": None}  # fmt: skip
                config = {"configurable": {"thread_id": str(number), "checkpoint_ns": ""}}
                await saver.aput(config, checkpoint, {}, {})  # type: ignore[arg-type]

        began = time.monotonic()
        await asyncio.gather(*(read(number) for number in range(reads)))
        rate = saved / (time.monotonic() - began)
        await saver.conn.close()  # type: ignore[attr-defined]
        return rate, sum(each.stat().st_size for each in path.parent.iterdir()) / saved


def _ledger(seconds: float, questions: int) -> float:
    """Documents a second of the ledger, each with so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = CorpusLedger(Path(folder) / "ledger.sqlite")
        done, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            name = f"folder/document-{done}.txt"
            rows = [
                Row(
                    id=f"{done}-{number}", document=name, digest="0" * 64,
                    question=f"What is said of it, {number}?", answer="The answer.", memory="kept " * 300,
                    usage=RowUsage(1, 1, 0, 1, 1.0),
                )
                for number in range(questions)
            ]  # fmt: skip
            ledger.begin(name)
            ledger.finish(name, "1", rows)
            done += 1
        rate = done / (time.monotonic() - began)
        ledger.close()
        return rate


def _print_measured(seconds: float) -> None:
    rate, size = asyncio.run(_checkpoints(seconds))
    print(f"checkpoints of 256 reads at once: {rate:,.0f} a second, {size / 1000:.1f} kB each")
    for questions in (1, 8):
        print(f"ledger, {questions} rows a document: {_ledger(seconds, questions):,.0f} documents a second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus_cost", description=__doc__)
    workload, hardware = Workload(1_000_000), Hardware()
    parser.add_argument("--documents", type=int, default=workload.documents, help="documents (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=64, help="GPUs, one replica each (default: %(default)s)")
    parser.add_argument("--simulated", type=int, default=8, help="replicas that are simulated (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=160, help="requests in flight a GPU (default: %(default)s)")
    for name in ("mean_tokens", "spread", "longest", "chunk_tokens", "memory_tokens"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(workload, name), help="workload")
    for name, value in asdict(hardware).items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=value, help="hardware and model")
    parser.add_argument("--client-ms", type=float, default=3.5, help="client's processor time for a request")
    parser.add_argument("--price", type=float, help="price of a GPU hour, for a column")
    parser.add_argument("--measure", action="store_true", help="measure ledger and checkpoints on this machine instead")
    given = parser.parse_args(arguments)
    if given.measure:
        _print_measured(3.0)
        return
    workload = Workload(
        given.documents, given.mean_tokens, given.spread, given.longest, chunk_tokens=int(given.chunk_tokens),
        memory_tokens=int(given.memory_tokens),
    )  # fmt: skip
    hardware = Hardware(**{name: getattr(given, name) for name in asdict(hardware)})
    operation = Operation(given.simulated, given.in_flight * given.simulated)
    costs = [cost_of(each, hardware, given.documents, given.gpus) for each in settings_of(workload, operation)]
    print(table_of(costs, given.client_ms, given.price))
    print(f"\nThe longest document ({workload.longest:,.0f} tokens) alone: {alone_hours(workload, hardware):.2f} hours")


if __name__ == "__main__":
    main()
