"""Record what this version promises: `PYTHONPATH=tests python -m promises.record [SCENARIO ...]`.

Without a scenario all are recorded. The model and the runs in recorded/training are never made again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from promises.comparison import normalise
from promises.scenarios import SCENARIOS, Place, home

RECORDED = Path(__file__).parent / "recorded"


def run_scenario(name: str, folder: Path) -> Any:
    """Return the promised part of a scenario's outcome in this version."""
    with home(folder):
        return normalise(SCENARIOS[name](Place(folder)), folder.resolve(), folder)


def write(path: Path, value: Any) -> None:
    """Write one file of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=True, indent=1) + "\n")


def main(names: list[str]) -> None:
    for name in names or SCENARIOS:
        with TemporaryDirectory() as folder:
            write(RECORDED / f"{name}.json", run_scenario(name, Path(folder)))
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
