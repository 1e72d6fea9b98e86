"""RULER's counting tasks: the ten most common words of a list, and the three most frequent coded words.

Small variants: `cwe` asks for five words, which occur 6 times among words that occur once, at any length, and its
worked example has five and five words instead of ten and ten; `fwe` has words of four letters, and a vocabulary of a
twentieth of the length instead of a fiftieth.
"""

from __future__ import annotations

import math
import random
import string
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import ClassVar

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import vocabulary
from memagent_evaluation.tasks.fitting import closest_subset
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.seeding import Order
from memagent_evaluation.tasks.shuffled_words import ShuffledWords, longest

LISTS = ("cwe", "fwe")
NOISE_WORD = "..."

_POOL = 40
_SHORT_LENGTH = 4096
_NUMBER_WORDS = {5: "five", 10: "ten"}
_CWE_ANSWER_TOKENS, _FWE_ANSWER_TOKENS = 120, 50
_ZETA_OF_2 = math.pi**2 / 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWordsTask(GeneratedTask):
    """Common words: a few words occur often in a numbered list, all others equally rarely.

    The rare words are single English words as long as the word lists suffice, and pairs of an adjective and a noun in
    longer lists; common ones are of the same kind. The worked example is before the list, in the document.

    Attributes:
        common: how many words are asked for.
    """

    whole_document: ClassVar[bool] = True

    common: int = 10

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the common words and as many others.
            MissingExtraError: the word lists are not installed.
        """
        room, missing = self.room(length, self.question), list[int]()
        for size, word in _vocabularies():
            words = _Words(size, word, self.chance(length, index))
            for shown, often, rarely in self._examples(length):
                ranks = iter(range(len(words)))
                example = self._example([words[next(ranks)] for _ in range(shown)], often, rarely)
                gold = tuple(words[next(ranks)] for _ in range(self.common))
                drafts = _CommonWordsDrafts(self, length, index, words, gold, example, first_rank=shown + self.common)
                if drafts.least > room:
                    missing.append(drafts.least - room)
                    continue
                found = longest(room, drafts.draft, self.settings.tokenizer, gold)
                if found is not None:
                    text, needles = found
                    return Sample(self, length, index, self.question, gold, text.pieces, needles)
        raise self.too_short(length, min(missing, default=self.common))

    @property
    def question(self) -> str:
        """The same for all samples of a size."""
        number = _NUMBER_WORDS[self.common]
        return f"Which are the {number} words that occur most often in the list in question? Name all {number}."

    def times(self, length: int) -> tuple[int, int]:
        """How often common words and the others occur."""
        return (6, 1) if self._is_short(length) else (30, 3)

    def _examples(self, length: int) -> list[tuple[int, int, int]]:
        """How many words the worked example has, and how often its common ones and its others occur; the first that
        there is room for is taken.

        As RULER's: 190 entries, or 40 in lists below 4096 tokens, and here where a tokenizer needs more for the longer.
        """
        short = (2 * self.common, 3, 1)
        return [short] if self._is_short(length) else [(4 * self.common, 10, 3), short]

    def _is_short(self, length: int) -> bool:
        return length < _SHORT_LENGTH or self.settings.small

    def _example(self, words: list[str], often: int, rarely: int) -> str:
        frequent, rare = words[: self.common], words[self.common :]
        entries = [*frequent * often, *rare * rarely]
        random.Random(" ".join(words)).shuffle(entries)
        listed = " ".join(f"{place}. {word}" for place, word in enumerate(entries, 1))
        answer = ", ".join(frequent)
        number = _NUMBER_WORDS[self.common]
        return (
            f"An example of a list: {listed}\nThe {number} words that occur most often in the example are: "
            f"{answer}.\n\nThe list in question: "
        )


class _Words:
    """Words in a random order: `size` of them, of which `word` gives each."""

    def __init__(self, size: int, word: Callable[[int], str], chance: random.Random) -> None:
        self._order = Order(size, chance)
        self._word = word

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, rank: int) -> str:
        return self._word(self._order[rank])


def _vocabularies() -> Iterator[tuple[int, Callable[[int], str]]]:
    """How many words there are, and each by number: adjectives, nouns and verbs; then millions of pairs."""
    words = vocabulary.all_words()
    yield len(words), words.__getitem__
    adjectives, nouns = vocabulary.words("adjective"), vocabulary.words("noun")
    yield len(adjectives) * len(nouns), lambda at: f"{adjectives[at // len(nouns)]}-{nouns[at % len(nouns)]}"


class _CommonWordsDrafts:
    """Lists of estimated sizes: the estimate is the sum of the tokens of words and numbers."""

    def __init__(
        self,
        task: CommonWordsTask,
        length: int,
        index: int,
        words: _Words,
        gold: tuple[str, ...],
        header: str,
        first_rank: int,
    ) -> None:
        self._words = words
        self._gold = gold
        self._header = header
        self._order = f"{task.settings.seed}/{task.name}/{length}/{index}/order"
        self._count = task.settings.tokenizer.count
        self._often, self._rarely = task.times(length)
        self._first_rank = first_rank
        self._least_words = task.common
        places = range(1, len(gold) * self._often + 1)
        self._fixed = self._count(header) + sum(self._numbering(place) for place in places)
        self._fixed += self._often * sum(self._word(word) for word in gold)

    @property
    def least(self) -> int:
        """Tokens of a list with as many rare words as common ones, or slightly fewer."""
        return self._fixed + sum(cost for _, cost in zip(range(self._least_words), self._costs(), strict=False))

    def draft(self, target: int) -> ShuffledWords | None:
        """A list of about `target` tokens; None if there are not enough words."""
        left = target - self._fixed
        costs = self._costs()
        taken = 0
        for cost in costs:
            left -= cost
            taken += 1
            if left < _POOL // 2 * cost and taken >= self._least_words:
                break
        pool = [cost for _, cost in zip(range(_POOL), costs, strict=False)]
        if len(pool) < _POOL or left < 0:
            return None
        first = self._first_rank
        extra = [first + taken + place for place in closest_subset(pool, left)]
        common, often, rarely = len(self._gold) * self._often, self._often, self._rarely

        def word(entry: int) -> str:
            if entry < common:
                return self._gold[entry // often]
            number = (entry - common) // rarely
            return self._words[first + number] if number < taken else self._words[extra[number - taken]]

        size = common + (taken + len(extra)) * rarely
        return ShuffledWords(self._header, size, word, numbered=True, order=self._order)

    def _costs(self) -> Iterator[int]:
        """Tokens per additional rare word."""
        place = len(self._gold) * self._often
        for rank in range(self._first_rank, len(self._words)):
            numbering = sum(self._numbering(place + number) for number in range(1, self._rarely + 1))
            yield numbering + self._rarely * self._word(self._words[rank])
            place += self._rarely

    def _numbering(self, place: int) -> int:
        return self._count(f" {place}.")

    def _word(self, word: str) -> int:
        return self._count(f" {word}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentWordsTask(GeneratedTask):
    """Frequent coded words: random letters whose frequencies fall with the square of their rank; rank 1 is dots.

    The rest of a length, due to the ranks' rounded counts, is filled with words of the next ranks, once each.

    Attributes:
        letters: how long a coded word is.
        tokens_per_word: how many tokens of the length there are for each word of the vocabulary.
    """

    whole_document: ClassVar[bool] = True

    letters: int = 6
    tokens_per_word: int = 50

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        question = (
            "The text consists of coded words and of dots. Leaving out the dots, which three coded words occur most "
            "often in it?"
        )
        room = self.room(length, question)
        ranks = min(length // self.tokens_per_word, math.isqrt(max(room, 0)) + _POOL)
        words = [NOISE_WORD, *self._words(max(ranks, 5) - 1, self.chance(length, index))]
        order = f"{self.settings.seed}/{self.name}/{length}/{index}/order"
        drafts = _FrequentWordsDrafts(words, order, self.settings)
        missing = max(drafts.least - room, 5 * self.tokens_per_word - length)
        if missing > 0:
            raise self.too_short(length, missing)
        gold = tuple(words[1:4])
        found = longest(room, drafts.draft, self.settings.tokenizer, gold)
        if found is None:
            raise self.too_short(length, 1)
        text, needles = found
        return Sample(self, length, index, question, gold, text.pieces, needles)

    def _words(self, number: int, chance: random.Random) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < number:
            found["".join(chance.choices(string.ascii_lowercase, k=self.letters))] = None
        return list(found)


class _FrequentWordsDrafts:
    """Coded texts of estimated sizes."""

    def __init__(self, words: list[str], order: str, settings: TaskSettings) -> None:
        self._words = words
        self._order = order
        self._costs = [settings.tokenizer.count(f" {word}") for word in words]
        # The fewest words for which ranks 2 to 5 occur differently often, so that there is one answer.
        self._least_size = next(size for size in count(1) if len(set(self._counts(size)[1:5])) == 4)

    @property
    def least(self) -> int:
        """Tokens of the smallest text that has one answer."""
        return self._tokens(self._least_size)

    def draft(self, target: int) -> ShuffledWords | None:
        """A text of about `target` tokens; None if that is too small."""
        if target < self.least:
            return None
        size = bisect_right(range(max(target, 1) * 4), target, lo=1, key=self._tokens) - 1
        counts = self._counts(size)
        ranks = len(counts)
        spare = self._costs[ranks : ranks + _POOL]
        extra = closest_subset(spare, target - self._tokens(size))
        words = [*self._words[:ranks], *(self._words[ranks + place] for place in extra)]
        ends = list(accumulate([*counts, *(1 for _ in extra)]))

        def word(entry: int) -> str:
            return words[bisect_right(ends, entry)]

        return ShuffledWords("", ends[-1], word, numbered=False, order=self._order)

    def _counts(self, size: int) -> list[int]:
        """How often each rank occurs among `size` words, down to the last that occurs."""
        ranks = min(len(self._words), math.isqrt(int(size / _ZETA_OF_2)) + 1)
        counts = [int(size / (_ZETA_OF_2 * rank * rank)) for rank in range(1, ranks + 1)]
        while counts and not counts[-1]:
            counts.pop()
        return counts

    def _tokens(self, size: int) -> int:
        return sum(number * cost for number, cost in zip(self._counts(size), self._costs, strict=False))


def list_task(name: str, settings: TaskSettings) -> CommonWordsTask | FrequentWordsTask:
    """One of `LISTS`."""
    if name == "cwe":
        if settings.small:
            return CommonWordsTask(name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS, common=5)
        return CommonWordsTask(name=name, settings=settings, answer_tokens=_CWE_ANSWER_TOKENS)
    if settings.small:
        return FrequentWordsTask(
            name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS, letters=4, tokens_per_word=20
        )
    return FrequentWordsTask(name=name, settings=settings, answer_tokens=_FWE_ANSWER_TOKENS)
