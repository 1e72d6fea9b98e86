"""Measures the policy on the natural questions; each run is a line of `natural_runs.jsonl`.

    python -m recipes.english.measure --questions unseen_questions.toml

Every text is read from beginning to end, with all of its questions in one pass. Every run is logged, right or wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, Final

from memagent_graph import LocalPolicy, MemAgent
from memagent_graph.documents import Document
from memagent_graph.policies.profile import find_policy_folder
from recipes.english.pinned_texts import PinnedText, read_text

RUNS_PATH: Final = Path(__file__).with_name("natural_runs.jsonl")
BENCHMARKS: Final = Path(__file__).parents[3] / "benchmarks"


def is_right(answer: str | None, question: dict[str, Any]) -> bool:
    """Return whether an answer has every part of one of the lists, or begins with the right word, yes or no."""
    words = re.findall(r"[\w:.,-]*\w|\S", (answer or "").casefold())
    if "yes_no" in question:
        return words[:1] == [question["yes_no"]]
    normalised_answer = f" {' '.join(words)} "
    return any(all(f" {part} " in normalised_answer for part in parts) for parts in question["right"])


def read_texts(path: Path) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the name, the text and the questions of each text in a file of questions."""
    from benchmarks.natural_questions import load_texts  # noqa: PLC0415  of the repository's root

    other_texts = load_texts()
    return [
        (
            table["name"],
            read_text(PinnedText.from_table(table)) if "package" in table else other_texts[table["name"]],
            table["questions"],
        )
        for table in tomllib.loads(path.read_text("utf-8"))["texts"]
    ]


def measure(policy: str, path: Path, strategy: str, only: str | None, rows: list[dict[str, Any]]) -> None:
    """Read every text and add each question with its answer to the rows."""
    from benchmarks.natural_questions import is_right as has_substrings  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory() as store,
        MemAgent(LocalPolicy(policy), strategy=strategy, store=Path(store), run_log=False) as agent,
    ):
        for name, text, questions in read_texts(path):
            if only is not None and only not in name:
                continue
            started_at = time.monotonic()
            results = agent.read(Document.from_text(text), questions=[question["ask"] for question in questions])
            for question, result in zip(questions, results, strict=True):
                is_unseen = path.name == "unseen_questions.toml"
                is_answer_right = (
                    is_right(result.answer, question) if is_unseen else has_substrings(result.answer, question["right"])
                )
                rows.append(
                    {"ask": question["ask"], "answer": result.answer, "memory": result.memory, "right": is_answer_right}
                )
                verdict = "right" if is_answer_right else "WRONG"
                print(f"  {verdict}  {question['ask']}  ->  {result.answer}   [{result.memory}]", flush=True)
            print(f"{name}: {time.monotonic() - started_at:.0f} s", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", default="english", help="a name that was added, or a folder")
    parser.add_argument("--strategy", default="gated")
    parser.add_argument("--questions", default="natural_questions.toml", help="a file of benchmarks/")
    parser.add_argument("--only", help="the texts whose name has this in it")
    parser.add_argument("--note", default="", help="for the log")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        measure(arguments.policy, BENCHMARKS / arguments.questions, arguments.strategy, arguments.only, rows)
    finally:
        log_run(arguments, rows)


def log_run(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Add a run to the log, also one that was stopped, with the questions that it had answered."""
    right_count = sum(row["right"] for row in rows)
    progress = find_policy_folder(arguments.policy) / "progress.json"
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "questions": arguments.questions,
        "strategy": arguments.strategy,
        "only": arguments.only,
        "note": arguments.note,
        "adapter": json.loads(progress.read_text("utf-8")) if progress.is_file() else None,
        "right": right_count,
        "of": len(rows),
        "answers": rows,
    }
    with RUNS_PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run, ensure_ascii=False) + "\n")
    print(f"{right_count} of {len(rows)} right", flush=True)


if __name__ == "__main__":
    main()
