"""Whether an answer is a gold one: normal forms, containment, F1, and the gold answers themselves."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import MemAgentError
from memagent_training.errors import RewardError
from memagent_training.training_runs import TrainingRun

_ARTICLES: Final = frozenset({"a", "an", "the"})
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_FIRST_WITHOUT_SPACES: Final = "\u2e80"
"""From here on come the scripts of East Asia, which set no spaces between words."""


def normalised(text: str) -> str:
    """Case folded, without ASCII punctuation and English articles, white space single: as SQuAD compares answers.

    A text of nothing else keeps its punctuation and articles; "The" must not become equal to nothing.
    """
    folded = text.casefold()
    words = [word for word in folded.translate(_NO_PUNCTUATION).split() if word not in _ARTICLES]
    return " ".join(words or folded.split())


def contains(text: str, gold: str) -> bool:
    """Whether `text` holds `gold`, both normalised, as whole words: "7" is not in "1977". Never the other way round."""
    held, wanted = normalised(text), normalised(gold)
    at = held.find(wanted) if wanted else -1
    while at >= 0:
        end = at + len(wanted)
        if not (_inside_word(held, at) or _inside_word(held, end)):
            return True
        at = held.find(wanted, at + 1)
    return False


def token_f1(text: str, gold: str) -> float:
    """The harmonic mean of precision and recall over normalised words, as SQuAD counts them. 0 to 1."""
    held, wanted = normalised(text).split(), normalised(gold).split()
    shared = sum((Counter(held) & Counter(wanted)).values())
    return 2 * shared / (len(held) + len(wanted)) if shared else 0.0


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


def _inside_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and all(each.isalnum() and each < _FIRST_WITHOUT_SPACES for each in text[at - 1 : at + 1])


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
