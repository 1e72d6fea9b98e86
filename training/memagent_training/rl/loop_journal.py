"""Records the results of collections and measurements in a file, before the training on them.

The file is a `storage.journal`: each row is written and synced as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from memagent_evaluation.score_statistics import Estimate
from memagent_graph.storage.journal import open_journal, read_journal
from memagent_training.training_errors import TrainingError


@dataclass(frozen=True, slots=True)
class MeanReward:
    """The mean reward of some reads."""

    reward: float
    reads: int


@dataclass(frozen=True, slots=True)
class CollectionRecord:
    """The result of one collection."""

    number: int
    """The index of the collection, from 0. The run ids of its reads begin with its name."""
    iteration: int
    """The iteration for which it was made."""
    is_enough: bool
    """Whether it has enough groups for the iteration; otherwise another collection follows."""
    version: int
    """The iteration whose weights read; the oldest one if the collection was continued with newer weights."""
    stage: int
    """The stage of the curriculum to which the questions belong."""
    questions: int
    """The number of questions, each of which was read several times."""
    group_of: Mapping[str, str]
    """The group of each run that is trained on."""
    by_length: Mapping[int, MeanReward]
    """The mean reward of all reads by length, including groups without variance."""
    by_task: Mapping[str, MeanReward]
    """The mean reward of all reads by the question's task."""
    solved_groups: int
    """Groups whose reads all have a reward of 1 or more."""
    uniform_groups: int
    """Groups without variance and with lower rewards."""
    failed_groups: int
    """Groups left out because a read failed in every attempt."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    turns: int
    seconds: float
    """The duration of the collection."""

    @property
    def reward(self) -> float:
        """The mean over all reads."""
        reads = sum(mean.reads for mean in self.by_length.values())
        return sum(mean.reward * mean.reads for mean in self.by_length.values()) / max(reads, 1)

    @property
    def groups(self) -> int:
        """Groups that are trained on."""
        return len(set(self.group_of.values()))

    @property
    def cached_fraction(self) -> float:
        """The fraction of prompt tokens that the server had in its prefix cache."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and completion tokens per second; 0 if everything was taken from the run log."""
        return (self.prompt_tokens + self.completion_tokens) / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The accuracy on held-out questions before an iteration."""

    iteration: int
    temperature: float
    accuracy: Mapping[int, Estimate]
    """The accuracy for each length."""
    failed: int
    """Reads that failed; they count as wrong."""
    seconds: float
    as_deployed: bool = False
    """Whether invented memories were refused as in the policy's profile, with which its users will read."""

    @property
    def mean(self) -> float:
        """The mean over lengths."""
        return sum(estimate.mean for estimate in self.accuracy.values()) / max(len(self.accuracy), 1)

    @property
    def conditions(self) -> tuple[float, bool, dict[int, int]]:
        """The temperature, the guard and the questions; means are comparable if these are equal."""
        counts = {length: estimate.n for length, estimate in self.accuracy.items()}
        return self.temperature, self.as_deployed, counts


_KINDS: Final[dict[str, type[CollectionRecord | Measurement]]] = {
    "collected": CollectionRecord,
    "measured": Measurement,
}


@dataclass
class LoopJournal:
    """The journal file and its content.

    Raises:
        TrainingError: the file cannot be read.
    """

    path: Path
    records: list[CollectionRecord] = field(default_factory=list, init=False)
    """The collections, ordered by number, from 0 on without a gap."""
    measurements: list[Measurement] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        try:
            for row in read_journal(self.path, error=TrainingError):
                self._append(row)
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self.path} is not a journal of a loop: {error!r}", hint="Start again in another folder."
            ) from error

    def add(self, *entries: CollectionRecord | Measurement) -> None:
        """Add collections or measurements to the file, in one write."""
        kinds = {entry_type: kind for kind, entry_type in _KINDS.items()}
        rows = [{"kind": kinds[type(entry)], **dataclasses.asdict(entry)} for entry in entries]
        with open_journal(self.path, error=TrainingError) as journal:
            old_row_count = len(journal.rows)
            journal.append(*rows)
            for row in journal.rows[old_row_count:]:
                self._append(row)

    def find_collection(self, iteration: int) -> CollectionRecord | None:
        """Return the collection that an iteration is trained on, if there is one."""
        return next((record for record in self.records if record.iteration == iteration and record.is_enough), None)

    def find_measurements(self, iteration: int) -> list[Measurement]:
        """Return the measurements of an iteration's initial weights."""
        return [measurement for measurement in self.measurements if measurement.iteration == iteration]

    def _append(self, row: dict[str, Any]) -> None:
        entry = msgspec.convert(row, _KINDS[row["kind"]], str_keys=True)
        if isinstance(entry, Measurement):
            self.measurements.append(entry)
        elif entry.number == len(self.records):
            self.records.append(entry)
        else:
            raise ValueError(f"collection {entry.number} follows {len(self.records) - 1}")
