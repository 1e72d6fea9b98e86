"""The questions of each iteration: documents grow longer as the policy gets them right."""

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

HELD_OUT_START: Final = 1_000_000_000
"""The first index of samples for measuring. Training uses lower ones."""
QUESTIONS_PER_COLLECTION: Final = 100_000
"""The number of sample indices that each collection may use."""
MAX_COLLECTIONS: Final = HELD_OUT_START // QUESTIONS_PER_COLLECTION


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Lengths, shortest first: stage n uses the first n + 1 of them.

    Half of a stage's generated questions have its longest length, the others any of its lengths. Questions of data
    files are asked epoch by epoch. The next stage begins when the mean reward of reads of the longest length is high
    enough in a collection. Stages depend only on the journal, and questions on the journal, the collection and their
    index: a loop that was killed asks the same ones again.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    advance_at: float
    """The mean reward, over a collection's reads of the longest length, that begins the next stage."""
    seed: int = 0
    split: QuestionSplit | None = None
    """The questions for training, if the tasks have a known number of them."""
    min_first_questions: int = 1
    """The minimum number of training questions in the first stage; stages with fewer are skipped, except the last."""

    def find_stage(self, records: Sequence[CollectionRecord]) -> int:
        """Return the stage after these collections, counted from 0."""
        last = len(self.lengths) - 1
        stage = 0
        if self.split is not None:
            while stage < last and self.split.epoch_size(self.lengths[: stage + 1]) < self.min_first_questions:
                stage += 1
        for record in records:
            longest = record.by_length.get(self.lengths[stage])
            if record.stage == stage and longest is not None and longest.reward >= self.advance_at:
                stage = min(stage + 1, last)
        return stage

    def epochs(self, records: Sequence[CollectionRecord], stage: int) -> float | None:
        """Return the number of times that every question of a stage was asked; None if tasks make new ones."""
        if self.split is None:
            return None
        return _count_questions(records, stage) / self.split.epoch_size(self.lengths[: stage + 1])

    def draw_questions(self, collection: int, stage: int, records: Sequence[CollectionRecord] = ()) -> Iterator[Sample]:
        """Yield the questions of a collection, up to its maximum.

        Args:
            collection: the index of the collection.
            stage: the stage that determines the lengths.
            records: the collections before it.

        Raises:
            TrainingError: there were too many collections before; their questions would be held-out ones.
        """
        if not 0 <= collection < MAX_COLLECTIONS:
            raise TrainingError(
                f"collection {collection:,} is out of range: the last one is {MAX_COLLECTIONS - 1:,}",
                hint="Start another loop with the finished policy and another seed.",
            )
        lengths = self.lengths[: stage + 1]
        if self.split is not None:
            # No question repeats within a collection, unless an epoch ends in it.
            questions = self.split.draw_questions(lengths, skip=_count_questions(records[:collection], stage))
            yield from islice(questions, self.split.epoch_size(lengths))
            return
        for index in range(QUESTIONS_PER_COLLECTION):
            rng = random.Random(f"{self.seed}/{collection}/{index}")
            length = lengths[-1] if rng.random() < 0.5 else rng.choice(lengths)
            yield rng.choice(self.tasks).sample(length, collection * QUESTIONS_PER_COLLECTION + index)

    def held_out_samples(self, length: int, count: int) -> list[Sample]:
        """Return the questions to measure a length with: `count`, or as many as a data file has."""
        if self.split is not None:
            return self.split.held_out_samples(length, count)
        return [self.tasks[index % len(self.tasks)].sample(length, HELD_OUT_START + index) for index in range(count)]


def _count_questions(records: Sequence[CollectionRecord], stage: int) -> int:
    return sum(record.questions for record in records if record.stage == stage)
