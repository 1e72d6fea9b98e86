"""Measure whether training on logged runs improves the embedded policy, served by a real vLLM server.

    python -m benchmarks.replay_learning work/replay     # continues where it was stopped

1. collect: read questions of a small-context RULER task several times each at temperature 1, with a log;
2. train: take some dozens of optimizer steps on the log (preset dapo);
3. measure: read other, held-out questions with the old and the new weights, at temperature 1 and greedily.

The parts are those of a user: the public reader, its run log, and vLLM in a separate process.
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
"""The index of the first held-out sample."""


def make_samples(task: Task, length: int, start: int, count: int) -> list[Sample]:
    """Return `count` samples of a task, from the index `start` on."""
    return [task.sample(length, start + number) for number in range(count)]


def make_reader(base_url: str, folder: Path, *, temperature: float) -> MemAgent:
    """Return a reader of the served policy, with its log in a folder."""
    return MemAgent(
        OpenAICompatiblePolicy(base_url=base_url, model="policy"),
        tokenizer=EMBEDDED_FOLDER,
        sampling=SamplingParams(temperature=temperature),
        run_log=folder / "runs.sqlite",
        store=folder / "documents",
    )


@contextmanager
def serve_model(model: Path, folder: Path):  # type: ignore[no-untyped-def]
    """Serve a model with vLLM, and yield the base URL."""
    from memagent_training.serving.vllm_server import VLLMServer

    with VLLMServer(model, log_file=folder / "server.log") as server:
        yield server.base_url


def collect_runs(base_url: str, folder: Path, samples: Sequence[Sample], rollouts: int) -> None:
    """Read each sample `rollouts` times, and write the groups and their reward to collected.json."""
    from memagent_training.job.collect import CollectSettings, collect

    settings = CollectSettings(rollouts=rollouts, groups=len(samples), max_questions=len(samples), concurrency=128)
    start_time = time.monotonic()
    collection = asyncio.run(
        collect(make_reader(base_url, folder, temperature=1.0), samples, settings, name="collected")
    )
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
    """Train a model on the collected runs; the folder `after` gets the new weights."""
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


def measure_scores(base_url: str, folder: Path, samples: Sequence[Sample], name: str, temperature: float) -> None:
    """Read each sample once, and write the strict scores to NAME.json; a failed read scores 0."""
    from memagent_evaluation.scorers import score

    agent = make_reader(base_url, folder / f"measured-{name}", temperature=temperature)
    texts = [("".join(sample.text()), sample.question) for sample in samples]
    results: list[ReadResult | Exception] = agent.batch(texts, max_concurrency=128, return_exceptions=True)
    scores = [
        score(sample, result.answer, result.raw_answer).strict if isinstance(result, ReadResult) else 0.0
        for sample, result in zip(samples, results, strict=True)
    ]
    (folder / f"{name}.json").write_text(json.dumps(scores))


def measure_all(arguments: argparse.Namespace) -> list[Figure]:
    """Run the steps that are not done yet, and return the figures."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    task = load_task(arguments.task, TaskSettings(load_tokenizer(EMBEDDED_FOLDER), small=True))
    held_out = make_samples(task, arguments.length, HELD_OUT, arguments.held_out)
    temperatures = {"sampled": 1.0, "greedy": 0.0}

    def list_missing(side: str) -> list[str]:
        return [decoding for decoding in temperatures if not (folder / f"{side}-{decoding}.json").exists()]

    if list_missing("before") or not (folder / "collected.json").exists():
        with serve_model(arguments.model, folder) as base_url:
            for decoding in list_missing("before"):
                measure_scores(base_url, folder, held_out, f"before-{decoding}", temperatures[decoding])
            if not (folder / "collected.json").exists():
                collect_runs(
                    base_url, folder, make_samples(task, arguments.length, 0, arguments.questions), arguments.rollouts
                )
    if not (folder / "after" / "model.safetensors").exists():
        train_on_runs(folder, arguments.model, arguments.steps, arguments.learning_rate)
    if list_missing("after"):
        with serve_model(folder / "after", folder) as base_url:
            for decoding in list_missing("after"):
                measure_scores(base_url, folder, held_out, f"after-{decoding}", temperatures[decoding])
    return make_figures(folder, arguments)


def make_figures(folder: Path, arguments: argparse.Namespace) -> list[Figure]:
    """Print the scores before and after training, and return them as figures."""
    record = json.loads((folder / "collected.json").read_text())
    figures = [
        Figure("rollouts: reward", record["reward"]),
        Figure("rollouts: groups with variance", record["with_variance"], f"of {arguments.questions}"),
    ]
    for decoding in ("sampled", "greedy"):
        before_scores, after_scores = (
            json.loads((folder / f"{side}-{decoding}.json").read_text()) for side in ("before", "after")
        )
        for side, scores in (("before", before_scores), ("after", after_scores)):
            mean = estimate(scores)
            print(f"{decoding}, {side}: {mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}], n={mean.n}")
            figures.append(Figure(f"held out, {decoding}, {side}", mean.mean))
        comparison: Comparison = compare(
            _index_scores(after_scores), _index_scores(before_scores), names=("after", "before")
        )
        print(f"{decoding}: {comparison.points} points, p {comparison.p}")
        goal = "above 0 beyond noise" if decoding == "sampled" else ""
        met = (comparison.low > 0) or decoding != "sampled"
        figures.append(Figure(f"held out, {decoding}, gain", comparison.difference, "", goal, met))
    return figures


def _index_scores(scores: Sequence[float]) -> dict[str, float]:
    return {str(index): score for index, score in enumerate(scores)}


def main() -> None:
    """Run the benchmark in the folder that the command line names, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder for runs, weights and scores")
    parser.add_argument("--model", type=Path, default=EMBEDDED_FOLDER, help="an edition of the embedded policy")
    parser.add_argument("--task", default="niah_multikey_2")
    parser.add_argument("--length", type=int, default=1000, help="tokens of document, question and answer")
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=400)
    print_table(measure_all(parser.parse_args()))


if __name__ == "__main__":
    main()
