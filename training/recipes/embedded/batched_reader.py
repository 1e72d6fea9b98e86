"""Reads many questions at once with the embedded policy, for measurements on long documents.

All questions on a document are read at the same pace: a chunk's section is computed once, and each reader is a branch
of it, in float32 and without approximation. A reply is first compared with the expected one; only from the token where
the policy's choice differs is the rest generated, with a cache of keys and values. A reader whose memory has lost the
value, or has added digits to it, stops: the fact is in only one chunk, so its answer is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch

from memagent_graph.tokenizers import load_tokenizer
from memagent_graph.words import invented_word
from recipes.embedded.batches import collate
from recipes.embedded.documents import Question
from recipes.embedded.policy_network import load_policy
from recipes.embedded.tokenizer import load_encoding
from recipes.embedded.training_examples import EMPTY, PromptFormat, Row, RowBranch

MAX_REPLY_TOKENS: Final = 48
_MAX_BRANCHES: Final = 48


@dataclass
class ReadOutcome:
    """The state of reading for one question, and its result."""

    question: Question
    temperature: float
    memory: str = EMPTY
    answer: str = ""
    """Empty if the value was lost."""
    overwrites: int = 0
    """The number of steps that began with the value in memory."""
    risk: float = 0.0
    """Summed over these, the probability that sampling at the reader's temperature (1 if it is greedy) writes
    something else; divided by their number, the expected loss per overwrite."""
    lost_at: int | None = None
    """The step after which the value was no longer in memory."""

    @property
    def is_right(self) -> bool:
        """Whether the answer is the value, or "none" for an absent fact."""
        return self.answer == (self.question.value or EMPTY)

    def expected_at(self, step: int) -> str:
        """Return the expected memory."""
        value = self.question.value if step == self.question.fact_chunk else None
        return self.memory if self.memory != EMPTY else value or EMPTY

    def overwrite(self, step: int, reply: str, score: float) -> None:
        """Add a reply; `score` is the log of the probability to sample the expected one."""
        question = self.question
        if self.memory == question.value:
            self.overwrites += 1
            self.risk += -math.expm1(min(score, 0.0))
        self.memory = reply or self.memory
        is_past = question.fact_chunk is not None and step >= question.fact_chunk
        if question.value is not None and is_past and not _has_number(self.memory, question.value):
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
        """Logits (learned positions, V) of each branch, after the expected tokens before each position."""
        logits = self.policy.logits(collate([row]))
        return list(torch.split(logits, [len(branch.learned) for branch in row.branches]))

    def choose(self, logits: torch.Tensor, temperature: float) -> list[int]:
        """Return the policy's choice at each position."""
        if not temperature:
            return cast("list[int]", logits.argmax(-1).tolist())
        probabilities = (logits / temperature).softmax(-1)
        return cast("list[int]", torch.multinomial(probabilities, 1, generator=self.noise)[:, 0].tolist())

    def complete(self, trunk: list[int], requests: Sequence[ReplyRequest]) -> list[tuple[str, float]]:
        """Return the policy's replies to prompts that share a trunk (which may be empty).

        Each has the log of the probability that sampling gives the expected reply.
        """
        by_prompt: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        """Readers with the same prompt; those of the same temperature each have their own samples."""
        counts: Counter[tuple[tuple[int, ...], float]] = Counter()
        for number, request in enumerate(requests):
            prompt = tuple(request.prompt)
            by_prompt[prompt, counts[prompt, request.temperature]].append(number)
            counts[prompt, request.temperature] += 1
        replies: dict[int, list[int]] = {}
        scores: dict[int, float] = {}
        groups = list(by_prompt.values())
        for start in range(0, len(groups), _MAX_BRANCHES):
            group = groups[start : start + _MAX_BRANCHES]
            first_requests = [requests[numbers[0]] for numbers in group]
            branches = [RowBranch.of(r.prompt, r.expected, bool(trunk), "read", 1.0) for r in first_requests]
            logits = self.logits(Row(trunk or [0], branches))
            for numbers, request, row in zip(group, first_requests, logits, strict=True):
                for number in numbers:
                    replies[number] = self._agreeing_prefix(requests[number], row)
                    scores[number] = _log_probability(row, request.expected, requests[number].temperature)
        unfinished = [number for number, ids in replies.items() if self._is_unfinished(ids)]
        for start in range(0, len(unfinished), _MAX_BRANCHES):
            part = unfinished[start : start + _MAX_BRANCHES]
            prompts = [trunk + requests[number].prompt for number in part]
            temperatures = [requests[number].temperature for number in part]
            self._generate(prompts, [replies[number] for number in part], temperatures)
        return [(self._decode(replies[number]), scores[number]) for number in range(len(requests))]

    def _agreeing_prefix(self, request: ReplyRequest, logits: torch.Tensor) -> list[int]:
        """Return the policy's choices up to the first token that differs from the expected reply."""
        choices, expected = self.choose(logits, request.temperature), request.expected
        agreed = next((i for i, (a, b) in enumerate(zip(choices, expected, strict=True)) if a != b), len(expected))
        return choices[: min(agreed + 1, MAX_REPLY_TOKENS)]

    def _is_unfinished(self, ids: list[int]) -> bool:
        return ids[-1] != self.end and len(ids) < MAX_REPLY_TOKENS

    def _decode(self, ids: list[int]) -> str:
        return self.form.encoding.decode([token for token in ids if token != self.end]).strip()

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], replies: list[list[int]], temperatures: list[float]) -> None:
        """Append the rest of each reply to its beginning."""
        rows = [prompt + ids for prompt, ids in zip(prompts, replies, strict=True)]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = None
        while any(map(self._is_unfinished, replies)):
            options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = self.policy(tokens, attention_mask=mask, position_ids=positions, **options)
            choices = [self.choose(*pair)[0] for pair in zip(out.logits, temperatures, strict=True)]
            for ids, token in zip(replies, choices, strict=True):
                if self._is_unfinished(ids):
                    ids.append(token)
            cache = out.past_key_values
            tokens = torch.tensor(choices)[:, None]
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=-1)
            positions = positions[:, -1:] + 1

    def read(
        self, questions: Sequence[Question], temperatures: Sequence[float], *, guarded: bool = False
    ) -> list[list[ReadOutcome]]:
        """Read every question's document to its end and answer: the outcomes at each temperature.

        With `guarded`, a memory with an invented word is not kept (`UpdateRules.invented`).
        """
        by_temperature = [
            [ReadOutcome(question, temperature) for question in questions] for temperature in temperatures
        ]
        outcomes = [outcome for group in by_temperature for outcome in group]
        for step in range(len(questions[0].chunks) if questions else 0):
            by_chunk: dict[str, list[ReadOutcome]] = defaultdict(list)
            for outcome in outcomes:
                if outcome.lost_at is None:
                    by_chunk[outcome.question.chunks[step]].append(outcome)
            for chunk, readers in by_chunk.items():
                requests = []
                for outcome in readers:
                    prompt = self.form.question(outcome.memory, outcome.question.problem)
                    expected = self.form.reply(outcome.expected_at(step))
                    requests.append(ReplyRequest(prompt, expected, outcome.temperature))
                replies = self.complete(self.form.trunk(chunk), requests)
                for outcome, (reply, score) in zip(readers, replies, strict=True):
                    is_rejected = guarded and self._is_invented(reply, chunk, outcome)
                    outcome.overwrite(step, outcome.memory if is_rejected else reply, score)
        readers = [outcome for outcome in outcomes if outcome.lost_at is None]
        requests = []
        for outcome in readers:
            prompt = self.form.answer_prompt(outcome.memory, outcome.question.problem)
            requests.append(ReplyRequest(prompt, self.form.boxed(outcome.memory), outcome.temperature))
        for outcome, (answer, _) in zip(readers, self.complete([], requests), strict=True):
            outcome.answer = answer.partition("\\boxed{")[2].rpartition("}")[0].strip()
        return by_temperature

    def _is_invented(self, reply: str, chunk: str, outcome: ReadOutcome) -> bool:
        """Whether a reply has a word that is not in the reader's prompt."""
        prompt = (self.form.literal, chunk, outcome.memory, outcome.question.problem)
        return reply != outcome.memory and invented_word(reply, prompt) is not None


def _log_probability(logits: torch.Tensor, tokens: list[int], temperature: float) -> float:
    """Return the log-probability of sampling these tokens, at temperature 1 if the choice is greedy."""
    scores = (logits / (temperature or 1)).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
    return math.fsum(scores[:, 0].tolist())


def _has_number(memory: str, value: str) -> bool:
    """Whether the value is there as a whole number: with more digits next to it, it is another number."""
    return re.search(rf"(?<!\d){re.escape(value)}(?!\d)", memory) is not None


def default_prose() -> str:
    """Return the standard library's own reference text, which training never saw."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    return "\n\n".join(topics[name] for name in sorted(topics))
