"""Greedy and sampled accuracy of the embedded policy over long documents, with Wilson intervals.

    python -m recipes.embedded.evaluate --model memagent_graph/embedded --chunks 4 16 64 256

All questions on a document are read at the same pace: a chunk's section is computed once, and each reader is a branch
of it, in float32 and without approximation. A reply is first compared with the expected one; only from the token where
the policy's choice differs is the rest generated, with a cache of keys and values. A reader whose memory has lost the
value, or has added digits to it, stops: the fact is in only one chunk, so its answer is wrong. Prose, entities and
values are held out.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from memagent_evaluation.planted_facts import PlantedFacts
from memagent_evaluation.statistics import wilson
from memagent_graph.policies.profile import load_profile
from memagent_graph.tokenizers import load_tokenizer
from memagent_graph.words import invented_word
from recipes.embedded.batches import collate
from recipes.embedded.corpus import SEPARATOR
from recipes.embedded.documents import Question, Setting, questions_alone, questions_with_foreign_facts
from recipes.embedded.policy_network import load_policy
from recipes.embedded.tokenizer import load_encoding
from recipes.embedded.training_examples import EMPTY, PromptFormat, Row, RowBranch

LONGEST_REPLY = 48
MOST_BRANCHES = 48


@dataclass
class ReadOutcome:
    """The state of reading for one question, and its result."""

    question: Question
    temperature: float
    memory: str = EMPTY
    answer: str = ""
    """Empty if the value was lost."""
    false_records: int = 0
    empty_steps: int = 0
    overwrites: int = 0
    """The number of steps that began with the value in memory."""
    risk: float = 0.0
    """Summed over these, the probability that sampling at the reader's temperature (1 if it is greedy) writes
    something else; divided by their number, the expected loss per overwrite."""
    lost_at: int | None = None
    """The step after which the value was no longer in memory."""

    @property
    def right(self) -> bool:
        """Whether the answer is the value, or "none" for an absent fact."""
        return self.answer == (self.question.value or EMPTY)

    def expected_at(self, step: int) -> str:
        """Return the expected memory."""
        value = self.question.value if step == self.question.fact_chunk else None
        return self.memory if self.memory != EMPTY else value or EMPTY

    def overwrite(self, step: int, reply: str, score: float) -> None:
        """Add a reply; `score` is the log of the probability to sample the expected one."""
        question = self.question
        if self.memory == EMPTY and step != question.fact_chunk:
            self.empty_steps += 1
            self.false_records += reply not in (EMPTY, question.value, "")
        if self.memory == question.value:
            self.overwrites += 1
            self.risk += -math.expm1(min(score, 0.0))
        self.memory = reply or self.memory
        is_past = question.fact_chunk is not None and step >= question.fact_chunk
        if question.value is not None and is_past and not _stands_in(question.value, self.memory):
            self.lost_at = step


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """The end of a prompt, the expected reply, and how the reply is chosen."""

    prompt: list[int]
    expected: list[int]
    temperature: float


class Reader:
    """The policy as a reader of many questions at once.

    Readers at several temperatures are computed together: as long as their memories are the same, so are their prompts,
    and one pass gives the greedy choice and the sampled one.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.policy = load_policy(folder)
        self.form = PromptFormat.load(folder, load_encoding(folder))
        self.tokenizer = load_tokenizer(folder)
        self.end = self.form.reply("")[-1]
        self.noise = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def logits(self, row: Row) -> list[torch.Tensor]:
        """Logits (learned positions, V) of each branch, given the expected tokens before each position."""
        logits = self.policy.logits(collate([row]))
        return list(torch.split(logits, [len(branch.learned) for branch in row.branches]))

    def choose(self, logits: torch.Tensor, temperature: float) -> list[int]:
        """Return the policy's choice at each position."""
        if not temperature:
            return cast("list[int]", logits.argmax(-1).tolist())
        chances = (logits / temperature).softmax(-1)
        return cast("list[int]", torch.multinomial(chances, 1, generator=self.noise)[:, 0].tolist())

    def complete(self, trunk: list[int], requests: Sequence[ReplyRequest]) -> list[tuple[str, float]]:
        """Return the policy's replies to prompts that share a trunk (which may be empty).

        Each with the log of the probability that sampling gives the expected one.
        """
        sharing: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        """Readers with the same prompt; those of the same temperature each have their own samples."""
        alike: Counter[tuple[tuple[int, ...], float]] = Counter()
        for number, request in enumerate(requests):
            prompt = tuple(request.prompt)
            sharing[prompt, alike[prompt, request.temperature]].append(number)
            alike[prompt, request.temperature] += 1
        begun: dict[int, list[int]] = {}
        scores: dict[int, float] = {}
        groups = list(sharing.values())
        for start in range(0, len(groups), MOST_BRANCHES):
            group = groups[start : start + MOST_BRANCHES]
            firsts = [requests[numbers[0]] for numbers in group]
            branches = [RowBranch.of(first.prompt, first.expected, bool(trunk), "read", 1.0) for first in firsts]
            logits = self.logits(Row(trunk or [0], branches))
            for numbers, first, row in zip(group, firsts, logits, strict=True):
                for number in numbers:
                    begun[number] = self._agreeing_prefix(requests[number], row)
                    scores[number] = _log_probability(row, first.expected, requests[number].temperature)
        open_ended = [number for number, ids in begun.items() if self._is_open(ids)]
        for start in range(0, len(open_ended), MOST_BRANCHES):
            part = open_ended[start : start + MOST_BRANCHES]
            prompts = [trunk + requests[number].prompt for number in part]
            self._go_on(prompts, [begun[number] for number in part], [requests[number].temperature for number in part])
        return [(self._text(begun[number]), scores[number]) for number in range(len(requests))]

    def _agreeing_prefix(self, request: ReplyRequest, logits: torch.Tensor) -> list[int]:
        """Return the policy's choices up to the first token that differs from the expected reply."""
        chosen, expected = self.choose(logits, request.temperature), request.expected
        agreed = next((i for i, (a, b) in enumerate(zip(chosen, expected, strict=True)) if a != b), len(expected))
        return chosen[: min(agreed + 1, LONGEST_REPLY)]

    def _is_open(self, ids: list[int]) -> bool:
        return ids[-1] != self.end and len(ids) < LONGEST_REPLY

    def _text(self, ids: list[int]) -> str:
        return self.form.encoding.decode([token for token in ids if token != self.end]).strip()

    @torch.no_grad()
    def _go_on(self, prompts: list[list[int]], begun: list[list[int]], temperatures: list[float]) -> None:
        """Generate the rest of replies, each to its own end."""
        rows = [prompt + ids for prompt, ids in zip(prompts, begun, strict=True)]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = None
        while any(map(self._is_open, begun)):
            kept = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = self.policy(tokens, attention_mask=mask, position_ids=positions, **kept)
            chosen = [self.choose(*pair)[0] for pair in zip(out.logits, temperatures, strict=True)]
            for ids, token in zip(begun, chosen, strict=True):
                if self._is_open(ids):
                    ids.append(token)
            cache = out.past_key_values
            tokens = torch.tensor(chosen)[:, None]
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=-1)
            positions = positions[:, -1:] + 1

    def read(
        self, questions: Sequence[Question], temperatures: Sequence[float], *, guarded: bool = False
    ) -> list[list[ReadOutcome]]:
        """Read every question's document to its end and answer: the outcomes at each temperature.

        With `guarded`, a memory with an invented word is not kept (`UpdateRules.invented`).
        """
        ways = [[ReadOutcome(question, temperature) for question in questions] for temperature in temperatures]
        readers = [reader for way in ways for reader in way]
        for step in range(len(questions[0].chunks) if questions else 0):
            by_chunk: dict[str, list[ReadOutcome]] = defaultdict(list)
            for reader in readers:
                if reader.lost_at is None:
                    by_chunk[reader.question.chunks[step]].append(reader)
            for chunk, reading in by_chunk.items():
                requests = []
                for reader in reading:
                    prompt = self.form.question(reader.memory, reader.question.problem)
                    requests.append(ReplyRequest(prompt, self.form.reply(reader.expected_at(step)), reader.temperature))
                for reader, (reply, score) in zip(
                    reading, self.complete(self.form.trunk(chunk), requests), strict=True
                ):
                    kept = not guarded or self._is_shown(reply, chunk, reader)
                    reader.overwrite(step, reply if kept else reader.memory, score)
        left = [reader for reader in readers if reader.lost_at is None]
        requests = []
        for reader in left:
            prompt = self.form.answer_prompt(reader.memory, reader.question.problem)
            requests.append(ReplyRequest(prompt, self.form.boxed(reader.memory), reader.temperature))
        for reader, (answer, _) in zip(left, self.complete([], requests), strict=True):
            reader.answer = answer.partition("\\boxed{")[2].rpartition("}")[0].strip()
        return ways

    def _is_shown(self, reply: str, chunk: str, reader: ReadOutcome) -> bool:
        """Whether every word of a reply is in the reader's prompt."""
        if reply == reader.memory:
            return True
        prompt = (self.form.literal, chunk, reader.memory, reader.question.problem)
        return invented_word(reply, prompt) is None


def _log_probability(logits: torch.Tensor, tokens: list[int], temperature: float) -> float:
    """Return the log-probability of sampling these tokens, at temperature 1 if the choice is greedy."""
    scores = (logits / (temperature or 1)).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
    return math.fsum(scores[:, 0].tolist())


def _stands_in(value: str, memory: str) -> bool:
    """Whether the value is there as a whole number: with more digits next to it, it is another number."""
    return re.search(rf"(?<!\d){re.escape(value)}(?!\d)", memory) is not None


def measure(
    reader: Reader, prose: str, setting: Setting, wanted: int, *, temperature: float, seed: int
) -> list[ReadOutcome]:
    """Outcomes of at least `wanted` present questions; among foreign facts of absent ones, too, one for 8 chunks."""
    outcomes: list[ReadOutcome] = []
    documents = 0
    while sum(outcome.question.value is not None for outcome in outcomes) < wanted:
        rng = random.Random(f"{seed}/{setting.chunks}/{setting.foreign}/{documents}")
        facts = PlantedFacts(rng, held_out=True, number_share=setting.number_share)
        if setting.foreign:
            absent = max(1, setting.chunks // 8)
            questions = questions_with_foreign_facts(reader.tokenizer, prose, setting, facts, absent)
        else:
            questions = questions_alone(reader.tokenizer, prose, setting, facts, min(20, wanted))
        outcomes += reader.read(questions, [temperature])[0]
        documents += 1
    return outcomes


def table_row(setting: Setting, temperature: float, outcomes: list[ReadOutcome], seconds: float) -> str:
    """One line of the table, in Markdown."""
    present = [outcome for outcome in outcomes if outcome.question.value is not None]
    whole = [outcome for outcome in present if outcome.question.whole]
    absent = [outcome for outcome in outcomes if outcome.question.value is None]
    false, empty = sum(o.false_records for o in outcomes), sum(o.empty_steps for o in outcomes)

    def share(group: list[ReadOutcome]) -> str:
        if not group:
            return "-"
        share = wilson(sum(outcome.right for outcome in group), len(group))
        return f"{share.mean:.3f} [{share.low:.3f}, {share.high:.3f}] n={share.n}"

    cells = [
        str(setting.chunks),
        "one per chunk" if setting.foreign else "none",
        "greedy" if not temperature else f"T={temperature:g}",
        share(present),
        share(whole),
        share(absent),
        f"{false}/{empty}",
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def default_prose() -> str:
    """Return the standard library's own reference text, which training never saw."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    return "\n\n".join(topics[name] for name in sorted(topics))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prose", type=Path, help="a text file; default: pydoc_data.topics")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--chunk-tokens", type=int, help="default: the model's own")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--settings", choices=["foreign", "alone"], nargs="+", default=["foreign", "alone"])
    parser.add_argument("--number-share", type=float, default=1.0, help="share of facts with numeric values")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show-errors", type=int, default=0, help="print this many wrong answers per row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reader = Reader(arguments.model, arguments.seed)
    profile = load_profile(arguments.model)
    if profile is None:
        parser.error(f"{arguments.model} has no memagent.json, and so no chunks of a known length")
    chunk_tokens: int = arguments.chunk_tokens or profile.budget.chunk_tokens
    prose = (
        arguments.prose.read_text(encoding="utf-8").replace(SEPARATOR, "\n\n") if arguments.prose else default_prose()
    )
    print("| chunks | foreign facts | decoding | right | right, facts not cut | absent: none | false records | s |")
    print("|---|---|---|---|---|---|---|---|")
    for chunks in arguments.chunks:
        for kind in arguments.settings:
            setting = Setting(chunks, kind == "foreign", chunk_tokens, arguments.number_share, profile.boundary)
            clock = time.perf_counter()
            options = {"temperature": arguments.temperature, "seed": arguments.seed}
            outcomes = measure(reader, prose, setting, arguments.questions, **options)
            print(table_row(setting, arguments.temperature, outcomes, time.perf_counter() - clock), flush=True)
            wrong = [outcome for outcome in outcomes if not outcome.right and outcome.question.whole]
            for outcome in wrong[: arguments.show_errors]:
                where = outcome.question.fact_chunk
                problem = f"{outcome.question.problem} expected {outcome.question.value} in {where}"
                print(f"    {problem}, got {outcome.answer!r}")


if __name__ == "__main__":
    main()
