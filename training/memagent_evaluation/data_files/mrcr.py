"""OpenAI-MRCR: find the n-th of several equal requests in a long conversation, and repeat the reply to it.

Rows, as Parquet or JSON lines, have prompt (a JSON list of messages), answer and random_string_to_prepend. The last
message is the question; the ones before it are the document, each under its role's name. An example's own length is the
document's and question's tokens, estimated with the policy's tokenizer.

Its published metric, the similarity of answer and gold after the string that every answer must begin with, is in
`Scores.string_match`. It uses the reader's answer: the box's content if answers are boxed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    Example,
    FileTask,
    RowExamples,
    estimated_tokens,
    text_of,
)
from memagent_evaluation.data_files.row_files import Row, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.scorers import similarity_after_prefix

_SPARE_TOKENS: Final = 64


@dataclass(frozen=True, eq=False)
class MRCRTask(FileTask):
    """MRCR's questions, also scored by its own rule."""

    prefixes: frozenset[str] = field(default=frozenset(), repr=False)
    """The strings that answers must begin with."""

    def own_score(self, sample: Sample, answer: str) -> float:
        """The published metric, 0 to 1."""
        (gold,) = sample.gold
        prefix = next((each for each in self.prefixes if gold.startswith(each)), "")
        return similarity_after_prefix(answer, gold, prefix)


def load_mrcr(paths: Sequence[Path], settings: TaskSettings) -> MRCRTask:
    """The examples of MRCR files; answers may be as long as the longest gold one."""
    tokenizer = settings.tokenizer
    hint = "MRCR's rows have prompt, answer and random_string_to_prepend."
    examples = RowExamples(open_rows(paths), example_of, hint)
    prefixes: set[str] = set()

    def tokens(row: Row, example: Example) -> tuple[int, int]:
        prefixes.add(row["random_string_to_prepend"])
        document = estimated_tokens(example.document, tokenizer) + tokenizer.count(example.question)
        return document, tokenizer.count(example.gold[0])

    counts = list(examples.measured(tokens))
    return MRCRTask(
        name="mrcr",
        metric=Metric.ALL,
        unit=LengthUnit.TOKENS,
        answer_tokens=max(answer for _, answer in counts) + _SPARE_TOKENS,
        examples=examples,
        own_lengths=array("Q", (document for document, _ in counts)),
        source=", ".join(map(str, paths)),
        prefixes=frozenset(prefixes),
    )


def example_of(row: Row) -> Example:
    """The example of an MRCR row."""
    messages = _messages(row)
    gold, prefix = text_of(row, "answer"), text_of(row, "random_string_to_prepend")
    if not gold.startswith(prefix):
        raise DamagedRowError(f'"answer" does not begin with {prefix!r}')
    role, question = messages[-1]
    if role != "user" or len(messages) < 2:
        raise DamagedRowError('"prompt" does not end with a question of the user')
    document = "\n\n".join(f"{role.capitalize()}: {content}" for role, content in messages[:-1])
    return Example(question.strip(), (gold,), document)


def _messages(row: Row) -> list[tuple[str, str]]:
    value: Any = row.get("prompt")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DamagedRowError(f'"prompt" is not valid JSON: {error}') from error
    if not isinstance(value, list) or not value:
        raise DamagedRowError('"prompt" is not a list of messages')
    if not all(isinstance(each, dict) for each in value):
        raise DamagedRowError('"prompt" has an entry that is not a message')
    return [(text_of(each, "role"), text_of(each, "content", empty=True)) for each in value]
