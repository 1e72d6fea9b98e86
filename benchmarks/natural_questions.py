"""Ask a policy thirty natural questions on texts that come with this package, and print its answers.

    python -m benchmarks.natural_questions --model english

The questions are in `natural_questions.toml`. One read asks all questions on a text.
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

FOLDER = Path(__file__).parent
REFERENCE_TOPICS = ("assert", "del", "global", "identifiers", "integers", "lambda", "nonlocal", "pass", "truth", "with")
"""Topics of the language reference; they are about as long as the other texts together."""
STATEMENT_TOPICS = ("break", "continue", "raise", "return", "try", "while")


def load_texts() -> dict[str, str]:
    """Return the texts by name."""
    manual = importlib.metadata.metadata("openai").get_payload()  # type: ignore[attr-defined]
    topics = pydoc_data.topics.topics
    return {
        "the Apache licence": (FOLDER.parent / "LICENSE").read_text("utf-8"),
        "the manual of the openai package": str(manual),
        "the language reference": "\n\n".join(topics[name] for name in REFERENCE_TOPICS),
        "the statements": "\n\n".join(topics[name] for name in STATEMENT_TOPICS),
    }


def is_right(answer: str | None, accepted_answers: list[list[str]]) -> bool:
    """Return whether an answer contains all strings of one of the lists, in upper or lower case."""
    text = " ".join((answer or "").casefold().split())
    return any(all(string in text for string in strings) for strings in accepted_answers)


def parse_settings(description: str | None) -> ReadSettings:
    """Parse the command line, and return the reader's settings."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model")
    parser.add_argument("--base-url")
    parser.add_argument("--strategy", help="default: the policy's own, or overwrite")
    arguments = parser.parse_args()
    return ReadSettings(model=arguments.model, base_url=arguments.base_url, strategy=arguments.strategy).resolve()


def main() -> None:
    """Print every answer, and the number of right ones."""
    settings = parse_settings(__doc__)
    entries: list[dict[str, Any]] = tomllib.loads((FOLDER / "natural_questions.toml").read_text("utf-8"))["texts"]
    texts_by_name, question_count, right_count = load_texts(), 0, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        MemAgent(settings=settings, store=Path(folder), run_log=False) as reader,
    ):
        for entry in entries:
            questions = [question["ask"] for question in entry["questions"]]
            results = reader.read(Document.from_text(texts_by_name[entry["name"]]), questions=questions)
            print(f"\n{entry['name']}")
            for question, result in zip(entry["questions"], results, strict=True):
                is_answer_right = is_right(result.answer, question["right"])
                question_count, right_count = question_count + 1, right_count + is_answer_right
                print(f"  {'right' if is_answer_right else 'WRONG'}  {question['ask']}  ->  {result.answer}")
    print(f"\n{right_count} of {question_count} right")


if __name__ == "__main__":
    main()
