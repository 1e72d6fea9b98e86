"""Run benchmarks and print their figures: `python -m benchmarks [NAME ...]`.

Without names, it runs those in `NAMES` and also writes benchmarks/results.json.
"""

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
    """Run the named benchmarks, or all of `NAMES`; exit with status 1 if a figure misses its goal."""
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
