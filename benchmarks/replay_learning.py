"""Does training on logged runs improve the policy? The embedded one, read through a real vLLM server, before and after.

    python -m benchmarks.replay_learning work/replay     # continues where it was stopped

1. collect: questions of a small-context RULER task are read several times each at temperature 1, and logged;
2. train: the log is replayed for some dozens of optimizer steps (preset dapo);
3. measure: other, held-out questions are read once by the old weights and once by the new ones, at temperature 1 and
greedily.

Everything but the trainer's rank is as for a user: the public reader, its run log, vLLM in a separate process.
`memagent_training.serving.vllm_server.find_vllm_python` finds vLLM's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Figure, print_table
from memagent_evaluation.paired_tests import Comparison, compare
from memagent_evaluation.samples import Sample, Task
from memagent_evaluation.statistics import estimate
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph import MemAgent, OpenAICompatiblePolicy, ReadResult, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_graph.tokenizers import load_tokenizer

HELD_OUT = 1_000_000
"""The first index of held-out samples."""


def samples_of(task: Task, length: int, start: int, count: int) -> list[Sample]:
    return [task.sample(length, start + number) for number in range(count)]


def reader(base_url: str, folder: Path, *, temperature: float) -> MemAgent:
    return MemAgent(
        OpenAICompatiblePolicy(base_url=base_url, model="policy"),
        tokenizer=EMBEDDED_FOLDER,
        sampling=SamplingParams(temperature=temperature),
        run_log=folder / "runs.sqlite",
        store=folder / "documents",
    )


@contextmanager
def served(model: Path, folder: Path):  # type: ignore[no-untyped-def]
    from memagent_training.serving.vllm_server import VLLMServer

    with VLLMServer(model, log_file=folder / "server.log") as server:
        yield server.base_url


def collect_runs(base_url: str, folder: Path, samples: Sequence[Sample], rollouts: int) -> None:
    from memagent_training.job.collect import CollectSettings, collect

    settings = CollectSettings(rollouts=rollouts, groups=len(samples), max_questions=len(samples), concurrency=128)
    start_time = time.monotonic()
    collection = asyncio.run(collect(reader(base_url, folder, temperature=1.0), samples, settings, name="collected"))
    record = {
        "groups": collection.group_of,
        "reward": collection.reward,
        "with_variance": len(collection.groups),
        "without": len(collection.uniform_groups),
        "failed": len(collection.failures),
        "seconds": time.monotonic() - start_time,
    }
    (folder / "collected.json").write_text(json.dumps(record))


def train_on_runs(folder: Path, model: Path, steps: int, learning_rate: float) -> None:
    from memagent_training.job.training_job import TrainingJob, prepare, train

    record = json.loads((folder / "collected.json").read_text())
    settings = {
        "learning_rate": learning_rate,
        "warmup_steps": 2,
        "max_steps": steps,
        "groups_per_step": 4,
        "token_budget": 8192,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_steps": 4,
        "save_total_limit": 2,
    }
    job = TrainingJob(
        runs=folder / "runs.sqlite",
        model=str(model),
        out=folder / "after",
        preset="dapo",
        settings=settings,
        reward="exact_match",
        groups=record["groups"],
        resume=True,
    )
    train(prepare(job))


def measure(base_url: str, folder: Path, samples: Sequence[Sample], name: str, temperature: float) -> None:
    """Read each sample once and keep its strict score; a failed read is wrong."""
    from memagent_evaluation.scorers import score

    agent = reader(base_url, folder / f"measured-{name}", temperature=temperature)
    texts = [("".join(sample.text()), sample.question) for sample in samples]
    results: list[ReadResult | Exception] = agent.batch(texts, max_concurrency=128, return_exceptions=True)
    scores = [
        score(sample, result.answer, result.raw_answer).strict if isinstance(result, ReadResult) else 0.0
        for sample, result in zip(samples, results, strict=True)
    ]
    (folder / f"{name}.json").write_text(json.dumps(scores))


def run(arguments: argparse.Namespace) -> list[Figure]:
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    task = load_task(arguments.task, TaskSettings(load_tokenizer(EMBEDDED_FOLDER), small=True))
    held_out = samples_of(task, arguments.length, HELD_OUT, arguments.held_out)
    temperatures = {"sampled": 1.0, "greedy": 0.0}

    def missing(side: str) -> list[str]:
        return [decoding for decoding in temperatures if not (folder / f"{side}-{decoding}.json").exists()]

    if missing("before") or not (folder / "collected.json").exists():
        with served(arguments.model, folder) as base_url:
            for decoding in missing("before"):
                measure(base_url, folder, held_out, f"before-{decoding}", temperatures[decoding])
            if not (folder / "collected.json").exists():
                collect_runs(
                    base_url, folder, samples_of(task, arguments.length, 0, arguments.questions), arguments.rollouts
                )
    if not (folder / "after" / "model.safetensors").exists():
        train_on_runs(folder, arguments.model, arguments.steps, arguments.learning_rate)
    if missing("after"):
        with served(folder / "after", folder) as base_url:
            for decoding in missing("after"):
                measure(base_url, folder, held_out, f"after-{decoding}", temperatures[decoding])
    return figures_of(folder, arguments)


def figures_of(folder: Path, arguments: argparse.Namespace) -> list[Figure]:
    record = json.loads((folder / "collected.json").read_text())
    figures = [
        Figure("rollouts: reward", record["reward"], "", "", True),
        Figure("rollouts: groups with variance", record["with_variance"], f"of {arguments.questions}", "", True),
    ]
    for decoding in ("sampled", "greedy"):
        before_scores, after_scores = (
            json.loads((folder / f"{side}-{decoding}.json").read_text()) for side in ("before", "after")
        )
        for side, scores in (("before", before_scores), ("after", after_scores)):
            mean = estimate(scores)
            print(f"{decoding}, {side}: {mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}], n={mean.n}")
            figures.append(Figure(f"held out, {decoding}, {side}", mean.mean, "", "", True))
        comparison: Comparison = compare(_by_place(after_scores), _by_place(before_scores), names=("after", "before"))
        print(f"{decoding}: {comparison.points} points, p {comparison.p}")
        goal = "above 0 beyond noise" if decoding == "sampled" else ""
        met = (comparison.low > 0) or decoding != "sampled"
        figures.append(Figure(f"held out, {decoding}, gain", comparison.difference, "", goal, met))
    return figures


def _by_place(scores: Sequence[float]) -> dict[str, float]:
    return {str(index): score for index, score in enumerate(scores)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs, weights and scores are kept")
    parser.add_argument("--model", type=Path, default=EMBEDDED_FOLDER, help="an edition of the embedded policy")
    parser.add_argument("--task", default="niah_multikey_2")
    parser.add_argument("--length", type=int, default=1000, help="tokens of document, question and answer")
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=400)
    print_table(run(parser.parse_args()))


if __name__ == "__main__":
    main()
