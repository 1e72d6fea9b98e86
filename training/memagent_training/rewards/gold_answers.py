"""Finds the gold answers of runs, with which `memagent_evaluation.scorers` compares answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memagent_training.data.training_runs import Gold, TrainingRun
from memagent_training.training_errors import RewardError


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """The right answers of runs: by run id, else by document and question, else by question alone."""

    answers: Mapping[str | tuple[str, str], Gold]
    """Gold answers by run id; by document (its key, which is its digest, or its name) and question; or by question, if
    the question is about one document or has the same answer in all."""

    def find(self, run: TrainingRun) -> Gold | None:
        """Return the gold answers of a run, with the evidence if known; None if there are none."""
        document = run.record.document
        document_keys = ((str(document[name]), run.question) for name in ("key", "name"))
        keys: tuple[str | tuple[str, str], ...] = (run.run_id, *document_keys, run.question)
        gold = next((self.answers[key] for key in keys if key in self.answers), None)
        return gold if gold and (gold.answers or gold.evidence) else None

    @classmethod
    def load(cls, path: Path | str) -> GoldAnswers:
        """Read JSON lines, each an object with `question` or `run_id`, and `answers` (a list) or `answer`.

        `evidence` is a list of the texts that the answer is based on, each exactly as in the document. A line with
        `question` and `document` (a document's name or key) is about that document only.

        Raises:
            RewardError: the file cannot be read, a line does not have that form, or it contradicts an earlier one; the
                message says which.
        """
        path = Path(path)
        entries: dict[str | tuple[str, str], tuple[int, Gold]] = {}
        try:
            with path.open(encoding="utf-8-sig") as file:
                for line_number, line in enumerate(file, 1):
                    if line.strip():
                        key, gold = _parse_entry(line, f"{path}, line {line_number}")
                        first_line_number, first_gold = entries.setdefault(key, (line_number, gold))
                        if first_gold != gold:
                            raise RewardError(
                                f"{path}, line {line_number}: the question of line {first_line_number} again, with "
                                "other answers",
                                hint='Name the document of each ("document": its name or key), or join wordings of one '
                                "answer in one line.",
                            )
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"{path} cannot be read: {error}", hint="Give a UTF-8 file of JSON lines.") from error
        return cls({key: gold for key, (_, gold) in entries.items()})


class _GoldLine(msgspec.Struct):
    run_id: str | None = None
    question: str | None = None
    document: str | None = None
    answers: str | list[str] | None = None
    answer: str | list[str] | None = None
    evidence: list[str] | None = None


def _parse_entry(line: str, location: str) -> tuple[str | tuple[str, str], Gold]:
    try:
        entry = msgspec.json.decode(line, type=_GoldLine)
        answers_value = entry.answer if entry.answers is None else entry.answers
        key = entry.question if entry.run_id is None else entry.run_id
        if key is None or answers_value is None:
            raise ValueError("the question or its answers are missing")
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"{location}: no question with its answers",
            hint='Write {"question": "...", "answers": ["...", ...]} in each line, with "document" if it is about one.',
        ) from error
    if entry.evidence is not None and not (entry.evidence and all(text.strip() for text in entry.evidence)):
        raise RewardError(
            f"{location}: evidence without text",
            hint='Write the texts exactly as in the document ("evidence": ["..."]), or leave it out.',
        )
    document_key = None if entry.document is None or entry.run_id is not None else (entry.document, key)
    answers = (answers_value,) if isinstance(answers_value, str) else tuple(answers_value)
    return document_key or key, Gold(answers, evidence=None if entry.evidence is None else tuple(entry.evidence))
