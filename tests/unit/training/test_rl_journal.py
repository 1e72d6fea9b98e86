"""The journal returns all records that were written, and refuses files that are not journals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rl_loops import make_measurement, make_record

from memagent_evaluation.score_statistics import Estimate
from memagent_training.rl.loop_journal import CollectionRecord, LoopJournal, MeanReward, Measurement
from memagent_training.training_errors import TrainingError

COUNT = st.integers(0, 10**12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
BY_LENGTH = st.dictionaries(st.integers(1, 10**6), st.builds(MeanReward, FLOAT, COUNT), max_size=3)
ESTIMATES = st.dictionaries(st.integers(1, 10**6), st.builds(Estimate, FLOAT, FLOAT, FLOAT, COUNT), max_size=3)
RECORD = st.builds(
    CollectionRecord,
    number=st.just(0),
    group_of=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    by_length=BY_LENGTH,
    by_task=st.just({"niah_single_1": MeanReward(0.5, 8)}),
    seconds=FLOAT,
)
MEASUREMENT = st.builds(Measurement, temperature=FLOAT, accuracy=ESTIMATES, seconds=FLOAT)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(RECORD | MEASUREMENT, max_size=5))
def test_journal_records_are_read_back(entries: list[CollectionRecord | Measurement], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.unlink(missing_ok=True)
    journal = LoopJournal(path)
    records: list[CollectionRecord] = []
    for entry in entries:
        if isinstance(entry, CollectionRecord):
            records.append(dataclasses.replace(entry, number=len(records)))
            journal.add(records[-1])
        else:
            journal.add(entry)
    assert path.exists() == bool(entries)
    for any_journal in (journal, LoopJournal(path)):
        assert any_journal.records == records
        assert any_journal.measurements == [entry for entry in entries if isinstance(entry, Measurement)]


@pytest.mark.parametrize(
    "content",
    [
        b"Dear diary,\n",
        b'{"kind": "noted"}\n',
        b'{"kind": "measured"}\n',
        b'{"kind": "collected", "by_length": {"far": {}}}\n',
    ],
)
def test_other_file_is_refused_and_left_unchanged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=r"(not a journal|cannot be parsed).*another folder"):
        LoopJournal(path)
    assert path.read_bytes() == content


def test_gap_between_collections_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(3):
        LoopJournal(path).add(make_record(number))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(TrainingError, match="collection 2 follows 0"):
        LoopJournal(path)


def test_iteration_is_trained_on_the_collection_with_enough_groups(tmp_path: Path) -> None:
    journal = LoopJournal(tmp_path / "journal.jsonl")
    for entry in (make_record(0), make_record(1, iteration=1, is_enough=False), make_record(2, iteration=1)):
        journal.add(entry)
    assert journal.find_collection(0) == make_record(0)
    assert journal.find_collection(1) == make_record(2, iteration=1)
    assert journal.find_collection(2) is None


def test_measurements_are_found_by_iteration(tmp_path: Path) -> None:
    journal = LoopJournal(tmp_path / "journal.jsonl")
    entries = [make_measurement(0), make_measurement(2, temperature=0.0), make_measurement(2, temperature=1.0)]
    for entry in entries:
        journal.add(entry)
    assert journal.find_measurements(2) == entries[1:]
    assert journal.find_measurements(1) == []


def test_mean_reward_is_over_reads_not_lengths() -> None:
    collection = make_record(by_length={500: MeanReward(1.0, 30), 1000: MeanReward(0.0, 10)})
    assert collection.reward == 0.75
    assert collection.groups == 1
    assert make_record(by_length={}, group_of={}).reward == 0
