"""All scenarios have their recorded outcomes."""

from __future__ import annotations

import json

import pytest
from promises.comparison import find_differences
from promises.record import RECORDED, run_scenario
from promises.scenarios import SCENARIOS, TOLERANCES


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_gives_the_recorded_outcome(name, tmp_path) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    assert find_differences(recorded, run_scenario(name, tmp_path), TOLERANCES.get(name, 0.0)) == []


def test_every_recorded_outcome_is_of_a_scenario() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == set(SCENARIOS)


@pytest.mark.parametrize(
    ("recorded", "actual", "count"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, 0),
        ({"a": 1, "b": None}, {"a": 1}, 1),
        ([1, 2], [2, 1], 2),
        ([1], [1, 2], 1),
        (1, 1.0, 1),
        (1, True, 1),
        (0.5, 0.51, 1),
        (["<row 1>", "<row 2>", "<row 1>"], ["<row 7>", "<row 8>", "<row 7>"], 0),
        (["<row 1>", "<row 2>"], ["<row 7>", "<row 7>"], 1),
        (["<row 1>", "<row 1>"], ["<row 7>", "<row 8>"], 1),
        ("of <drawn 1>", "of <step 1>", 1),
        ("a\n", "a", 1),
    ],
)
def test_only_new_keys_and_other_numbers_of_ids_are_not_a_difference(recorded, actual, count) -> None:
    assert len(find_differences(recorded, actual)) == count
