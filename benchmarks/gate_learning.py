"""Does a gate decide correctly? For each policy: decisions at chunks with and without evidence, words written, answers.

    python -m benchmarks.gate_learning work/gate --policy before=weak-gate --policy after=gate-loop --n 200

Reads with `--strategy gated` on a generated task, held-out entities and values among others, at temperature 1 and
greedily. A decision is right where memory is rewritten at a chunk with a part of the fact asked for, or kept at another
one: what the preset `gru-mem` rewards as `gate_right`. Shares are means over documents, one question on each, with
bootstrap intervals; with two policies, the last is compared with the first on the same questions. Reads are kept in the
folder, by the policy's name, and are not repeated.
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

from memagent_evaluation.paired_tests import compare
from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.scorers import score
from memagent_evaluation.statistics import estimate
from memagent_evaluation.tasks.registry import load_task
from memagent_graph import Completion, MemAgent, UpdateRule, UpdateRules, load_tokenizer
from memagent_graph.policies.local import LocalPolicy
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policy import Messages, SamplingParams, TokenIds

_SECTION = re.compile(r"<section> (.*) </section>", re.DOTALL)
_PROBLEM = re.compile(r"<problem> (.*) </problem>", re.DOTALL)


@dataclass
class Decisions:
    """The gate's decisions in one read."""

    right: list[bool] = field(default_factory=list)
    at_evidence: list[bool] = field(default_factory=list)
    elsewhere: list[bool] = field(default_factory=list)
    spent: list[int] = field(default_factory=list)
    """Tokens written at chunks without evidence."""

    def said(self, *, rewrites: bool, has_evidence: bool, tokens: int) -> None:
        """Add a decision."""
        self.right.append(rewrites == has_evidence)
        (self.at_evidence if has_evidence else self.elsewhere).append(rewrites == has_evidence)
        if not has_evidence:
            self.spent.append(tokens)


class Watched:
    """A policy whose gate is observed; read and chunk are identified by the prompt."""

    def __init__(self, policy: LocalPolicy, samples: Iterable[Sample]) -> None:
        self.name = policy.name
        self._policy = policy
        self._facts = {sample.question: [needle.text for needle in sample.needles] for sample in samples}
        self.decisions: dict[str, Decisions] = defaultdict(Decisions)

    async def describe(self) -> ModelInfo:
        """Like the policy."""
        return await self._policy.describe()

    async def complete(self, prompt: Messages | TokenIds, sampling: SamplingParams) -> Completion:
        """Like the policy."""
        completion = await self._policy.complete(prompt, sampling)
        text = str(prompt[0]["content"])  # type: ignore[index]
        section, problem = _SECTION.search(text), _PROBLEM.search(text)
        if section is not None and problem is not None and completion.usage is not None:
            has_evidence = any(_shares(fact, section[1]) for fact in self._facts[problem[1]])
            self.decisions[problem[1]].said(
                rewrites=completion.text.strip() != "KEEP",
                has_evidence=has_evidence,
                tokens=completion.usage.completion_tokens,
            )
        return completion

    async def aclose(self) -> None:
        """Like the policy."""
        await self._policy.aclose()


def _shares(fact: str, section: str) -> bool:
    """Whether a section has a fact, or a part of one that is cut by the section's edge."""
    half = len(fact) // 2
    return fact in section or section.endswith(fact[:half]) or section.lstrip().startswith(fact[half:])


@dataclass
class Measured:
    """One policy at one temperature: the result of each sample's read."""

    answers: dict[str, float]
    decisions: dict[str, Decisions]

    def by_sample(self, name: str) -> dict[str, float]:
        """A share of right decisions, of the samples that have such chunks."""
        lists = {key: getattr(decisions, name) for key, decisions in self.decisions.items()}
        return {key: fmean(values) for key, values in lists.items() if values}


async def measure(folder: Path, samples: Sequence[Sample], temperature: float, strategy: str) -> Measured:
    """Read all samples with one policy."""
    policy = Watched(LocalPolicy(folder), samples)
    with tempfile.TemporaryDirectory() as store:
        agent = MemAgent(
            policy,
            sampling=SamplingParams(temperature=temperature, seed=1 if temperature else None),
            rules=UpdateRules(invented=UpdateRule.ACCEPT),  # as in the loop: the policy's own text counts
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
    return Measured(dict(zip((sample.question for sample in samples), scores, strict=True)), dict(policy.decisions))


def kept(path: Path, folder: Path, samples: Sequence[Sample], temperature: float, strategy: str) -> Measured:
    """An earlier measurement, or a new one, which is stored."""
    if not path.exists():
        measurement = asyncio.run(measure(folder, samples, temperature, strategy))
        path.write_text(json.dumps(asdict(measurement)), encoding="utf-8")
    record = json.loads(path.read_text("utf-8"))
    decisions = {question: Decisions(**lists) for question, lists in record["decisions"].items()}
    return Measured(record["answers"], decisions)


def line(name: str, temperature: float, measurement: Measured) -> str:
    """A row of the table."""
    shares = [estimate(list(values.values())) for values in (measurement.answers, *map(measurement.by_sample, SHARES))]
    tokens_per_chunk = fmean(tokens for decisions in measurement.decisions.values() for tokens in decisions.spent)
    return f"| {name} | {temperature:g} | {' | '.join(map(str, shares))} | {tokens_per_chunk:.1f} |"


SHARES = ("right", "at_evidence", "elsewhere")


def main() -> None:
    """Command line."""
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
            measurements[name] = kept(path, Path(folder), samples, temperature, arguments.strategy)
            print(line(name, temperature, measurements[name]), flush=True)
        first_name, last_name = next(iter(policies)), next(reversed(policies))
        if first_name != last_name:
            first_measurement, last_measurement = measurements[first_name], measurements[last_name]
            answers = compare(last_measurement.answers, first_measurement.answers, names=(last_name, first_name))
            decisions = compare(
                last_measurement.by_sample("right"), first_measurement.by_sample("right"), names=(last_name, first_name)
            )
            print(
                f"\nAnswers: {answers.points}, p {answers.p}\nDecisions: {decisions.points}, p {decisions.p}\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
