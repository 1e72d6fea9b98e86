"""Where the figures in README and docs come from. `python -m benchmarks` runs all of them."""
