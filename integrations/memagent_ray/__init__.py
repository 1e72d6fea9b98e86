"""A corpus on a Ray cluster: the core's reader in actors of Ray Data, and the core's ledger and table on the driver.

read_corpus    a dataset of documents becomes a dataset of rows
write_table    a dataset of rows becomes a table, exactly once
RayEngine      the engine of `memagent corpus --ray`; `reading_on` makes it and connects
"""

from __future__ import annotations

from memagent_ray.actor_plan import ActorPlan
from memagent_ray.ray_cluster import connected
from memagent_ray.ray_datasets import ActorPool, read_corpus, write_table
from memagent_ray.ray_engine import RayEngine, reading_on

__all__ = ["ActorPlan", "ActorPool", "RayEngine", "connected", "read_corpus", "reading_on", "write_table"]
