"""The gold answers of runs. How an answer is compared with them is in `memagent_graph.evaluation.scorers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent_graph.errors import MemAgentError
from memagent_training.data.training_runs import TrainingRun
from memagent_training.training_errors import RewardError


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """The right answers of runs, by run id or by question; a run's own id goes first.

    An answer is a string or a list of strings. What a list means, alternatives or parts, is up to the reward function.
    """

    answers: Mapping[str, str | Sequence[str]]

    def of(self, run: TrainingRun) -> tuple[str, ...] | None:
        """The gold answers of a run; None where there are none."""
        found = self.answers.get(run.run_id, self.answers.get(run.question))
        if found is None:
            return None
        return (found,) if isinstance(found, str) else tuple(found) or None

    @classmethod
    def load(cls, path: Path | str) -> GoldAnswers:
        """From JSON lines, each an object with `question` or `run_id`, and `answers` (a list) or `answer`.

        Raises:
            RewardError: the file cannot be read, or a line is not of that form; says which.
        """
        path = Path(path)
        answers: dict[str, str | Sequence[str]] = {}
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        key, value = _entry(line, f"{path}, line {number}")
                        answers[key] = value
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"{path} cannot be read: {error}", hint="Name a UTF-8 file of JSON lines.") from error
        return cls(answers)


def _entry(line: str, place: str) -> tuple[str, str | list[str]]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise _no_entry(place) from error
    if not isinstance(entry, dict):
        raise _no_entry(place)
    key = entry.get("run_id", entry.get("question"))
    value: Any = entry.get("answers", entry.get("answer"))
    well_formed = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if not isinstance(key, str) or not well_formed:
        raise _no_entry(place)
    return key, value


def _no_entry(place: str) -> MemAgentError:
    return RewardError(
        f"{place}: no question with its answers",
        hint='Write {"question": "...", "answers": ["...", ...]} in each line.',
    )
