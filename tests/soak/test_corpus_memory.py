"""The memory of a corpus run does not grow with the number of documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus import measure_peak_megabytes


def test_peak_memory_does_not_grow_with_the_number_of_documents(
    size: Callable[[int, int], int], record_property: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # the measured processes import the benchmarks from there
    small_run_mb, large_run_mb = measure_peak_megabytes(size(5, 200)), measure_peak_megabytes(size(30, 100_000))
    record_property("MB at the fewest", round(small_run_mb))
    record_property("MB at the most", round(large_run_mb))
    assert large_run_mb - small_run_mb <= 60
