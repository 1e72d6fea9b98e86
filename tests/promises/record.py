"""Record the promises of this version: `PYTHONPATH=tests python -m promises.record [SCENARIO ...]`.

Without a scenario all are recorded. The model and the runs in recorded/training are never regenerated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from promises.comparison import normalise
from promises.scenarios import SCENARIOS, Workspace, isolate_home

RECORDED = Path(__file__).parent / "recorded"


def run_scenario(name: str, folder: Path) -> Any:
    """Return the promised part of a scenario's outcome in this version."""
    with isolate_home(folder):
        return normalise(SCENARIOS[name](Workspace(folder)), folder.resolve(), folder)


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=True, indent=1) + "\n")


def main(names: list[str]) -> None:
    for name in names or SCENARIOS:
        with TemporaryDirectory() as folder:
            write_json(RECORDED / f"{name}.json", run_scenario(name, Path(folder)))
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
