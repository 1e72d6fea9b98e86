"""Measure the time to trace a memory's lines to their chunks, and to compare two memories, by length.

The memory has thirty lines, and every chunk of 2,500 words replaces one of them. Seconds are processor seconds. The
compared memories are in a script without spaces, so that every character is a word, and no word occurs only once.
"""

from __future__ import annotations

import random
import time

from benchmarks.figures import Figure, print_table
from memagent_graph.calls import Call, Span, Writes
from memagent_graph.provenance.evidence import find_provenance
from memagent_graph.provenance.word_diff import compare_words
from memagent_graph.trace import Trace

LINES = 30
UPDATES = (175, 700)
MAX_SECONDS = 3
WORDS = (1000, 4000)
MAX_MILLISECONDS = 50


def make_trace(length: int) -> tuple[Trace, list[str]]:
    """Return the trace of a read of `length` chunks, and the texts of the chunks."""
    lines = [f"fact {index} of keeper{index} and place{index} in year {1700 + index}" for index in range(LINES)]
    steps: list[Call] = []
    chunks: list[str] = []
    end = 0
    for number in range(length):
        lines[number % LINES] = f"fact {number} of keeper{number} and place{number} in year {1000 + number}"
        words = " ".join(f"word{(number * 31 + index) % 4000}" for index in range(2500))
        chunks.append(f"{words} {lines[number % LINES]}")
        start, end = end, end + len(chunks[-1])
        span, parents = Span(number, start, end, start, end, 1), (str(number - 1),) if number else ()
        steps.append(Call(str(number), "", "", "update", number, Writes.MEMORY, "\n".join(lines), (span,), parents))
    return Trace(tuple(steps)), chunks


def make_memories(length: int) -> tuple[str, str]:
    """Return two memories of `length` words."""
    rng = random.Random(0)
    old, new = ("".join(rng.choice("灯塔是安娜建造的在年点亮") for _ in range(length)) for _ in range(2))
    return old, new


def measure_tracing(length: int) -> float:
    """Return the processor seconds to trace a memory after `length` updates."""
    trace, chunks = make_trace(length)
    start_time = time.process_time()
    find_provenance(trace, lambda update: chunks[update.chunk_index or 0])
    return time.process_time() - start_time


def measure_comparison(length: int) -> float:
    """Return the processor seconds to compare two memories of `length` words."""
    old, new = make_memories(length)
    start_time = time.process_time()
    compare_words(old, new)
    return time.process_time() - start_time


def measure() -> list[Figure]:
    """Return the figures of all lengths."""
    figures = []
    for length in UPDATES:
        figures.append(Figure.below(f"tracing {length} updates", measure_tracing(length), "s", MAX_SECONDS))
    for length in WORDS:
        elapsed = 1000 * measure_comparison(length)
        figures.append(Figure.below(f"comparing memories of {length} words", elapsed, "ms", MAX_MILLISECONDS))
    return figures


if __name__ == "__main__":
    print_table(measure())
