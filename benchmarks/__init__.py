"""Where the README's figures come from. `python -m benchmarks` runs all of them."""
