"""Measure how often the gate of a policy decides correctly at chunks with and without evidence.

    python -m benchmarks.gate_learning work/gate --policy before=weak-gate --policy after=gate-loop --n 200

Policies read the documents of a generated task with the strategy `gated`, at temperature 1 and greedily. A decision is
right if the memory is rewritten at a chunk that has a part of the fact asked for, or kept at any other chunk, which the
preset `gru-mem` rewards as `gate_right`. Shares are means over documents, with one question each, and have bootstrap
intervals. With two policies or more, the last is compared with the first on the same questions. Measurements are stored
in the folder by the policy's name, and are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.score_statistics import compare, estimate
from memagent_evaluation.scorers import score
from memagent_evaluation.tasks import load_task
from memagent_graph import Completion, MemAgent, UpdateRule, UpdateRules, load_tokenizer
from memagent_graph.policies.local import LocalPolicy
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policy import Messages, SamplingParams, TokenIds

_SECTION = re.compile(r"<section> (.*) </section>", re.DOTALL)
SHARES = ("right", "at_evidence", "elsewhere")
_PROBLEM = re.compile(r"<problem> (.*) </problem>", re.DOTALL)


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

    def add(self, *, rewrites: bool, has_evidence: bool, tokens: int) -> None:
        """Add a decision."""
        self.right.append(rewrites == has_evidence)
        (self.at_evidence if has_evidence else self.elsewhere).append(rewrites == has_evidence)
        if not has_evidence:
            self.idle_tokens.append(tokens)


class GateObserver:
    """A policy that records the decisions of its gate; the prompt identifies the question and the chunk."""

    def __init__(self, policy: LocalPolicy, samples: Iterable[Sample]) -> None:
        self.name = policy.name
        self._policy = policy
        self._facts = {sample.question: [needle.text for needle in sample.needles] for sample in samples}
        self.decisions: dict[str, Decisions] = defaultdict(Decisions)

    async def describe(self) -> ModelInfo:
        """Describe the observed policy."""
        return await self._policy.describe()

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Complete a prompt with the observed policy, and record the decision if the prompt asks its gate."""
        completion = await self._policy.complete(prompt, sampling)
        text = str(prompt[0]["content"])  # type: ignore[index]
        section, problem = _SECTION.search(text), _PROBLEM.search(text)
        if section is not None and problem is not None and completion.usage is not None:
            has_evidence = any(_has_part(fact, section[1]) for fact in self._facts[problem[1]])
            self.decisions[problem[1]].add(
                rewrites=completion.text.strip() != "KEEP",
                has_evidence=has_evidence,
                tokens=completion.usage.completion_tokens,
            )
        return completion

    async def aclose(self) -> None:
        """Close the observed policy."""
        await self._policy.aclose()


def _has_part(fact: str, section: str) -> bool:
    """Return whether a section has a fact, or a half of it that the section's edge cuts off."""
    half = len(fact) // 2
    return fact in section or section.endswith(fact[:half]) or section.lstrip().startswith(fact[half:])


@dataclass
class Measurement:
    """The scores and decisions of one policy at one temperature, by question."""

    answers: dict[str, float]
    decisions: dict[str, Decisions]

    def compute_shares(self, name: str) -> dict[str, float]:
        """Return the share of right decisions by question, for the questions that have such chunks.

        Args:
            name: a field of `Decisions`.
        """
        lists = {key: getattr(decisions, name) for key, decisions in self.decisions.items()}
        return {key: fmean(values) for key, values in lists.items() if values}


async def measure_policy(folder: Path, samples: Sequence[Sample], temperature: float, strategy: str) -> Measurement:
    """Read all samples with one policy, and return its scores and decisions."""
    policy = GateObserver(LocalPolicy(folder), samples)
    with tempfile.TemporaryDirectory() as store:
        agent = MemAgent(
            policy,
            sampling=SamplingParams(temperature=temperature, seed=1 if temperature else None),
            rules=UpdateRules(invented=UpdateRule.ACCEPT),  # as in training: the policy's own text counts
            strategy=strategy,
            store=Path(store),
            run_log=False,
        )
        limit = asyncio.Semaphore(32)

        async def read(sample: Sample) -> float:
            async with limit:
                result = await agent.aread("".join(sample.text()), sample.question)
            return score(sample, result.answer, result.raw_answer).strict

        scores = await asyncio.gather(*map(read, samples))
    await policy.aclose()
    return Measurement(dict(zip((sample.question for sample in samples), scores, strict=True)), dict(policy.decisions))


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
        estimate(list(values.values())) for values in (measurement.answers, *map(measurement.compute_shares, SHARES))
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
    policies = dict(pair.split("=", maxsplit=1) for pair in arguments.policy)
    settings = TaskSettings(tokenizer=load_tokenizer("embedded"), seed=arguments.seed, small=True)
    task = load_task(arguments.task, settings)
    generated = (task.sample(arguments.length, index) for index in range(arguments.n))
    samples = list({sample.question: sample for sample in generated}.values())  # the question identifies the read
    print(f"{arguments.task}, {arguments.length} tokens, {len(samples)} questions, {arguments.strategy}\n")
    print("| policy | T | answers right | decisions right | at the fact | elsewhere | tokens a chunk without news |")
    print("|---|---:|---|---|---|---|---:|")
    for temperature in arguments.temperatures:
        measurements = {}
        for name, folder in policies.items():
            path = (
                arguments.folder
                / f"{name}-{arguments.task}-{arguments.length}-{arguments.n}-{arguments.seed}-{temperature:g}.json"
            )
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
