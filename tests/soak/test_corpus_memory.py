"""A corpus takes as much memory for many documents as for few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus import measure_peak_megabytes


def test_memory_is_flat_with_the_number_of_documents(
    size: Callable[[int, int], int], record_property: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # the measured processes import the benchmarks from there
    few, many = measure_peak_megabytes(size(5, 200)), measure_peak_megabytes(size(30, 100_000))
    record_property("MB at the fewest", round(few))
    record_property("MB at the most", round(many))
    assert many - few <= 60
