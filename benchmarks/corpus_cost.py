"""Estimate the cost of reading a million documents: `python -m benchmarks.corpus_cost`.

The GPUs are simulated (`benchmarks.cluster_simulation`) from published figures, not measurements: the compute and
memory bandwidth of an H100 SXM (NVIDIA's data sheet) and the architecture of Qwen2.5-7B (its config.json). The
simulation runs a part of the cluster with enough documents to keep it busy, and the rate is scaled to all GPUs and
documents. The client's cost was measured. `--measure` and `python -m benchmarks corpus` repeat the measurement on this
machine.
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
from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_rows import CorpusRow, RowUsage
from memagent_graph.storage.checkpoints import open_checkpointer

TURNOVER: Final = 4
"""The ratio of simulated documents to documents in flight."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Published figures of a GPU and a model."""

    flops: float = 989e12
    """Dense BF16 FLOP/s of an H100 SXM (NVIDIA's data sheet)."""
    efficiency: float = 0.5
    """The share of `flops` that a server reaches during prefill (assumed)."""
    bandwidth: float = 3.35e12
    """Memory bandwidth in bytes per second (NVIDIA's data sheet)."""
    memory: float = 80e9
    usable: float = 0.9
    """vLLM's default for --gpu-memory-utilization."""
    parameters: float = 7.6e9
    """Parameters of Qwen2.5-7B-Instruct (model card), 2 bytes each."""
    cache_bytes_per_token: float = 2 * 28 * 4 * 128 * 2
    """Keys and values, 28 layers, 4 key-value heads of size 128, 2 bytes each (config.json)."""

    def make_replica(self, workload: Workload) -> Replica:
        """Return one GPU with the model, for sequences of a chunk, the memory before and after it, and the frame."""
        cache_memory = self.memory * self.usable - 2 * self.parameters
        tokens_per_sequence = workload.chunk_tokens + 2 * workload.memory_tokens + workload.frame_tokens
        cache = tokens_per_sequence * self.cache_bytes_per_token
        return Replica(
            tokens_per_second=self.flops * self.efficiency / (2 * self.parameters),
            weights_seconds=2 * self.parameters / self.bandwidth,
            sequence_seconds=cache / self.bandwidth,
            batch=max(1, int(cache_memory // cache)),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    name: str
    workload: Workload
    operation: Operation


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a setting, scaled to all documents and GPUs."""

    name: str
    hours: float
    gpu_hours: float
    requests: float
    requests_per_second: float
    computed_tokens: float
    """Prompt tokens that are computed; the others come from a prefix cache."""
    reply_tokens: float
    median_seconds: float
    p99_seconds: float
    repeat_share: float
    """The share of requests that were sent again."""


def collect_settings(workload: Workload, operation: Operation) -> list[Setting]:
    """Return the settings of the table's rows."""
    eight_questions = replace(workload, questions=8)
    fewer_in_flight = replace(operation, requests_in_flight=operation.requests_in_flight // 4)
    with_failures = replace(
        operation, hours_between_failures=2.0, hours_between_kills=1.0, slow_share=1 / 8, slow_rate=0.5
    )  # much more often than in a real cluster, so that a short simulation has some
    return [
        Setting("overwrite, 1 question", workload, operation),
        Setting("overwrite, 1 question, a quarter of the requests in flight", workload, fewer_in_flight),
        Setting("gated, 1 question", replace(workload, strategy="gated"), operation),
        Setting("segments of 8, 1 question", replace(workload, strategy="segments"), operation),
        Setting("parallel, 1 question", replace(workload, strategy="parallel"), operation),
        Setting("overwrite, 8 questions", eight_questions, operation),
        Setting("overwrite, 8 questions, no prefix cache", replace(eight_questions, shares_sections=False), operation),
        Setting("gated, 8 questions", replace(eight_questions, strategy="gated"), operation),
        Setting("overwrite, 1 question, with failures", workload, with_failures),
    ]


def estimate_cost(setting: Setting, hardware: Hardware, documents: int, gpus: int) -> Cost:
    """Simulate a part of the documents on a part of the cluster, and scale the result."""
    workload, operation = setting.workload, setting.operation
    simulated_documents = max(64, TURNOVER * operation.requests_in_flight // workload.requests_at_once)
    outcome = simulate(hardware.make_replica(workload), replace(workload, documents=simulated_documents), operation)
    return scale_outcome(setting.name, outcome, simulated_documents, documents, gpus / operation.replicas, gpus)


def scale_outcome(
    name: str, outcome: Outcome, simulated_documents: int, documents: int, cluster_factor: float, gpus: int
) -> Cost:
    """Scale the outcome of a simulation to all documents and GPUs.

    Args:
        name: the setting's name.
        outcome: the outcome of the simulation.
        simulated_documents: the number of simulated documents.
        documents: the number of all documents.
        cluster_factor: the number of all GPUs, divided by the number of simulated ones.
        gpus: the number of all GPUs.
    """
    seconds = documents / (outcome.documents_per_second * cluster_factor)
    document_factor = documents / simulated_documents
    percentiles = statistics.quantiles(outcome.latencies, n=100)
    return Cost(
        name=name,
        hours=seconds / 3600,
        gpu_hours=seconds / 3600 * gpus,
        requests=outcome.requests * document_factor,
        requests_per_second=outcome.requests * document_factor / seconds,
        computed_tokens=outcome.computed_tokens * document_factor,
        reply_tokens=outcome.reply_tokens * document_factor,
        median_seconds=percentiles[49],
        p99_seconds=percentiles[98],
        repeat_share=outcome.repeats / outcome.requests,
    )


def estimate_longest_document_hours(workload: Workload, hardware: Hardware) -> float:
    """Return the hours that the longest document needs alone on a GPU; no run can be shorter."""
    replica = hardware.make_replica(workload)
    one_document = replace(workload, documents=1, mean_tokens=workload.longest, spread=0.0, questions=1)
    return simulate(replica, one_document, Operation(1, 1)).seconds / 3600


def format_table(costs: Sequence[Cost], client_ms: float, price: float | None) -> str:
    """Format the costs as a Markdown table."""
    column_titles = [
        "setting", "days", "GPU hours", "requests, millions", "requests/s", "prompt tokens computed, billions",
        "tokens written, billions", "request, median and p99 s", "client cores", "sent again",
    ]  # fmt: skip
    column_titles += ["price"] if price else []
    rows = [column_titles, ["---"] + ["---:"] * (len(column_titles) - 1)]
    for cost in costs:
        cells = [cost.name, f"{cost.hours / 24:.1f}", f"{cost.gpu_hours:,.0f}", f"{cost.requests / 1e6:,.0f}",
                f"{cost.requests_per_second:,.0f}", f"{cost.computed_tokens / 1e9:,.0f}",
                f"{cost.reply_tokens / 1e9:,.1f}", f"{cost.median_seconds:.0f}, {cost.p99_seconds:.0f}",
                f"{cost.requests_per_second * client_ms / 1000:.1f}", f"{cost.repeat_share:.2%}"]  # fmt: skip
        rows.append(cells + ([f"{cost.gpu_hours * price:,.0f}"] if price else []))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


# Measurements on this machine


async def _measure_checkpoints(seconds: float, read_count: int = 256) -> tuple[float, float]:
    """Return the checkpoints per second that `read_count` concurrent reads write, and the bytes per checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints.sqlite"
        saver = await open_checkpointer(path)
        assert saver is not None
        checkpoint_count, end_time = 0, time.monotonic() + seconds
        memory = "what was kept of the document so far, some hundreds of words of it. " * 40

        async def write_checkpoints(read_index: int) -> None:
            nonlocal checkpoint_count
            while time.monotonic() < end_time:
                checkpoint_count += 1
                values = {"memory": f"{checkpoint_count} {memory}", "question": "What does it say?"}
                checkpoint_id = f"{checkpoint_count:036d}"
                checkpoint = {"v": 4, "id": checkpoint_id, "ts": "", "channel_values": values, "channel_versions": {},
                              "versions_seen": {}, "updated_channels": None}  # fmt: skip
                config = {"configurable": {"thread_id": str(read_index), "checkpoint_ns": ""}}
                await saver.aput(config, checkpoint, {}, {})  # type: ignore[arg-type]

        start_time = time.monotonic()
        await asyncio.gather(*(write_checkpoints(read_index) for read_index in range(read_count)))
        rate = checkpoint_count / (time.monotonic() - start_time)
        await saver.aclose()  # type: ignore[attr-defined]
        return rate, sum(file.stat().st_size for file in path.parent.iterdir()) / checkpoint_count


def _measure_ledger(seconds: float, questions: int) -> float:
    """Return the documents per second that the ledger stores, each with one row per question."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = CorpusLedger(Path(folder) / "ledger.sqlite")
        document_count, start_time = 0, time.monotonic()
        while time.monotonic() - start_time < seconds:
            name = f"folder/document-{document_count}.txt"
            rows = [
                CorpusRow(
                    id=f"{document_count}-{question_index}", document=name, digest="0" * 64,
                    question=f"What does it say, {question_index}?", answer="The answer.", memory="kept " * 300,
                    usage=RowUsage(1, 1, 0, 1, 1.0),
                )
                for question_index in range(questions)
            ]  # fmt: skip
            ledger.mark_begun(name)
            ledger.store_rows(name, "1", rows)
            document_count += 1
        rate = document_count / (time.monotonic() - start_time)
        ledger.close()
        return rate


def _print_client_costs(seconds: float) -> None:
    rate, size = asyncio.run(_measure_checkpoints(seconds))
    print(f"checkpoints of 256 concurrent reads: {rate:,.0f} per second, {size / 1000:.1f} kB each")
    for questions in (1, 8):
        print(f"ledger, {questions} rows per document: {_measure_ledger(seconds, questions):,.0f} documents per second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of costs, or measure the client with --measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus_cost", description=__doc__)
    workload, hardware = Workload(1_000_000), Hardware()
    parser.add_argument(
        "--documents", type=int, default=workload.documents, help="number of documents (default: %(default)s)"
    )
    parser.add_argument("--gpus", type=int, default=64, help="GPUs, with one replica each (default: %(default)s)")
    parser.add_argument("--simulated", type=int, default=8, help="number of simulated replicas (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=160, help="requests in flight per GPU (default: %(default)s)")
    workload_options = ("mean_tokens", "spread", "longest", "chunk_tokens", "memory_tokens")
    for defaults, names in ((workload, workload_options), (hardware, asdict(hardware))):
        for name in names:
            help_text = f"{type(defaults).__name__.lower()}: {name.replace('_', ' ')} (default: %(default)s)"
            parser.add_argument(
                "--" + name.replace("_", "-"), type=float, default=getattr(defaults, name), help=help_text
            )
    parser.add_argument("--client-ms", type=float, default=3.5, help="the client's CPU time per request in ms")
    parser.add_argument("--price", type=float, help="price of a GPU hour; adds a column")
    parser.add_argument("--measure", action="store_true", help="only measure ledger and checkpoints on this machine")
    options = parser.parse_args(arguments)
    if options.measure:
        _print_client_costs(3.0)
        return
    workload = Workload(
        options.documents, options.mean_tokens, options.spread, options.longest, chunk_tokens=int(options.chunk_tokens),
        memory_tokens=int(options.memory_tokens),
    )  # fmt: skip
    hardware = Hardware(**{name: getattr(options, name) for name in asdict(hardware)})
    operation = Operation(options.simulated, options.in_flight * options.simulated)
    costs = [
        estimate_cost(setting, hardware, options.documents, options.gpus)
        for setting in collect_settings(workload, operation)
    ]
    print(format_table(costs, options.client_ms, options.price))
    hours = estimate_longest_document_hours(workload, hardware)
    print(f"\nThe longest document ({workload.longest:,.0f} tokens) alone: {hours:.2f} hours")


if __name__ == "__main__":
    main()
