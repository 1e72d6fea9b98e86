"""The measurements behind the figures in README and docs. `python -m benchmarks` runs the main ones."""
