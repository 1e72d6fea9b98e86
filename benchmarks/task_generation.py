"""Measure the time and memory for generating a sample of a million tokens, for each kind of document.

Generating a sample means planning it, which counts all of its tokens, and reading its text once, in pieces. Seconds are
processor seconds. Memory is the maximum that Python allocated (tracemalloc), at two shorter lengths, because tracing
makes everything several times slower. Tokens are those of the embedded policy.

Prose of Python is parsed from the standard library once per process, for the first such sample. Its cache does not
count as memory, because it is the same for all lengths. Passages are generated paragraphs.
"""

from __future__ import annotations

import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from benchmarks.figures import Figure, print_table
from memagent_evaluation.data_files.qa_records import Paragraph, QARecord
from memagent_evaluation.samples import Task
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.haystacks import iter_python_prose
from memagent_evaluation.tasks.passages import make_passage_task
from memagent_graph.tokenizers import load_tokenizer

LENGTH = 1_000_000
MEMORY_LENGTHS = (20_000, 200_000)
MAX_SECONDS = 10
MAX_EXTRA_MEGABYTES = 1
BOOK_PARAGRAPHS = 3000
RECORD_COUNT = 2000


def generate_records() -> list[QARecord]:
    """Return questions with two gold paragraphs and eight distractors each, of 20 to 160 words."""
    rng = random.Random(0)

    def make_paragraph(title: str) -> Paragraph:
        words = ("".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(rng.randint(20, 160)))
        return Paragraph(title, " ".join(words).capitalize() + ".")

    return [
        QARecord(
            str(index),
            f"What is said of {index}?",
            (str(index),),
            (make_paragraph(f"{index} a"), make_paragraph(f"{index} b")),
            tuple(make_paragraph(f"{index} {letter}") for letter in "cdefghij"),
        )
        for index in range(RECORD_COUNT)
    ]


def generate_sample(task: Task, length: int, index: int) -> None:
    """Plan a sample and read its text."""
    for _ in task.sample(length, index).text():
        pass


def measure_seconds(task: Task) -> float:
    """Return the processor seconds for a sample of `LENGTH` tokens."""
    start_time = time.process_time()
    generate_sample(task, LENGTH, 0)
    return time.process_time() - start_time


def measure_peak_megabytes(task: Task, length: int) -> float:
    """Return the peak memory in MB for a sample of this many tokens."""
    tracemalloc.start()
    try:
        generate_sample(task, length, 1)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def measure() -> list[Figure]:
    """Return time and memory for each kind of document."""
    settings = TaskSettings(load_tokenizer("embedded"))
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "book.txt"
        book.write_text("\n\n".join(islice(iter_python_prose(), BOOK_PARAGRAPHS)), encoding="utf-8")
        file_settings = TaskSettings(settings.tokenizer, haystack=book)
        kinds: dict[str, Callable[[], Task]] = {
            "noise (niah_single_1)": lambda: load_task("niah_single_1", settings),
            "prose found with Python, first sample (niah_single_2)": lambda: load_task("niah_single_2", settings),
            "prose found with Python, next samples": lambda: load_task("niah_single_2", settings),
            "prose of a user's file (niah_multiquery)": lambda: load_task("niah_multiquery", file_settings),
            "needles, words and numbers (niah_multikey_2)": lambda: load_task("niah_multikey_2", settings),
            "needles, UUIDs (niah_multikey_3)": lambda: load_task("niah_multikey_3", settings),
            "variable tracking (vt)": lambda: load_task("vt", settings),
            "common words (cwe)": lambda: load_task("cwe", settings),
            "coded words (fwe)": lambda: load_task("fwe", settings),
            "passages (qa_2)": lambda: make_passage_task(generate_records(), "qa_2", settings),
        }
        figures = []
        for kind, load_kind in kinds.items():
            task = load_kind()
            short_peak, long_peak = (measure_peak_megabytes(task, length) for length in MEMORY_LENGTHS)
            is_constant = long_peak <= short_peak + MAX_EXTRA_MEGABYTES
            figures += [
                Figure.below(f"{kind}: 1M tokens", measure_seconds(task), "s", MAX_SECONDS),
                Figure(f"{kind}: memory at 20K tokens", short_peak, "MB"),
                Figure(
                    f"{kind}: memory at 200K tokens",
                    long_peak,
                    "MB",
                    f"at most {MAX_EXTRA_MEGABYTES} more",
                    is_constant,
                ),
            ]
    return figures


if __name__ == "__main__":
    print_table(measure())
