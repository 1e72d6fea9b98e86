"""Plans documents of an exact number of tokens: which insertions are between which units of a haystack, in one pass.

The rule: never more tokens than requested; fewer only if no choice of units fills the rest. Units are taken in order
until about twenty are missing; these are chosen among the following ones, early ones first, so that their sum is the
rest, which is nearly always possible. The whole is then counted with the tokenizer, and the choice is corrected if
tokens merge across units.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from memagent_evaluation.samples import Needle
from memagent_evaluation.tasks.counting import TokenCounter
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import Tokenizer

_POOL_SIZES = (160, 3200)
_LAST_SHARE = 1 / 8
_CORRECTIONS = 24


class Haystack(Protocol):
    """The parts of a document besides insertions."""

    def units(self) -> Iterator[str]:
        """Sentences, lines or passages without end, the same at each call."""
        ...

    def piece(self, position: int, text: str) -> str:
        """The text of a unit or an insertion as the `position`-th part of the document."""
        ...


@dataclass(frozen=True, slots=True)
class Insertion:
    """Something to put between a haystack's units."""

    text: str
    depth: float
    """Its place: after this share of the haystack's tokens (or of its units, if these are counted), 0 to 1."""
    gold: str | None = None
    """The needle's gold string; None for a decoy, which is not evidence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A planned document: with the haystack, the text can be made from it any number of times."""

    insertions: tuple[Insertion, ...]
    """In the document's order."""
    slots: tuple[int, ...]
    """The index of the unit before which each insertion is."""
    taken: int
    """How many units from the haystack's beginning are used."""
    chosen: tuple[int, ...]
    """Which of the following units are used too, counted from the first of them."""

    def pieces(self, haystack: Haystack) -> Iterator[str]:
        """The document's parts; white space at its end is left out."""
        held = ""
        for text in _framed(haystack, self.insertions, self.slots, self._units(haystack)):
            if held:
                yield held
            held = text
        if held := held.rstrip():
            yield held

    def needles(self, haystack: Haystack) -> tuple[Needle, ...]:
        """The insertions with gold strings, and the places where they begin."""
        inserted = {
            slot + number: insertion
            for number, (insertion, slot) in enumerate(zip(self.insertions, self.slots, strict=True))
        }
        found: list[tuple[Insertion, int]] = []
        characters = 0
        for position, piece in enumerate(self.pieces(haystack)):
            insertion = inserted.get(position)
            if insertion is not None and insertion.gold is not None:
                found.append((insertion, characters + max(piece.find(insertion.text), 0)))
            characters += len(piece)
        return tuple(Needle(insertion.text, insertion.gold or "", start / characters) for insertion, start in found)

    def _units(self, haystack: Haystack) -> Iterator[str]:
        units = haystack.units()
        yield from itertools.islice(units, self.taken)
        if self.chosen:
            pool = list(itertools.islice(units, self.chosen[-1] + 1))
            for place in self.chosen:
                yield pool[place]


def least_tokens(haystack: Haystack, insertions: Sequence[Insertion], tokenizer: Tokenizer) -> int:
    """How many tokens a document with only the insertions has."""
    pieces = (haystack.piece(place, each.text) for place, each in enumerate(_in_order(insertions)))
    return tokenizer.count("".join(pieces).rstrip())


def fit(haystack: Haystack, insertions: Sequence[Insertion], budget: int, tokenizer: Tokenizer) -> Layout:
    """Plan a document of `budget` tokens.

    Raises:
        EvaluationError: no unit or insertion is short enough.
    """
    ordered = _in_order(insertions)
    for pool_size in _POOL_SIZES:
        layout = _Fitting(haystack, ordered, budget, tokenizer, pool_size).layout()
        if layout is not None:
            return layout
    raise EvaluationError(
        f"no part of the haystack fits a document of {budget} tokens",
        hint="Give a haystack of ordinary sentences, or ask for another length.",
    )


def _in_order(insertions: Sequence[Insertion]) -> tuple[Insertion, ...]:
    return tuple(sorted(insertions, key=lambda insertion: insertion.depth))


class _Fitting:
    """One attempt at a plan, with a number of units from which the last ones are chosen."""

    def __init__(
        self, haystack: Haystack, insertions: tuple[Insertion, ...], budget: int, tokenizer: Tokenizer, pool_size: int
    ) -> None:
        self.haystack = haystack
        self.insertions = insertions
        self.budget = budget
        self.tokenizer = tokenizer
        self.costs = [tokenizer.count(haystack.piece(0, insertion.text)) for insertion in insertions]
        self.hay_tokens = max(0, budget - sum(self.costs))
        self.counter = TokenCounter(tokenizer)
        self.slots: list[int] = []
        self.taken = 0
        self.units = haystack.units()
        self.pool = deque(itertools.islice(self.units, pool_size))
        self.pool_characters = sum(len(unit) for unit in self.pool)

    def layout(self) -> Layout | None:
        """The plan; None if too many units were taken, or no choice fits."""
        while self._stream_on():
            pass
        pool = list(self.pool)
        costs = [self.tokenizer.count(self.haystack.piece(self.taken, unit)) for unit in pool]
        target = self.budget - self.counter.total() - sum(self.costs[len(self.slots) :])
        best: tuple[int, Layout] | None = None
        tried: set[int] = set()
        for _ in range(_CORRECTIONS):
            while target in tried:
                target += 1
            tried.add(target)
            chosen = closest_subset(costs, max(target, 0))
            slots = self._slots([costs[place] for place in chosen])
            tokens = self._tokens([pool[place] for place in chosen], slots)
            if tokens <= self.budget and (best is None or tokens > best[0]):
                best = tokens, Layout(self.insertions, tuple(slots), self.taken, tuple(chosen))
            if tokens == self.budget or (tokens > self.budget and not chosen):
                break
            target += self.budget - tokens
        return best[1] if best is not None else None

    def _stream_on(self) -> bool:
        """Take one more unit, with the insertions before it, unless the rest must be chosen."""
        estimate = self.counter.estimate()
        done = len(self.slots)
        hay = estimate - sum(self.costs[:done])
        while done < len(self.insertions) and hay >= self.insertions[done].depth * self.hay_tokens:
            if self._must_choose(estimate, done):
                return False
            self.counter.add(self.haystack.piece(self.taken + done, self.insertions[done].text))
            self.slots.append(self.taken)
            done += 1
            estimate = self.counter.estimate()
        if self._must_choose(estimate, done):
            return False
        unit = self.pool.popleft()
        self.counter.add(self.haystack.piece(self.taken + done, unit))
        self.taken += 1
        self.pool_characters -= len(unit)
        following = next(self.units)
        self.pool.append(following)
        self.pool_characters += len(following)
        return True

    def _must_choose(self, estimate: float, done: int) -> bool:
        """Whether only an eighth of the pool fits in the rest: then the last units must be chosen."""
        last_units = self.counter.estimate(round(self.pool_characters * _LAST_SHARE)) - estimate
        return estimate + last_units > self.budget - sum(self.costs[done:])

    def _slots(self, costs: Sequence[int]) -> list[int]:
        """All slots, including those of the remaining insertions, if units with these costs are last."""
        slots = list(self.slots)
        tokens = self.hay_tokens - sum(costs)
        for number, cost in enumerate([*costs, None]):
            while len(slots) < len(self.insertions):
                if cost is not None and tokens < self.insertions[len(slots)].depth * self.hay_tokens:
                    break
                slots.append(self.taken + number)
            tokens += cost or 0
        return slots

    def _tokens(self, units: Sequence[str], slots: Sequence[int]) -> int:
        """Tokens of the whole with these units as its last ones."""
        done = len(self.slots)
        local = [slot - self.taken for slot in slots[done:]]
        pieces = _framed(self.haystack, self.insertions[done:], local, iter(units), first=self.taken + done)
        return self.counter.total("".join(pieces).rstrip())


def closest_subset(costs: Sequence[int], target: int) -> list[int]:
    """Indices of some of `costs`, ascending, with the largest sum that does not exceed `target`."""
    within = (1 << (target + 1)) - 1
    reachable = [1]
    for cost in costs:
        reachable.append(reachable[-1] | (reachable[-1] << cost) & within)
    left = reachable[-1].bit_length() - 1
    chosen = []
    for place in range(len(costs) - 1, -1, -1):
        if not reachable[place] >> left & 1:
            chosen.append(place)
            left -= costs[place]
    return chosen[::-1]


def _framed(
    haystack: Haystack, insertions: Sequence[Insertion], slots: Sequence[int], units: Iterator[str], first: int = 0
) -> Iterator[str]:
    """Units with insertions between them, in the document's order from part `first` on."""
    position = first
    done = 0
    for number, unit in enumerate(itertools.chain(units, [None])):
        while done < len(slots) and slots[done] <= number:
            yield haystack.piece(position, insertions[done].text)
            position, done = position + 1, done + 1
        if unit is not None:
            yield haystack.piece(position, unit)
            position += 1
