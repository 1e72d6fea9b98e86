"""Run the paper's recipe at a small size: data in its published form, the filter, training, and RULER-HQA.

    python -m benchmarks.hotpotqa_recipe work/hotpotqa

The questions are those of `own_questions`, in HotpotQA's form: titled paragraphs, one of which has the answer. They
become `hotpotqa_train.parquet`, a file like MemAgent's: each question among `PASSAGES` passages, with prompt, context,
reward_model and extra_info. Questions that the policy answers without the document are dropped, and `memagent rl`
trains on the others without a server. `memagent eval ruler_hqa` reads other such questions before and after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import parquet

from benchmarks.own_questions import Question, generate_questions, run_commands
from memagent_evaluation.samples import TaskSettings
from memagent_evaluation.tasks import load_task
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_graph.tokenizers import load_tokenizer

PASSAGES = 8
TRAINING_FILE, HELD_OUT_FILE = "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"
LOOP_SETTINGS = ("learning_rate=3e-4", "muon_learning_rate=1e-3", "warmup_steps=0", "gradient_checkpointing=false")


def format_record(name: str, question: Question) -> dict[str, Any]:
    """Return a question as a record of HotpotQA's files."""
    titles = {
        question.near_miss.statement: f"{question.near_miss.entity} (2)",
        question.fact.statement: question.fact.entity,
    }
    context = [[titles.get(text, " ".join(text.split()[:3])), [text]] for text in question.paragraphs]
    return {
        "_id": name,
        "question": question.text,
        "answer": question.fact.value,
        "supporting_facts": [[question.fact.entity, 0]],
        "context": context,
    }


def write_data(folder: Path, training: int, held_out: int) -> None:
    """Write training and held-out questions as HotpotQA's files, and the training file in MemAgent's form."""
    for name, count in ((TRAINING_FILE, training), (HELD_OUT_FILE, held_out)):
        questions = generate_questions(count, held_out=name == HELD_OUT_FILE)
        records = [format_record(f"{name}/{index}", question) for index, question in enumerate(questions)]
        (folder / name).write_text(json.dumps(records), "utf-8")
    task = load_task("ruler_hqa", TaskSettings(load_tokenizer(EMBEDDED_FOLDER), data=folder / TRAINING_FILE))
    samples = [task.sample(PASSAGES, index) for index in range(training)]
    rows = [
        {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": sample.question}],
            "context": "".join(sample.text()).rstrip(),
            "ability": "memory",
            "reward_model": {"style": "rule", "ground_truth": list(sample.gold)},
            "extra_info": {"index": index, "question": sample.question, "num_docs": PASSAGES},
        }
        for index, sample in enumerate(samples)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "hotpotqa_train.parquet")


def build_commands(
    folder: Path, *, iterations: int = 2, groups: int = 16, rollouts: int = 8, count: int = 100
) -> dict[str, list[str]]:
    """Return the commands of the recipe by name, in their order."""
    data_options = ["--data", str(folder / "hotpotqa_train.parquet")]
    no_document = ["eval", "memagent_files", *data_options, "--systems", "no_document", "--model", "embedded"]
    no_document += ["--out", str(folder / "no_document")]
    training = [
        "rl",
        *data_options,
        "--drop-answered-without",
        no_document[-1],
        "--engine",
        "local",
        "--model",
        "embedded",
    ]
    training += ["--preset", "memagent-paper", "--out", str(folder / "policy"), "--iterations", str(iterations)]
    training += ["--groups", str(groups), "--max-questions", str(groups), "--rollouts", str(rollouts)]
    training += ["--measure-every", "0", *(argument for setting in LOOP_SETTINGS for argument in ("--set", setting))]
    evaluation = ["eval", "ruler_hqa", "--data", str(folder / HELD_OUT_FILE), "--lengths", str(PASSAGES)]
    evaluation += ["--n", str(count), "--systems", "memagent"]
    return {
        "no_document": no_document,
        "rl": training,
        "before": [*evaluation, "--model", "embedded", "--out", str(folder / "before")],
        "after": [*evaluation, "--model", str(folder / "policy"), "--out", str(folder / "after")],
        "comparison": ["eval-report", str(folder / "after"), str(folder / "before")],
    }


def main() -> None:
    """Write the data, and run the commands of the recipe in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, training=200, held_out=200)
    run_commands(build_commands(folder), folder)


if __name__ == "__main__":
    main()
