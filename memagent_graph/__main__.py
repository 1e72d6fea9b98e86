"""`python -m memagent_graph`: the `memagent` command."""

from memagent_graph.cli import main

main()
