"""RULER's counting tasks: the ten most common words of a list, and the three most frequent coded words.

As in RULER, a list grows until its estimated length would be too long; the sample states the length it reached. There
are no small variants: `--small` changes nothing.
"""

from __future__ import annotations

import math
import random
import string
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

from memagent_evaluation.samples import Needle, Sample, TaskSettings
from memagent_evaluation.tasks.generated import GeneratedTask
from memagent_evaluation.tasks.needles import draw_word_pair, list_all_words

LIST_TASK_NAMES = ("cwe", "fwe")
NOISE_WORD = "..."

_SHORT_LENGTH = 4096
_WORDS_PER_PIECE = 64
_CWE_ANSWER_TOKENS, _FWE_ANSWER_TOKENS = 120, 50
_COMMON_WORD_COUNT = 10
_CODED_WORD_LETTERS = 6
"""The length of a coded word."""
_TOKENS_PER_WORD = 50
"""The tokens of a text per word of its vocabulary."""
_ZETA_OF_2 = math.pi**2 / 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWordsTask(GeneratedTask):
    """Common words: a few words occur often in a numbered list, all others equally rarely.

    The rare words are single English words as long as the word lists suffice, and pairs of an adjective and a noun in
    longer lists; common ones are of the same kind. The worked example is before the list, in the document: 190 entries,
    or 40 in lists below 4096 tokens.
    """

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the common words and as many others.
            MissingExtraError: the word lists are not installed.
        """
        is_short = length < _SHORT_LENGTH
        common_repeats, rare_repeats = (6, 1) if is_short else (30, 3)
        count_tokens = self.settings.tokenizer.count
        budget = self.compute_document_budget(length, self.question)
        for words in (_draw_words(self.make_sample_rng(length, index), pairs=pairs) for pairs in (False, True)):
            header = self._make_example(
                list(islice(words, (2 if is_short else 4) * _COMMON_WORD_COUNT)), is_short=is_short
            )
            gold = tuple(islice(words, _COMMON_WORD_COUNT))
            tokens = count_tokens(header) + sum(
                count_tokens(f" {position}. {word}") for position, word in enumerate(gold * common_repeats, 1)
            )
            rare_words: list[str] = []
            for word in words:
                position = _COMMON_WORD_COUNT * common_repeats + (len(rare_words) + 1) * rare_repeats
                tokens += rare_repeats * count_tokens(f" {position}. {word}")
                if tokens > budget and len(rare_words) >= _COMMON_WORD_COUNT:
                    make_words = partial(_repeat_words, gold, common_repeats, rare_words, rare_repeats)
                    return _fit_longest(
                        self, length, index, gold, make_words, range(_COMMON_WORD_COUNT, len(rare_words) + 1), header
                    )
                rare_words.append(word)
        raise self.make_length_error(length, _COMMON_WORD_COUNT)

    @property
    def question(self) -> str:
        """The question, the same for all samples."""
        return "Which are the ten words that occur most often in the list in question? Name all ten."

    def _make_example(self, words: list[str], *, is_short: bool) -> str:
        common_words, rare_words = words[:_COMMON_WORD_COUNT], words[_COMMON_WORD_COUNT:]
        entries = [*common_words * 3, *rare_words] if is_short else [*common_words * 10, *rare_words * 3]
        example = "".join(WordList("", entries, is_numbered=True, seed=" ".join(words)).iter_pieces())
        return (
            f"An example of a list: {example}\nThe ten words that occur most often in the "
            f"example are: {', '.join(common_words)}.\n\nThe list in question: "
        )


def _draw_words(rng: random.Random, *, pairs: bool) -> Iterator[str]:
    """Yield distinct words in random order: each adjective, noun and verb once, or pairs without end."""
    if not pairs:
        yield from rng.sample(list_all_words(), len(list_all_words()))
        return
    used_words: set[str] = set()
    for word in iter(partial(draw_word_pair, rng), None):
        if word not in used_words:
            used_words.add(word)
            yield word


def _repeat_words(
    gold: Sequence[str], common_repeats: int, rare_words: Sequence[str], rare_repeats: int, rare_word_count: int
) -> list[str]:
    """Return the words of a list: all common words, and the first `rare_word_count` rare ones, repeated."""
    return [*gold] * common_repeats + [*rare_words[:rare_word_count]] * rare_repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentWordsTask(GeneratedTask):
    """Frequent coded words: random letters whose frequencies fall with the square of their rank; rank 1 is dots."""

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        budget = self.compute_document_budget(length, self.question)
        ranks = max(min(length // _TOKENS_PER_WORD, math.isqrt(max(budget, 0)) + 1), 5)
        words = [NOISE_WORD, *self._draw_coded_words(ranks - 1, self.make_sample_rng(length, index))]
        word_tokens = [self.settings.tokenizer.count(f" {word}") for word in words]

        def count_list_tokens(size: int) -> int:
            return sum(
                frequency * tokens
                for frequency, tokens in zip(_compute_frequencies(size, ranks), word_tokens, strict=False)
            )

        def make_words(size: int) -> list[str]:
            frequencies = _compute_frequencies(size, ranks)
            return [word for word, frequency in zip(words, frequencies, strict=False) for _ in range(frequency)]

        # The smallest list in which the frequencies of ranks 2 to 5 differ, so that there is one answer.
        min_size = next(size for size in count(1) if len(set(_compute_frequencies(size, ranks)[1:5])) == 4)
        missing = max(count_list_tokens(min_size) - budget, 5 * _TOKENS_PER_WORD - length)
        if missing > 0:
            raise self.make_length_error(length, missing)
        max_size = bisect_right(range(4 * budget), budget, lo=1, key=count_list_tokens)
        return _fit_longest(self, length, index, tuple(words[1:4]), make_words, range(min_size, max_size))

    @property
    def question(self) -> str:
        """The question, the same for all samples."""
        return (
            "The text consists of coded words and of dots. Leaving out the dots, which three coded words occur most "
            "often in it?"
        )

    def _draw_coded_words(self, count: int, rng: random.Random) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=_CODED_WORD_LETTERS))] = None
        return list(words)


def _compute_frequencies(size: int, ranks: int) -> list[int]:
    """Return the frequencies of the ranks that occur among `size` words, the first rank first."""
    frequencies = (int(size / (_ZETA_OF_2 * rank * rank)) for rank in range(1, ranks + 1))
    return [frequency for frequency in frequencies if frequency]


@dataclass(frozen=True, slots=True)
class WordList:
    """A text of words in random order."""

    header: str
    words: Sequence[str]
    is_numbered: bool
    seed: str
    """Determines the order of the words."""

    def iter_pieces(self) -> Iterator[str]:
        """Yield the text in pieces of some words each."""
        entries = self._iter_entries()
        separator = self.header
        while block := list(islice(entries, _WORDS_PER_PIECE)):
            yield separator + " ".join(block)
            separator = " "

    def find_needles(self, gold: Sequence[str]) -> tuple[Needle, ...]:
        """Return the first occurrence of each gold word as a needle."""
        first_occurrences: dict[str, tuple[str, int]] = {}
        position = len(self.header)
        for entry in self._iter_entries():
            word = entry.rpartition(" ")[2]
            if word in gold:
                first_occurrences.setdefault(word, (entry, position))
            position += len(entry) + 1
        return tuple(Needle(entry, word, start / (position - 1)) for word, (entry, start) in first_occurrences.items())

    def _iter_entries(self) -> Iterator[str]:
        words = random.Random(self.seed).sample(self.words, len(self.words))
        return (f"{position}. {word}" if self.is_numbered else word for position, word in enumerate(words, 1))


def _fit_longest(
    task: CommonWordsTask | FrequentWordsTask,
    length: int,
    index: int,
    gold: tuple[str, ...],
    make_words: Callable[[int], list[str]],
    sizes: range,
    header: str = "",
) -> Sample:
    """Return the sample with the longest list that fits. With a header, the list is numbered.

    The search goes down from the largest of `sizes`, which is an estimate.

    Raises:
        EvaluationError: not even the smallest size fits.
    """
    budget = task.compute_document_budget(length, task.question)
    order_seed = f"{task.settings.seed}/{task.name}/{length}/{index}/order"
    size = sizes.stop - 1
    while True:
        text = WordList(header, make_words(size), is_numbered=bool(header), seed=order_seed)
        tokens = task.settings.tokenizer.count("".join(text.iter_pieces()))
        if tokens <= budget:
            needles = text.find_needles(gold)
            return Sample(task, length, index, task.question, gold, text.iter_pieces, needles, length - budget + tokens)
        size -= max(1, (tokens - budget) * size // tokens)
        if size < sizes.start:
            raise task.make_length_error(length, tokens - budget)


def make_list_task(name: str, settings: TaskSettings) -> CommonWordsTask | FrequentWordsTask:
    """Return the task of one of `LIST_TASK_NAMES`."""
    if name == "cwe":
        return CommonWordsTask(name=name, settings=settings, answer_tokens=_CWE_ANSWER_TOKENS)
    return FrequentWordsTask(name=name, settings=settings, answer_tokens=_FWE_ANSWER_TOKENS)
