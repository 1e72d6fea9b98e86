"""Which questions an iteration asks: documents grow longer as the policy gets them right."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from memagent_evaluation.samples import Sample, Task
from memagent_training.rl.loop_journal import CollectionRecord
from memagent_training.rl.question_split import QuestionSplit
from memagent_training.training_errors import TrainingError

HELD_OUT: Final = 1_000_000_000
"""The first index of samples for measuring. Training uses lower ones."""
PER_COLLECTION: Final = 100_000
"""How many indices each collection has."""
COLLECTIONS: Final = HELD_OUT // PER_COLLECTION
"""How many collections there can be."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Lengths, shortest first: stage n uses the first n + 1 of them.

    Half of a stage's generated questions have its longest length, the others any of its lengths. Questions of data
    files are asked epoch by epoch. The next stage begins when the mean reward of reads of the longest length is high
    enough in a collection. Stages depend only on the journal, and questions on the journal, the collection and their
    number: a loop that was killed asks the same ones again.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    advance_at: float
    """The mean reward, over a collection's reads of the longest length, that begins the next stage."""
    seed: int = 0
    split: QuestionSplit | None = None
    """If the tasks have a known number of questions: which of them are for training."""
    min_first_questions: int = 1
    """The least number of training questions in the first stage, if there are so many; earlier stages are skipped."""

    def stage(self, records: Sequence[CollectionRecord]) -> int:
        """Return the stage after these collections, counted from 0."""
        last = len(self.lengths) - 1
        stage = 0
        while (
            self.split is not None
            and stage < last
            and self.split.epoch_size(self.lengths[: stage + 1]) < self.min_first_questions
        ):
            stage += 1
        for record in records:
            longest = record.by_length.get(self.lengths[stage])
            if record.stage == stage and longest is not None and longest.reward >= self.advance_at:
                stage = min(stage + 1, last)
        return stage

    def epochs(self, records: Sequence[CollectionRecord], stage: int) -> float | None:
        """Return how often every question of a stage was asked; None if there is no end of questions."""
        if self.split is None:
            return None
        return self._asked(records, stage) / self.split.epoch_size(self.lengths[: stage + 1])

    def _asked(self, records: Sequence[CollectionRecord], stage: int) -> int:
        return sum(record.asked for record in records if record.stage == stage)

    def questions(self, collection: int, stage: int, records: Sequence[CollectionRecord] = ()) -> Iterator[Sample]:
        """Yield the questions of a collection, up to its maximum.

        Args:
            collection: its number.
            stage: which lengths are asked.
            records: the collections before it.

        Raises:
            TrainingError: there were too many collections before; their questions would be held-out ones.
        """
        if not 0 <= collection < COLLECTIONS:
            raise TrainingError(
                f"there is no collection {collection:,}: questions for training end with {COLLECTIONS - 1:,}",
                hint="Start another loop with the finished policy and another seed.",
            )
        unlocked = self.lengths[: stage + 1]
        if self.split is not None:
            # No question repeats within a collection, unless an epoch ends in it.
            stream = self.split.questions(unlocked, self._asked(records[:collection], stage))
            yield from islice(stream, self.split.epoch_size(unlocked))
            return
        for number in range(PER_COLLECTION):
            rng = random.Random(f"{self.seed}/{collection}/{number}")
            length = unlocked[-1] if rng.random() < 0.5 else rng.choice(unlocked)
            yield rng.choice(self.tasks).sample(length, collection * PER_COLLECTION + number)

    def held_out(self, length: int, count: int) -> list[Sample]:
        """Return the questions to measure a length with: `count`, or as many as a data file has."""
        if self.split is not None:
            return self.split.held_out_samples(length, count)
        return [self.tasks[number % len(self.tasks)].sample(length, HELD_OUT + number) for number in range(count)]
