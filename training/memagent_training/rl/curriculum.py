"""Chooses the questions of each iteration: documents become longer as the policy answers more of them right.

Some questions of a data file are held out for measuring; the others are asked epoch by epoch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Final, Protocol, TypeAlias, runtime_checkable

from memagent_evaluation.data_files import FileTask
from memagent_evaluation.result_journal import load_results
from memagent_evaluation.samples import Sample, Task
from memagent_evaluation.systems import NO_DOCUMENT
from memagent_training.rl.loop_journal import CollectionRecord
from memagent_training.training_errors import TrainingError

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
"""The size of a document's digest, with which a question's key begins."""
Wording: TypeAlias = tuple[str, tuple[str, ...]]
"""A question and its gold answers: a question may be asked about several documents, with another answer in each."""


@runtime_checkable
class CountedQuestions(Task, Protocol):
    """A task with a known number of questions."""

    def count(self, length: int) -> int:
        """Return the number of samples of a length."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionSplit:
    """The training questions and the held-out questions of a finite task, as indices of samples by length."""

    task: CountedQuestions
    training: Mapping[int, Sequence[int]]
    held_out: Mapping[int, Sequence[int]]
    seed: int
    fingerprint: str
    """A digest of every question, of its document if that is in the file, and of whether it is held out."""

    @staticmethod
    def make(
        task: CountedQuestions,
        lengths: Sequence[int],
        measured_lengths: Sequence[int],
        *,
        fraction: float,
        seed: int,
        dropped_questions: Container[Wording] = (),
    ) -> QuestionSplit:
        """Split the questions of some lengths.

        Questions on one document stay together, except for the document at which the split falls. A question that is
        trained on at one length is held out at none.

        Args:
            task: a task with a known number of questions.
            lengths: the lengths to train on.
            measured_lengths: the lengths to measure; empty if nothing is measured.
            fraction: the fraction of each length's questions to hold out; 0 holds out none. Of two or more, at least
                one is held out.
            seed: determines the split and every epoch's order.
            dropped_questions: questions that are neither asked nor held out.

        Raises:
            TrainingError: a length has no question, or none is left for training or for measuring.
            EvaluationError: a question cannot be read.
        """
        indices_by_length = {
            length: _make_keys(task, length, dropped_questions)
            for length in dict.fromkeys((*lengths, *measured_lengths))
        }
        all_keys: set[bytes] = set()
        held_out_keys: set[bytes] = set()
        for length in lengths:
            ordered_keys = sorted(indices_by_length[length], key=partial(_draw_rank, f"{seed}".encode()))
            held_out_count = max(len(ordered_keys) > 1, round(fraction * len(ordered_keys))) if fraction else 0
            missing_count = max(0, held_out_count - sum(key in held_out_keys for key in ordered_keys))
            held_out_keys.update([key for key in ordered_keys if key not in all_keys][:missing_count])
            all_keys.update(ordered_keys)
            if held_out_keys.issuperset(ordered_keys):
                raise _make_supply_error(task, length, len(ordered_keys), fraction, has_dropped=bool(dropped_questions))
        training_keys = all_keys - held_out_keys
        training, held_out = (
            {
                length: [index for key, index in index_by_key.items() if (key in training_keys) == is_trained]
                for length, index_by_key in indices_by_length.items()
            }
            for is_trained in (True, False)
        )
        empty_lengths = [length for length in measured_lengths if not held_out[length]]
        if empty_lengths and (len(empty_lengths) == len(measured_lengths) or not set(empty_lengths).issubset(lengths)):
            raise TrainingError(
                f"no question of length {empty_lengths[0]:,} is held out to measure with",
                hint="Add questions, hold some out (--held-out 0.1), or measure nothing (--measure-every 0).",
            )
        digest = hashlib.sha256()
        for index_by_key in indices_by_length.values():
            for key in index_by_key:
                digest.update(key + bytes([key in training_keys]))
        return QuestionSplit(task, training, held_out, seed, digest.hexdigest()[:16])

    def count_epoch_questions(self, lengths: Sequence[int]) -> int:
        """Return the number of training questions of these lengths."""
        return sum(len(self.training[length]) for length in lengths)

    def draw_questions(self, lengths: Sequence[int], *, skip: int = 0) -> Iterator[Sample]:
        """Yield the training questions of some lengths, each once per epoch, in another order in each epoch.

        Args:
            lengths: some of the lengths that were split.
            skip: the number of questions of these lengths that were already asked.
        """
        samples = [(length, index) for length in lengths for index in self.training[length]]
        first_epoch, start = divmod(skip, len(samples))
        for epoch in count(first_epoch):
            order = random.Random(f"{self.seed}/{lengths[-1]}/{epoch}").sample(samples, len(samples))
            for length, index in order[start if epoch == first_epoch else 0 :]:
                yield self.task.sample(length, index)


def find_questions_answered_without_document(results: Path) -> frozenset[Wording]:
    """Return the questions that the system "no_document" answered right at least once in an evaluation.

    Raises:
        EvaluationError: there are no results there.
        TrainingError: the results have no answers without the document.
    """
    rows = [row for row in load_results(results).rows if row.system == NO_DOCUMENT]
    if not rows:
        raise TrainingError(
            f"{results} has no answers without the document",
            hint=f"Evaluate them first: memagent eval TASK --data FILE --systems {NO_DOCUMENT} --out {results}.",
        )
    return frozenset((row.question, row.gold) for row in rows if row.strict == 1)


def _make_keys(task: CountedQuestions, length: int, dropped_questions: Container[Wording]) -> dict[bytes, int]:
    """Return the index of each question by its key; keys of questions on one document of a file begin with its digest.

    Raises:
        TrainingError: a question of a file is asked twice on one document.
    """
    keys: dict[bytes, int] = {}
    for index in range(task.count(length)):
        sample = task.sample(length, index)
        if (sample.question, sample.gold) in dropped_questions:
            continue
        # Documents that are made from a file's paragraphs differ between lengths; the question does not.
        document = "".join(sample.text()) if isinstance(task, FileTask) else ""
        key = _hash_text(document) + _hash_text(sample.question)
        if key in keys:
            raise TrainingError(
                f"the questions {keys[key]} and {index} of length {length:,} in {getattr(task, 'source', task.name)} "
                f"are the same, on the same document: {sample.question[:80]!r}",
                hint="Take one of them out: a question that is trained on must not be among those held out.",
            )
        keys[key] = index
    return keys


def _draw_rank(seed: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Return a key for a random order; questions on one document follow each other."""
    return hashlib.sha256(seed + key[:_DIGEST_BYTES]).digest(), hashlib.sha256(seed + key).digest()


def _hash_text(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _make_supply_error(
    task: CountedQuestions, length: int, count: int, fraction: float, *, has_dropped: bool
) -> TrainingError:
    choices = ", ".join(f"{length} ({task.count(length)})" for length in getattr(task, "lengths", ()))
    hint = f"Its lengths, with their numbers of questions: {choices}. " if choices else ""
    if count:
        reason = f"{fraction:.0%} of them are held out, and none is left to train on"
        hint += "Add questions, name other --lengths, or hold out less (--held-out)."
    else:
        reason, hint = "a loop needs some", f"{hint}Name other --lengths."
    remaining = " that are not answered without the document" if has_dropped else ""
    return TrainingError(f"{task.name} has {count} questions of length {length:,}{remaining}; {reason}", hint=hint)


HELD_OUT_START: Final = 1_000_000_000
"""The first index of generated samples for measuring. Training uses lower indices."""
QUESTIONS_PER_COLLECTION: Final = 100_000
"""The number of sample indices that are reserved for each collection."""
MAX_COLLECTIONS: Final = HELD_OUT_START // QUESTIONS_PER_COLLECTION


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Stages of growing length: stage n uses the first n + 1 lengths, of which the shortest is the first.

    Half of a stage's generated questions have its longest length, the others any of its lengths. Questions of data
    files are asked epoch by epoch. The next stage begins when the mean reward of reads of the longest length is high
    enough in a collection. Stages depend only on the journal, and questions on the journal, the collection and their
    index: a loop that was killed asks the same questions again.
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
        last_stage = len(self.lengths) - 1
        stage = 0
        if self.split is not None:
            while (
                stage < last_stage
                and self.split.count_epoch_questions(self.lengths[: stage + 1]) < self.min_first_questions
            ):
                stage += 1
        for record in records:
            mean_at_longest = record.by_length.get(self.lengths[stage])
            if record.stage == stage and mean_at_longest is not None and mean_at_longest.reward >= self.advance_at:
                stage = min(stage + 1, last_stage)
        return stage

    def compute_epochs(self, records: Sequence[CollectionRecord], stage: int) -> float | None:
        """Return how many times every question of a stage was asked; None if the tasks generate new questions."""
        if self.split is None:
            return None
        return _count_questions(records, stage) / self.split.count_epoch_questions(self.lengths[: stage + 1])

    def draw_questions(self, collection: int, stage: int, records: Sequence[CollectionRecord] = ()) -> Iterator[Sample]:
        """Yield the questions of a collection, up to its maximum number.

        Args:
            collection: the index of the collection.
            stage: the stage that determines the lengths.
            records: the collections before it.

        Raises:
            TrainingError: there were so many collections that the next questions would be held-out ones.
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
            yield from islice(questions, self.split.count_epoch_questions(lengths))
            return
        for index in range(QUESTIONS_PER_COLLECTION):
            rng = random.Random(f"{self.seed}/{collection}/{index}")
            length = lengths[-1] if rng.random() < 0.5 else rng.choice(lengths)
            yield rng.choice(self.tasks).sample(length, collection * QUESTIONS_PER_COLLECTION + index)

    def list_held_out_samples(self, length: int, count: int) -> list[Sample]:
        """Return the questions to measure a length with, the same each time: `count`, or as many as a data file has."""
        if self.split is not None:
            return [self.split.task.sample(length, index) for index in self.split.held_out[length][:count]]
        return [self.tasks[index % len(self.tasks)].sample(length, HELD_OUT_START + index) for index in range(count)]


def _count_questions(records: Sequence[CollectionRecord], stage: int) -> int:
    return sum(record.questions for record in records if record.stage == stage)
