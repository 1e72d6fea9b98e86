"""Measure wall time and tokens per chunk for documents of 10 to 1000 chunks, read by the embedded policy."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.text import make_prose
from memagent_graph import Limits, LocalPolicy, MemAgent

LENGTHS = (10, 30, 100, 300, 1000)


def measure() -> list[Figure]:
    """Return time and tokens per chunk at each length, and their ratios between 1000 and 30 chunks."""
    figures, cost_per_chunk = [], {}
    with tempfile.TemporaryDirectory() as folder:
        reader = MemAgent(LocalPolicy.embedded(), store=Path(folder), run_log=False)
        chunk_tokens = 256
        reader.read(make_prose(1000), "Is it warm?")
        for chunk_count in LENGTHS:
            text = make_prose(chunk_tokens * (chunk_count + 1))
            result = reader.read(
                text, "What is the access code of the quiet falcon?", limits=Limits(max_chunks=chunk_count)
            )
            seconds = result.usage.seconds / result.chunks_read
            tokens = result.usage.total_tokens / result.chunks_read
            cost_per_chunk[chunk_count] = seconds, tokens
            figures.append(Figure(f"{result.chunks_read} chunks: wall time per chunk", 1000 * seconds, "ms"))
            figures.append(Figure(f"{result.chunks_read} chunks: tokens per chunk", tokens))
    for name, column, bound in (("wall time", 0, 1.25), ("tokens", 1, 1.05)):
        ratio = cost_per_chunk[LENGTHS[-1]][column] / cost_per_chunk[LENGTHS[1]][column]
        figures.append(Figure.at_most(f"{name} per chunk, 1000 : 30 chunks", ratio, "x", bound))
    return figures
