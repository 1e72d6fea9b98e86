"""Reads a corpus on a Ray cluster. Actors of Ray Data read the documents, and the driver writes the table.

read_corpus    turns a dataset of documents into a dataset of rows
write_table    writes a dataset of rows to a table, exactly once
RayEngine      the engine of `memagent corpus --ray`; `connected_engine` connects to a cluster and creates it
"""

from __future__ import annotations

from memagent_corpus.on_ray.actor_plan import ActorPlan
from memagent_corpus.on_ray.ray_cluster import connected
from memagent_corpus.on_ray.ray_datasets import read_corpus, write_table
from memagent_corpus.on_ray.ray_engine import RayEngine, connected_engine

__all__ = ["ActorPlan", "RayEngine", "connected", "connected_engine", "read_corpus", "write_table"]
