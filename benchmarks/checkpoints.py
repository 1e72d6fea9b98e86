"""Bytes of checkpoints per chunk: a full memory of 1024 tokens, rewritten at each of 100 and of 700 chunks."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.text import prose_of
from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts

CHUNK_TOKENS = 64


def _kilobytes_per_chunk(chunks: int) -> float:
    words = next(iter(prose_of(1500))).split()
    shuffled = random.Random(1)

    def script(prompt: str) -> str:
        return " ".join(shuffled.sample(words, 600)) if "<section>" in prompt else "\\boxed{x}"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints.sqlite"
        reader = MemAgent(
            ScriptedPolicy(script),
            tokenizer="embedded",
            budget=Budget(chunk_tokens=CHUNK_TOKENS),
            prompts=load_prompts(),
            store=Path(folder) / "documents",
            checkpoints=path,
            run_log=False,
        )
        with reader:
            result = reader.read(next(iter(prose_of(CHUNK_TOKENS * chunks))), "What is said?")
        size = sum(file.stat().st_size for file in Path(folder).glob("checkpoints.sqlite*"))
        return size / 1024 / result.chunks_read


def measure() -> list[Figure]:
    """Kilobytes per chunk at 700 chunks, and its ratio to that at 100: 1 is linear."""
    short, long = _kilobytes_per_chunk(100), _kilobytes_per_chunk(700)
    return [
        Figure("checkpoints per chunk, 700 chunks", long, "kB", "<= 20", long <= 20),
        Figure("checkpoints per chunk, 700 : 100 chunks", long / short, "x", "<= 1.1", long / short <= 1.1),
    ]
