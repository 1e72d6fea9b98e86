"""A corpus takes as much memory for many documents as for few."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEAK = (
    "import sys; from benchmarks.corpus import measure_peak_megabytes; print(measure_peak_megabytes(int(sys.argv[1])))"
)


def peak(documents: int) -> float:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", PEAK, str(documents)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def test_memory_is_flat_with_the_number_of_documents(
    size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    few, many = peak(size(5, 200)), peak(size(30, 100_000))
    record_property("MB at the fewest", round(few))
    record_property("MB at the most", round(many))
    assert many - few <= 60
