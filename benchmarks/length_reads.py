"""The reads behind `benchmarks.length_figure`: missing ones are made; each is a line of a file.

A document is held-out prose with planted facts, cut into chunks. The policy reads it with the batched readers of
`recipes.embedded.batched_reader`, which compute the same as the graph and a server, for many documents at once. The
baselines use the same policy on the same text, as systems of `memagent_evaluation`.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memagent_graph.policies.model_info import weights_version

if TYPE_CHECKING:
    from recipes.embedded.batched_reader import Reader
    from recipes.embedded.documents import Question

OUTCOMES = "outcomes.jsonl"
MAX_QUESTIONS, MIN_QUESTIONS, CHUNKS_PER_QUESTION = 40, 4, 4
"""Questions that share their prose, each with its own fact in it, in the setting "alone". Shorter documents have fewer:
so a few unusual chunks do not determine the result, and 200 questions on 16 chunks or more use the whole held-out
text."""
READER, GUARDED = "memagent", "memagent, nothing invented"
"""The systems that read chunk by chunk, by the paper's rule and with `memagent read --on-invented keep_previous`; the
others are named as in `memagent eval`."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured together: reads of one length by one system with one model and one way of decoding."""

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
    """Questions with the same number share their prose."""
    depth: float | None
    """The fact's place, 0 to 1; None if the edge between two chunks cut it."""
    right: bool | None
    """None if the document does not fit the system."""
    overwrites: int = 0
    """Steps that began with the value in memory; 0 for a system without one."""
    risk: float = 0.0
    """Summed over these, the probability that sampling writes something else."""
    lost_at: int | None = None

    @property
    def cell(self) -> Cell:
        """Its cell."""
        return Cell(self.system, self.model, self.setting, self.temperature, self.chunks, self.seed)


def reads_in(folder: Path) -> Iterator[Read]:
    """All existing reads; a document that is also in a compressed file counts once, an incomplete line does not
    count.
    """
    path = folder / OUTCOMES
    packed = path.with_name(f"{OUTCOMES}.gz")
    known: set[tuple[Cell, int]] = set()
    if packed.exists():
        for read in _parsed(gzip.decompress(packed.read_bytes())):
            known.add((read.cell, read.document))
            yield read
    if path.exists():
        yield from (read for read in _parsed(path.read_bytes()) if (read.cell, read.document) not in known)


def _parsed(lines: bytes) -> Iterator[Read]:
    for line in lines.splitlines():
        try:
            yield Read(**json.loads(line))
        except ValueError:
            continue


def fill(folder: Path, model: Path, cells: Sequence[Cell], count: int) -> None:
    """Make the missing reads of cells, and store them.

    Args:
        folder: where the reads are kept.
        model: the policy's folder.
        cells: what is read, and how; they differ only in temperature, and if they lack the same documents, these are
            read at all temperatures at once.
        count: how many questions.
    """
    weights = weights_version(model)
    there = dict.fromkeys(cells, 0)
    next_document = dict.fromkeys(cells, 0)
    for read in reads_in(folder):
        if read.cell in there:
            if read.weights != weights:
                raise SystemExit(
                    f"{folder} has reads of another {read.model}; name this one otherwise, or take another folder"
                )
            there[read.cell] += 1
            next_document[read.cell] = max(next_document[read.cell], read.document + 1)
    while lacking := [cell for cell in cells if there[cell] < count]:
        document = min(next_document[cell] for cell in lacking)
        together = [cell for cell in lacking if next_document[cell] == document]
        reads = _read_document(model, weights, together, document, count - max(there[cell] for cell in together))
        _append(folder / OUTCOMES, reads)
        for cell in together:
            there[cell] += sum(read.cell == cell for read in reads)
            next_document[cell] = document + 1


def _append(path: Path, reads: Sequence[Read]) -> None:
    """Add lines in one write, because another process may add some too."""
    lines = "".join(json.dumps(asdict(read)) + "\n" for read in reads).encode()
    with path.open("a+b", buffering=0) as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            lines = b"\n" + lines  # an incomplete line of a killed process stays separate
        written = file.write(lines)
    if written != len(lines):
        raise SystemExit(f"{path} takes no more lines; is the disk full?")


def _read_document(model: Path, weights: str, cells: Sequence[Cell], document: int, count: int) -> list[Read]:
    """Questions on one more document, at most `count`, read for each of these cells."""
    import torch

    from memagent_evaluation.planted_facts import PlantedFacts
    from memagent_graph.policies.profile import load_profile
    from memagent_graph.tokenizers import load_tokenizer
    from recipes.embedded.batched_reader import default_prose
    from recipes.embedded.documents import Setting, questions_alone, questions_with_foreign_facts

    torch.set_num_threads(1)
    profile = load_profile(model)
    if profile is None:
        raise SystemExit(f"{model} has no memagent.json, and so no chunks of a known length")
    cell = cells[0]
    source = f"{cell.seed}/{cell.chunks}/{cell.setting}/{document}"
    facts = PlantedFacts(random.Random(source), held_out=True, number_share=1.0)
    setting = Setting(cell.chunks, cell.setting == "foreign", profile.budget.chunk_tokens, 1.0, profile.boundary)
    tokenizer = load_tokenizer(model)
    if setting.foreign:
        asked = questions_with_foreign_facts(tokenizer, default_prose(), setting, facts, 0)[:count]
    else:
        sharing = max(MIN_QUESTIONS, min(MAX_QUESTIONS, cell.chunks // CHUNKS_PER_QUESTION))
        asked = questions_alone(tokenizer, default_prose(), setting, facts, min(sharing, count))
    told: list[list[tuple[bool | None, int, float, int | None]]]
    if cell.system in {READER, GUARDED}:
        guarded = cell.system == GUARDED
        reader = _reader(model)
        reader.noise.manual_seed(random.Random(source).randrange(2**31))
        outcomes = reader.read(asked, [cell.temperature for cell in cells], guarded=guarded)
        told = [
            [(o.is_right, 0, 0.0, o.lost_at) if guarded else (o.is_right, o.overwrites, o.risk, o.lost_at) for o in way]
            for way in outcomes
        ]
    else:
        answers = asyncio.run(_answers(cell.system, model, asked, profile.budget.answer_tokens))
        told = [[(right, 0, 0.0, None) for right in answers] for _ in cells]
    return [
        Read(
            **asdict(cell),
            weights=weights,
            document=document,
            depth=None if question.fact_chunk is None else question.fact_chunk / cell.chunks,
            right=right,
            overwrites=overwrites,
            risk=float(f"{risk:.4g}"),
            lost_at=lost_at,
        )
        for cell, way in zip(cells, told, strict=True)
        for question, (right, overwrites, risk, lost_at) in zip(asked, way, strict=True)
    ]


@functools.lru_cache(maxsize=1)
def _reader(model: Path) -> Reader:
    from recipes.embedded.batched_reader import Reader

    return Reader(model, seed=0)


async def _answers(
    system_name: str, model: Path, questions: Sequence[Question], answer_tokens: int
) -> list[bool | None]:
    """Whether a baseline is right, greedily, for each question; None if the document does not fit."""
    from memagent_evaluation.result_table import QuestionOutcome
    from memagent_evaluation.systems import load_system
    from memagent_graph import Document, LocalPolicy, MemAgent

    with tempfile.TemporaryDirectory() as store:
        reader = MemAgent(LocalPolicy(model), store=Path(store), run_log=False)
        async with reader:
            system = load_system(system_name, reader)

            async def answer(number: int, question: Question) -> bool | None:
                document = reader.store.add(Document.from_text("".join(question.chunks)))
                attempt = await system.attempt(
                    document, question.problem, answer_tokens=answer_tokens, run_id=f"run-{number}"
                )
                return None if attempt.outcome is QuestionOutcome.DOES_NOT_FIT else attempt.answer == question.value

            return list(await asyncio.gather(*(answer(*each) for each in enumerate(questions))))
