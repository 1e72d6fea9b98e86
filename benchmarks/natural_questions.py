"""Thirty natural questions, on texts that any machine with this package has: a policy's answers, one by one.

    python -m benchmarks.natural_questions --model english

The questions are in `natural_questions.toml`. For each one the whole text is read, in one pass for all of a text's
questions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pydoc_data.topics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from memagent_graph.documents import Document
from memagent_graph.reader import MemAgent
from memagent_graph.settings import ReadSettings

HERE = Path(__file__).parent
REFERENCE_TOPICS = ("assert", "del", "global", "identifiers", "integers", "lambda", "nonlocal", "pass", "truth", "with")
"""In characters: about as long as the other texts together; the whole reference is what `memagent demo` reads."""
STATEMENT_TOPICS = ("break", "continue", "raise", "return", "try", "while")


def texts() -> dict[str, str]:
    """The texts by name."""
    manual = importlib.metadata.metadata("openai").get_payload()  # type: ignore[attr-defined]
    topics = pydoc_data.topics.topics
    return {
        "the Apache licence": (HERE.parent / "LICENSE").read_text("utf-8"),
        "the manual of the openai package": str(manual),
        "the language reference": "\n\n".join(topics[name] for name in REFERENCE_TOPICS),
        "the statements": "\n\n".join(topics[name] for name in STATEMENT_TOPICS),
    }


def is_right(answer: str | None, right: list[list[str]]) -> bool:
    """Whether an answer has all strings of one of the lists."""
    text = " ".join((answer or "").casefold().split())
    return any(all(part in text for part in parts) for parts in right)


def settings_of_command_line(description: str | None) -> ReadSettings:
    """The policy that is named, or the default one, in its own way of reading unless another is named."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model")
    parser.add_argument("--base-url")
    parser.add_argument("--strategy", help="the policy's own, or overwrite, if left out")
    arguments = parser.parse_args()
    return ReadSettings(model=arguments.model, base_url=arguments.base_url, strategy=arguments.strategy).resolve()


def main() -> None:
    settings = settings_of_command_line(__doc__)
    entries: list[dict[str, Any]] = tomllib.loads((HERE / "natural_questions.toml").read_text("utf-8"))["texts"]
    texts_by_name, total, correct = texts(), 0, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        MemAgent(settings=settings, store=Path(folder), run_log=False) as reader,
    ):
        for entry in entries:
            questions = [question["ask"] for question in entry["questions"]]
            results = reader.read(Document.from_text(texts_by_name[entry["name"]]), questions=questions)
            print(f"\n{entry['name']}")
            for question, result in zip(entry["questions"], results, strict=True):
                right = is_right(result.answer, question["right"])
                total, correct = total + 1, correct + right
                print(f"  {'right' if right else 'WRONG'}  {question['ask']}  ->  {result.answer}")
    print(f"\n{correct} of {total} right")


if __name__ == "__main__":
    main()
