"""The questions of data files in a loop: a part is held out for measuring, the others are asked epoch by epoch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Protocol, TypeAlias, runtime_checkable

from memagent_evaluation.data_files import FileTask
from memagent_evaluation.result_journal import load_results
from memagent_evaluation.samples import Sample, Task
from memagent_evaluation.systems import NO_DOCUMENT
from memagent_training.training_errors import TrainingError

Places: TypeAlias = Mapping[tuple[int, int], Sequence[int]]
"""Indices of samples, by the task's number and the length."""
_DOCUMENT_BYTES: Final = hashlib.sha256().digest_size
"""A question's key begins with its document's digest."""


@runtime_checkable
class CountedQuestions(Task, Protocol):
    """A task with a known number of questions."""

    def count(self, length: int) -> int:
        """Return how many samples there are of a length."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionSplit:
    """Which questions of finite tasks are for training, and which are held out."""

    tasks: Sequence[CountedQuestions]
    training: Places
    held_out: Places
    seed: int
    fingerprint: str
    """A digest of every question, its document if it is in the file, and the part that it is in."""

    @staticmethod
    def of(
        tasks: Sequence[CountedQuestions],
        lengths: Sequence[int],
        measured: Sequence[int],
        *,
        share: float,
        seed: int,
        dropped: Container[str] = (),
    ) -> QuestionSplit:
        """Split the questions of some lengths.

        Questions on one document stay together, except those of the one document at which the split is made. A
        question that is trained on at one length is held out at none.

        Args:
            tasks: with a known number of questions each.
            lengths: those to train on.
            measured: those to measure; empty if nothing is measured.
            share: how much of each length's questions is held out, one at least of two or more; 0 for none.
            seed: of the split and of every epoch's order.
            dropped: questions that are neither asked nor held out.

        Raises:
            TrainingError: a length has no question, or none is left for training or for measuring.
            EvaluationError: a question cannot be read.
        """
        keys = {
            (number, length): _keys(task, length, dropped)
            for number, task in enumerate(tasks)
            for length in dict.fromkeys((*lengths, *measured))
        }
        trained: dict[int, set[bytes]] = {}
        for number, task in enumerate(tasks):
            seen: set[bytes] = set()
            held: set[bytes] = set()
            for length in lengths:
                own = sorted(keys[number, length], key=partial(_rank, f"{seed}".encode()))
                wanted = max(len(own) > 1, round(share * len(own))) if share else 0
                new = [key for key in own if key not in seen]
                left = max(0, wanted - sum(key in held for key in own))
                held.update(new[:left])
                seen.update(own)
                if not own or held.issuperset(own):
                    raise _too_few(task, length, len(own), share, some_dropped=bool(dropped))
            trained[number] = seen - held
        training, held_out = (
            {
                (number, length): [index for key, index in of.items() if (key in trained[number]) == is_trained]
                for (number, length), of in keys.items()
            }
            for is_trained in (True, False)
        )
        empty = [length for length in measured if not any(held_out[number, length] for number in range(len(tasks)))]
        if empty and (len(empty) == len(measured) or not set(empty).issubset(lengths)):
            raise TrainingError(
                f"no question of length {empty[0]:,} is held out, and it is to be measured",
                hint="Add questions, hold a share out (--held-out 0.1), or measure nothing (--measure-every 0).",
            )
        digest = hashlib.sha256()
        for (number, _), of in keys.items():
            for key in of:
                digest.update(key + bytes([key in trained[number]]))
        return QuestionSplit(tasks, training, held_out, seed, digest.hexdigest()[:16])

    def epoch_size(self, lengths: Sequence[int]) -> int:
        """Return how many questions of these lengths there are for training."""
        return sum(len(self.training[number, length]) for number in range(len(self.tasks)) for length in lengths)

    def questions(self, lengths: Sequence[int], asked: int) -> Iterator[Sample]:
        """Yield the questions for training of some lengths, each once an epoch, in another order each time.

        Args:
            lengths: some of those that were split.
            asked: how many questions of these lengths were asked before.
        """
        places = [
            (number, length, index)
            for number in range(len(self.tasks))
            for length in lengths
            for index in self.training[number, length]
        ]
        first, start = divmod(asked, len(places))
        for epoch in count(first):
            order = random.Random(f"{self.seed}/{lengths[-1]}/{epoch}").sample(places, len(places))
            for number, length, index in order[start if epoch == first else 0 :]:
                yield self.tasks[number].sample(length, index)

    def held_out_samples(self, length: int, at_most: int) -> list[Sample]:
        """Return questions to measure with, the same each time, from each task in turn."""
        by_task = [[(task, index) for index in self.held_out[number, length]] for number, task in enumerate(self.tasks)]
        longest = max(map(len, by_task))
        in_turn = [of[place] for place in range(longest) for of in by_task if place < len(of)]
        return [task.sample(length, index) for task, index in in_turn[:at_most]]


def find_answered_without(results: Path) -> frozenset[str]:
    """Return the questions that the system "no_document" answered right at least once in an evaluation.

    Raises:
        EvaluationError: there are no results there.
        TrainingError: they have no answers without the document.
    """
    rows = [row for row in load_results(results).rows if row.system == NO_DOCUMENT]
    if not rows:
        raise TrainingError(
            f"{results} has no answers without the document",
            hint=f"Evaluate the questions so: memagent eval TASK --data FILE --systems {NO_DOCUMENT} --out {results}.",
        )
    return frozenset(row.question for row in rows if row.strict == 1)


def _keys(task: CountedQuestions, length: int, dropped: Container[str]) -> dict[bytes, int]:
    """Return the index of each question by its key; of one document in a file keys begin alike.

    Raises:
        TrainingError: a question of a file is asked twice on one document.
    """
    keys: dict[bytes, int] = {}
    for index in range(task.count(length)):
        sample = task.sample(length, index)
        if sample.question in dropped:
            continue
        # Documents that are made from a file's paragraphs are others at each length; the question is the same.
        document = "".join(sample.text()) if isinstance(task, FileTask) else ""
        key = _digest(document) + _digest(sample.question)
        if key in keys:
            raise TrainingError(
                f"the questions {keys[key]} and {index} of length {length:,} in {getattr(task, 'source', task.name)} "
                f"are the same, on the same document: {sample.question[:80]!r}",
                hint="Take one of them out: a question that is trained on must not be among those held out.",
            )
        keys[key] = index
    return keys


def _rank(seed: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Return a place in random order: questions on one document follow each other."""
    return hashlib.sha256(seed + key[:_DOCUMENT_BYTES]).digest(), hashlib.sha256(seed + key).digest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _too_few(task: CountedQuestions, length: int, number: int, share: float, *, some_dropped: bool) -> TrainingError:
    own = getattr(task, "lengths", ())
    choices = ", ".join(f"{each} ({task.count(each)})" for each in own)
    hint = f"It has, with how many questions of each length: {choices}. " if choices else ""
    if number:
        what = f"a share of {share:g} of them is held out, and none is left to train on"
        hint += "Add questions, name other --lengths, or hold out less (--held-out)."
    else:
        what, hint = "a loop needs some", f"{hint}Name other --lengths."
    left = " that are not answered without the document" if some_dropped else ""
    return TrainingError(f"{task.name} has {number} questions of length {length:,}{left}; {what}", hint=hint)
