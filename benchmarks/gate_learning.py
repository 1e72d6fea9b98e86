"""Measure how often the gate of a policy decides correctly at chunks with and without evidence.

    python -m benchmarks.gate_learning work/gate --policy before=weak-gate --policy after=gate-loop --n 200

Policies read the documents of a generated task with the strategy `gated`, at temperature 1 and greedily. A decision is
right if the memory is rewritten at a chunk with a part of the requested fact, or kept at any other chunk; the preset
`gru-mem` rewards this as `gate_right`. Shares are means over documents, with one question each, and have bootstrap
intervals. With two policies or more, the last is compared with the first on the same questions. Measurements are stored
in the folder by the policy and the options, and are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.score_statistics import compare, estimate
from memagent_evaluation.scorers import score
from memagent_evaluation.tasks import load_task
from memagent_graph import MemAgent, UpdateRule, UpdateRules, load_tokenizer
from memagent_graph.documents import DocumentStore
from memagent_graph.policies.local import LocalPolicy
from memagent_graph.policy import SamplingParams
from memagent_graph.run_log import Outcome, RunLog
from memagent_graph.trace import Writes
from memagent_training.data.training_runs import Gold, TrainingRun, read_run
from memagent_training.rewards.evidence_rewards import GateRight

DECISION_KINDS = ("right", "at_evidence", "elsewhere")


@dataclass
class Decisions:
    """Whether each decision of the gate in one read is right."""

    right: list[bool] = field(default_factory=list)
    """All decisions."""
    at_evidence: list[bool] = field(default_factory=list)
    """The decisions at chunks with evidence."""
    elsewhere: list[bool] = field(default_factory=list)
    """The decisions at chunks without evidence."""
    idle_tokens: list[int] = field(default_factory=list)
    """Tokens written at each chunk without evidence."""

    def add(self, *, is_right: bool, has_evidence: bool, tokens: int) -> None:
        """Add a decision."""
        self.right.append(is_right)
        (self.at_evidence if has_evidence else self.elsewhere).append(is_right)
        if not has_evidence:
            self.idle_tokens.append(tokens)


def collect_decisions(run: TrainingRun, sample: Sample, store: DocumentStore) -> Decisions:
    """Return the decisions of one read. A chunk whose replies were all refused counts as a wrong decision."""
    decisions, text = Decisions(), "".join(sample.text())
    facts = [match for needle in sample.needles for match in re.finditer(re.escape(needle.text), text)]
    gold = Gold(tuple(sample.gold), evidence=tuple(needle.text for needle in sample.needles))
    rewards = GateRight()(replace(run, gold=gold, store=store))
    assert rewards is not None
    for conversation, reward in zip(run.conversations_K, rewards, strict=True):
        span = conversation.span
        if span is None or conversation.writes is not Writes.MEMORY or conversation.outcome is Outcome.DISCARDED:
            continue
        has_evidence = any(fact.start() < span.end_char and span.start_char < fact.end() for fact in facts)
        decisions.add(is_right=reward == 1.0, has_evidence=has_evidence, tokens=conversation.completion_tokens)
    return decisions


@dataclass
class Measurement:
    """The scores and decisions of one policy at one temperature, by question."""

    answers: dict[str, float]
    decisions: dict[str, Decisions]

    def compute_shares(self, kind: str) -> dict[str, float]:
        """Return the share of right decisions by question, for the questions with such decisions.

        Args:
            kind: a field of `Decisions`.
        """
        decisions_by_question = {key: getattr(decisions, kind) for key, decisions in self.decisions.items()}
        return {key: fmean(values) for key, values in decisions_by_question.items() if values}


async def measure_policy(folder: Path, samples: Sequence[Sample], temperature: float, strategy: str) -> Measurement:
    """Read all samples with one policy, and return its scores and decisions."""
    policy = LocalPolicy(folder)
    with tempfile.TemporaryDirectory() as store, closing(RunLog(Path(store) / "runs.sqlite")) as log:
        agent = MemAgent(
            policy,
            sampling=SamplingParams(temperature=temperature, seed=1 if temperature else None),
            rules=UpdateRules(invented=UpdateRule.ACCEPT),  # as in training: the policy's own text counts
            strategy=strategy,
            store=Path(store),
            run_log=log,
        )
        slots = asyncio.Semaphore(32)

        async def read_sample(sample: Sample) -> tuple[float, Decisions]:
            async with slots:
                result = await agent.aread("".join(sample.text()), sample.question)
            decisions = collect_decisions(read_run(log, result.run_id), sample, agent.store)
            return score(sample, result.answer, result.raw_answer).strict, decisions

        scores, decisions = zip(*await asyncio.gather(*map(read_sample, samples)), strict=True)
        await policy.aclose()
    questions = [sample.question for sample in samples]
    return Measurement(dict(zip(questions, scores, strict=True)), dict(zip(questions, decisions, strict=True)))


def load_or_measure(
    path: Path, folder: Path, samples: Sequence[Sample], temperature: float, strategy: str
) -> Measurement:
    """Load the measurement in `path`, or measure and store it there if the file does not exist."""
    if not path.exists():
        measurement = asyncio.run(measure_policy(folder, samples, temperature, strategy))
        path.write_text(json.dumps(asdict(measurement)), encoding="utf-8")
    record = json.loads(path.read_text("utf-8"))
    decisions = {question: Decisions(**lists) for question, lists in record["decisions"].items()}
    return Measurement(record["answers"], decisions)


def format_row(name: str, temperature: float, measurement: Measurement) -> str:
    """Return a row of the Markdown table."""
    shares = [
        estimate(list(values.values()))
        for values in (measurement.answers, *map(measurement.compute_shares, DECISION_KINDS))
    ]
    tokens_per_chunk = fmean(tokens for decisions in measurement.decisions.values() for tokens in decisions.idle_tokens)
    return f"| {name} | {temperature:g} | {' | '.join(map(str, shares))} | {tokens_per_chunk:.1f} |"


def main() -> None:
    """Measure the policies that the command line names, and print a table and comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", action="append", required=True, metavar="NAME=FOLDER", help="repeatable")
    parser.add_argument("--task", default="niah_multikey_1")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="gated")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    policies = dict(name_and_folder.split("=", maxsplit=1) for name_and_folder in arguments.policy)
    settings = TaskSettings(tokenizer=load_tokenizer("embedded"), seed=arguments.seed, small=True)
    task = load_task(arguments.task, settings)
    generated_samples = (task.sample(arguments.length, index) for index in range(arguments.n))
    # Questions are the keys of a measurement, so there must not be two equal ones.
    samples = list({sample.question: sample for sample in generated_samples}.values())
    print(f"{arguments.task}, {arguments.length} tokens, {len(samples)} questions, {arguments.strategy}\n")
    print("| policy | T | answers right | decisions right | at the fact | elsewhere | tokens a chunk without news |")
    print("|---|---:|---|---|---|---|---:|")
    for temperature in arguments.temperatures:
        measurements = {}
        for name, folder in policies.items():
            options = {**vars(arguments), "folder": Path(folder).resolve(), "policy": name, "temperatures": temperature}
            path = arguments.folder / f"{name}-{temperature:g}-{sha256(repr(options).encode()).hexdigest()[:16]}.json"
            measurements[name] = load_or_measure(path, Path(folder), samples, temperature, arguments.strategy)
            print(format_row(name, temperature, measurements[name]), flush=True)
        first_name, last_name = next(iter(policies)), next(reversed(policies))
        if first_name != last_name:
            first_measurement, last_measurement = measurements[first_name], measurements[last_name]
            answers = compare(last_measurement.answers, first_measurement.answers, names=(last_name, first_name))
            decisions = compare(
                last_measurement.compute_shares("right"),
                first_measurement.compute_shares("right"),
                names=(last_name, first_name),
            )
            print(f"\nAnswers: {answers.formatted_difference}, p {answers.formatted_p_value}")
            print(f"Decisions: {decisions.formatted_difference}, p {decisions.formatted_p_value}\n", flush=True)


if __name__ == "__main__":
    main()
