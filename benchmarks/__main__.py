"""`python -m benchmarks [NAME ...]`: measure, print a table, write benchmarks/results.json."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.figures import print_table, write_json

NAMES = (
    "throughput",
    "corpus",
    "chunking",
    "startup",
    "checkpoints",
    "run_log",
    "length",
    "long_tool_results",
    "training_step",
    "task_generation",
    "tracing",
)


def main() -> None:
    """Run the named benchmarks, or all; the exit status is 1 if a goal is missed."""
    names = sys.argv[1:] or NAMES
    figures = []
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        figures += import_module(f"benchmarks.{name}").measure()
    print_table(figures)
    if not sys.argv[1:]:
        write_json(figures, Path(__file__).with_name("results.json"))
    sys.exit(not all(figure.met for figure in figures))


if __name__ == "__main__":
    main()
