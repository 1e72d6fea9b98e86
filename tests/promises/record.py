"""Record what this version promises: `PYTHONPATH=tests python -m promises.record [SCENARIO ...]`.

Without a scenario all are recorded.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from promises.comparison import normalised
from promises.scenarios import SCENARIOS, TRAINING, Place, home, log_lines

from memagent_graph import RunLog

RECORDED = Path(__file__).parent / "recorded"


def run_scenario(name: str, folder: Path) -> Any:
    """What a scenario comes to in this version, without what is not promised."""
    with home(folder):
        return normalised(SCENARIOS[name](Place(folder)), folder.resolve(), folder)


def write(path: Path, value: Any) -> None:
    """One file of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=True, indent=1) + "\n")


def make_training() -> None:
    """A tiny model, and a log's lines of runs with a reward each and one for each conversation."""
    from support.training_log import comparable, write_log
    from support.training_world import make_world

    with TemporaryDirectory() as folder:
        world = Path(folder)
        groups = comparable(make_world(world))
        log = RunLog(write_log(world / "runs.sqlite", groups, world / "model"))
        source = random.Random(3)
        for group in groups:
            for rollout in group.rollouts_G:
                for conversation in list(log.conversations(rollout.run_id)):
                    value = round(source.random(), 3)
                    log.reward(rollout.run_id, value, name="step", source="test", conversation=conversation.id)
        log.close()
        shutil.copytree(world / "model", TRAINING / "model", dirs_exist_ok=True)
        lines = log_lines(world / "runs.sqlite")
        (TRAINING / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(names: list[str]) -> None:
    if not TRAINING.exists():
        make_training()
    for name in names or SCENARIOS:
        with TemporaryDirectory() as folder:
            write(RECORDED / f"{name}.json", run_scenario(name, Path(folder)))
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
