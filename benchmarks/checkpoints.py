"""Measure the size of checkpoints per chunk, for reads of 100 and of 700 chunks.

Every chunk rewrites a full memory of 1024 tokens.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.text import make_prose
from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts

CHUNK_TOKENS = 64


def _measure_kilobytes_per_chunk(chunk_count: int) -> float:
    """Return the kB of checkpoints per chunk, for a read of `chunk_count` chunks."""
    words = make_prose(1500).split()
    rng = random.Random(1)

    def write_reply(prompt: str) -> str:
        return " ".join(rng.sample(words, 600)) if "<section>" in prompt else "\\boxed{x}"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints.sqlite"
        reader = MemAgent(
            ScriptedPolicy(write_reply),
            tokenizer="embedded",
            budget=Budget(chunk_tokens=CHUNK_TOKENS),
            prompts=load_prompts(),
            store=Path(folder) / "documents",
            checkpoints=path,
            run_log=False,
        )
        with reader:
            result = reader.read(make_prose(CHUNK_TOKENS * chunk_count), "What is said?")
        total_bytes = sum(file.stat().st_size for file in Path(folder).glob("checkpoints.sqlite*"))
        return total_bytes / 1024 / result.chunks_read


def measure() -> list[Figure]:
    """Return the kB per chunk at 700 chunks, and its ratio to the kB at 100 chunks, which is 1 for linear growth."""
    short_read_kb, long_read_kb = _measure_kilobytes_per_chunk(100), _measure_kilobytes_per_chunk(700)
    return [
        Figure.at_most("checkpoints per chunk, 700 chunks", long_read_kb, "kB", 20),
        Figure.at_most("checkpoints per chunk, 700 : 100 chunks", long_read_kb / short_read_kb, "x", 1.1),
    ]
