"""Reads a corpus on a Ray cluster: actors read the documents, and the driver writes the table.

RayEngine   the engine of `memagent corpus --ray`; `connect` connects to a cluster
ActorPlan   the settings that the driver sends to every actor
"""

from __future__ import annotations

from memagent_corpus.on_ray.actor_plan import ActorPlan
from memagent_corpus.on_ray.ray_engine import RayEngine, connect

__all__ = ["ActorPlan", "RayEngine", "connect"]
