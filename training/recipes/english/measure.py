"""The natural questions, read by the base with an adapter; each run is a line of `natural_runs.jsonl`.

    python -m recipes.english.measure --base FOLDER --adapter FOLDER --policy FOLDER --strategy gated

It writes a policy's folder first, with merged weights, templates and budgets, unless it is there, and then reads every
text from beginning to end with the package's own reader, all questions of a text in one pass. Without --adapter it is
the base with this room's templates. Runs are logged whatever they show.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, Final

from memagent_graph import LocalPolicy, MemAgent
from memagent_graph.documents import Document
from memagent_graph.policies.lora import load_adapter
from recipes.english.lessons import TEMPLATES
from recipes.english.pinned_texts import PinnedText, read_text

RUNS: Final = Path(__file__).with_name("natural_runs.jsonl")
BENCHMARKS: Final = Path(__file__).parents[3] / "benchmarks"
CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROFILE: Final = {
    "context_window": 2048,
    "chunk_tokens": 512,
    "memory_tokens": 256,
    "question_tokens": 96,
    "answer_tokens": 64,
    "boundary": "sentence",
    "empty_memory": "none",
    "dtype": "bfloat16",
}


def write_policy(base: Path, adapter: Path | None, folder: Path) -> None:
    """Write a policy that the package reads with: the base in bfloat16, the adapter merged into it."""
    import torch  # noqa: PLC0415  slow to import
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    folder.mkdir(parents=True)
    weights = {name: weight.float() for name, weight in load_file(base / "model.safetensors").items()}
    if adapter is not None:
        load_adapter(adapter).merge_into(weights)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)
    (folder / "chat_template.jinja").write_text(CHAT, "utf-8")
    (folder / "memagent.json").write_text(json.dumps(PROFILE, indent=2) + "\n", "utf-8")
    shutil.copytree(TEMPLATES, folder / "templates")


def is_right(answer: str | None, question: dict[str, Any]) -> bool:
    """Return whether an answer has all words of one of the lists, or begins with the right one of yes and no."""
    words = re.findall(r"[\w:.,-]*\w|\S", (answer or "").casefold())
    if "yes_no" in question:
        return words[:1] == [question["yes_no"]]
    sentence = f" {' '.join(words)} "
    return any(all(f" {part} " in sentence for part in parts) for parts in question["right"])


def texts_of(path: Path) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the name, the text and the questions of each text of a file of questions."""
    from benchmarks.natural_questions import texts  # noqa: PLC0415  of the repository's root

    other_texts = texts()
    return [
        (
            table["name"],
            read_text(PinnedText.from_table(table)) if "package" in table else other_texts[table["name"]],
            table["questions"],
        )
        for table in tomllib.loads(path.read_text("utf-8"))["texts"]
    ]


def measure(folder: Path, path: Path, strategy: str, only: str | None, rows: list[dict[str, Any]]) -> None:
    """Read every text and add each question with its answer to the rows."""
    from benchmarks.natural_questions import is_right as has_substrings  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory() as store,
        MemAgent(LocalPolicy(folder, dtype="bfloat16"), strategy=strategy, store=Path(store), run_log=False) as agent,
    ):
        for name, text, questions in texts_of(path):
            if only is not None and only not in name:
                continue
            clock = time.monotonic()
            results = agent.read(Document.from_text(text), questions=[question["ask"] for question in questions])
            for question, result in zip(questions, results, strict=True):
                whole_words = "package" in path.read_text("utf-8")
                right = (
                    is_right(result.answer, question)
                    if whole_words
                    else has_substrings(result.answer, question["right"])
                )
                rows.append({"ask": question["ask"], "answer": result.answer, "memory": result.memory, "right": right})
                print(
                    f"  {'right' if right else 'WRONG'}  {question['ask']}  ->  {result.answer}   [{result.memory}]",
                    flush=True,
                )
            print(f"{name}: {time.monotonic() - clock:.0f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--policy", type=Path, required=True, help="where the policy's folder is, or is written")
    parser.add_argument("--strategy", default="gated")
    parser.add_argument("--questions", default="natural_questions.toml", help="a file of benchmarks/")
    parser.add_argument("--only", help="the texts whose name has this in it")
    parser.add_argument("--note", default="", help="for the log")
    arguments = parser.parse_args()
    if not arguments.policy.exists():
        write_policy(arguments.base, arguments.adapter, arguments.policy)
    rows: list[dict[str, Any]] = []
    try:
        measure(arguments.policy, BENCHMARKS / arguments.questions, arguments.strategy, arguments.only, rows)
    finally:
        log_run(arguments, rows)


def log_run(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Add a run to the log: also one that was stopped, with what it had read."""
    right = sum(row["right"] for row in rows)
    progress = arguments.adapter / "progress.json" if arguments.adapter else None
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "questions": arguments.questions,
        "strategy": arguments.strategy,
        "only": arguments.only,
        "note": arguments.note,
        "adapter": json.loads(progress.read_text("utf-8")) if progress else None,
        "right": right,
        "of": len(rows),
        "answers": rows,
    }
    with RUNS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run, ensure_ascii=False) + "\n")
    print(f"{right} of {len(rows)} right", flush=True)


if __name__ == "__main__":
    main()
