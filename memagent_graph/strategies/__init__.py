"""Reading strategies: graph topologies over the same steps."""

from __future__ import annotations

from memagent_graph.strategies.base import Strategy
from memagent_graph.strategies.overwrite import Overwrite

__all__ = ["Overwrite", "Strategy"]
