"""Measure the time to trace a memory's lines to their chunks, and to compare two memories, by length.

The memory has thirty lines, and every chunk of 2,500 words replaces one of them. Seconds are processor seconds. The
compared memories are in a script without spaces, so that every character is a word, and no word occurs only once.
"""

from __future__ import annotations

import random
import time

from benchmarks.figures import Figure, print_table
from memagent_graph.provenance.evidence import find_provenance
from memagent_graph.provenance.word_diff import compare_words
from memagent_graph.trace import Call, Span, Trace, Writes

LINE_COUNT = 30
UPDATE_COUNTS = (175, 700)
MAX_SECONDS = 3
WORD_COUNTS = (1000, 4000)
MAX_MILLISECONDS = 50


def make_trace(chunk_count: int) -> tuple[Trace, list[str]]:
    """Return the trace of a read of `chunk_count` chunks, and the texts of the chunks."""
    lines = [f"fact {index} of keeper{index} and place{index} in year {1700 + index}" for index in range(LINE_COUNT)]
    calls: list[Call] = []
    chunks: list[str] = []
    end = 0
    for chunk_index in range(chunk_count):
        lines[chunk_index % LINE_COUNT] = (
            f"fact {chunk_index} of keeper{chunk_index} and place{chunk_index} in year {1000 + chunk_index}"
        )
        words = " ".join(f"word{(chunk_index * 31 + index) % 4000}" for index in range(2500))
        chunks.append(f"{words} {lines[chunk_index % LINE_COUNT]}")
        start, end = end, end + len(chunks[-1])
        span, parents = Span(chunk_index, start, end, start, end, 1), (str(chunk_index - 1),) if chunk_index else ()
        calls.append(
            Call(str(chunk_index), "", "", "update", chunk_index, Writes.MEMORY, "\n".join(lines), (span,), parents)
        )
    return Trace(tuple(calls)), chunks


def make_memories(word_count: int) -> tuple[str, str]:
    """Return two memories of `word_count` words."""
    rng = random.Random(0)
    old, new = ("".join(rng.choice("灯塔是安娜建造的在年点亮") for _ in range(word_count)) for _ in range(2))
    return old, new


def measure_tracing(update_count: int) -> float:
    """Return the processor seconds to trace a memory after `update_count` updates."""
    trace, chunks = make_trace(update_count)
    start_time = time.process_time()
    find_provenance(trace, lambda update: chunks[update.chunk_index or 0])
    return time.process_time() - start_time


def measure_comparison(word_count: int) -> float:
    """Return the processor seconds to compare two memories of `word_count` words."""
    old, new = make_memories(word_count)
    start_time = time.process_time()
    compare_words(old, new)
    return time.process_time() - start_time


def measure() -> list[Figure]:
    """Return the figures of all lengths."""
    figures = []
    for update_count in UPDATE_COUNTS:
        figures.append(Figure.below(f"tracing {update_count} updates", measure_tracing(update_count), "s", MAX_SECONDS))
    for word_count in WORD_COUNTS:
        milliseconds = 1000 * measure_comparison(word_count)
        figures.append(Figure.below(f"comparing memories of {word_count} words", milliseconds, "ms", MAX_MILLISECONDS))
    return figures


if __name__ == "__main__":
    print_table(measure())
