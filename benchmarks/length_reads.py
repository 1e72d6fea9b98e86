"""The reads behind `benchmarks.length_figure`: made where they are missing, each a line of a file.

A document is held-out prose with planted facts, cut into chunks. The policy reads it by the lockstep readers of
`memagent_training.embedded.evaluate`, which compute what the graph and a server compute, many documents at once. What
a user would otherwise do is asked of the same policy about the same text, by systems of `memagent_graph.evaluation`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memagent_training.embedded.documents import Question

OUTCOMES = "outcomes.jsonl"
QUESTIONS_PER_DOCUMENT = 40
"""Questions that share their prose, each with its own fact in it, in the setting "alone"."""
READER = "memagent"
"""The system that reads chunk by chunk; the others are named as in `memagent eval`."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured together: reads of one length by one system with one model in one way."""

    system: str
    model: str
    setting: str
    temperature: float
    chunks: int
    seed: int


@dataclass(frozen=True, slots=True)
class Read:
    """One document read for one question."""

    system: str
    model: str
    weights: str
    """Their fingerprint."""
    setting: str
    temperature: float
    chunks: int
    seed: int
    document: int
    """Whose prose it shares with the questions of the same number."""
    depth: float | None
    """Where the fact stood, 0 to 1; None where an edge between two chunks cut it."""
    right: bool | None
    """None where the document does not fit the system."""
    overwrites: int = 0
    """Steps that began with the value in memory; 0 for a system without one."""
    risk: float = 0.0
    """Summed over these, the probability that sampling writes something else."""
    lost_at: int | None = None

    @property
    def cell(self) -> Cell:
        """Where it belongs."""
        return Cell(self.system, self.model, self.setting, self.temperature, self.chunks, self.seed)


def reads_in(folder: Path) -> Iterator[Read]:
    """All reads that are there; a last line that is torn does not count."""
    path = folder / OUTCOMES
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Read(**json.loads(line))
        except ValueError:
            continue


def fill(folder: Path, model: Path, cell: Cell, count: int) -> list[Read]:
    """The reads of a cell: those that are there, and as many more as are missing, made and kept.

    Args:
        folder: where the reads are kept.
        model: the policy's folder.
        cell: what is read, and how.
        count: how many questions.
    """
    import torch

    from memagent_graph.evaluation.planted_facts import PlantedFacts
    from memagent_graph.model_info import weights_version
    from memagent_graph.profile import load_profile
    from memagent_training.embedded.documents import Setting, questions_alone, questions_with_foreign_facts
    from memagent_training.embedded.evaluate import Reader, default_prose

    torch.set_num_threads(1)
    weights = weights_version(model)
    there = [read for read in reads_in(folder) if read.cell == cell]
    if any(read.weights != weights for read in there):
        raise SystemExit(f"{folder} has reads of another {cell.model}; name this one otherwise, or take another folder")
    profile = load_profile(model)
    if profile is None:
        raise SystemExit(f"{model} has no memagent.json, and so no chunks of a known length")
    document = max((read.document for read in there), default=-1) + 1
    while len(there) < count:
        source = f"{cell.seed}/{cell.chunks}/{cell.setting}/{document}"
        facts = PlantedFacts(random.Random(source), held_out=True, number_share=1.0)
        setting = Setting(cell.chunks, cell.setting == "foreign", profile.budget.chunk_tokens, 1.0, profile.boundary)
        reader = Reader(model, cell.temperature, seed=random.Random(source).randrange(2**31))
        missing = count - len(there)
        if setting.foreign:
            asked = questions_with_foreign_facts(reader.tokenizer, default_prose(), setting, facts, 0)[:missing]
        else:
            together = min(QUESTIONS_PER_DOCUMENT, missing)
            asked = questions_alone(reader.tokenizer, default_prose(), setting, facts, together)
        told: list[tuple[bool | None, int, float, int | None]]
        if cell.system == READER:
            told = [(o.right, o.overwrites, o.risk, o.lost_at) for o in reader.read(asked)]
        else:
            answers = asyncio.run(_answers(cell.system, model, asked, profile.budget.answer_tokens))
            told = [(right, 0, 0.0, None) for right in answers]
        reads = [
            Read(
                **asdict(cell),
                weights=weights,
                document=document,
                depth=None if question.fact_chunk is None else question.fact_chunk / cell.chunks,
                right=right,
                overwrites=overwrites,
                risk=risk,
                lost_at=lost_at,
            )
            for question, (right, overwrites, risk, lost_at) in zip(asked, told, strict=True)
        ]
        with (folder / OUTCOMES).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(read)) + "\n" for read in reads))
        there += reads
        document += 1
    return there


async def _answers(
    system_name: str, model: Path, questions: Sequence[Question], answer_tokens: int
) -> list[bool | None]:
    """Whether a baseline is right, greedily, for each question; None where the document does not fit it."""
    from memagent_graph import Document, LocalPolicy, MemAgent
    from memagent_graph.evaluation.outcomes import Outcome
    from memagent_graph.evaluation.systems import SystemSettings, load_system

    with tempfile.TemporaryDirectory() as store:
        reader = MemAgent(LocalPolicy(model), store=Path(store), run_log=False)
        async with reader:
            settings = await SystemSettings.of(reader)
            system = load_system(system_name, settings)

            async def answer(number: int, question: Question) -> bool | None:
                document = settings.context.store.add(Document.from_text("".join(question.chunks)))
                attempt = await system.attempt(
                    document, question.problem, answer_tokens=answer_tokens, run_id=f"run-{number}"
                )
                return None if attempt.outcome is Outcome.DOES_NOT_FIT else attempt.answer == question.value

            return list(await asyncio.gather(*(answer(*each) for each in enumerate(questions))))
