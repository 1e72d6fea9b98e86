"""A local Ray cluster whose nodes and actors can be killed: a head without CPUs, and nodes that read."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

STORE_BYTES = 80 * 2**20
ACTOR = "ray::DocumentActor"


class RayWorld:
    """The cluster. Its drivers are other processes, which connect to `address`."""

    def __init__(self, nodes: int = 2) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
        )
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES))

    def kill_node(self, index: int) -> None:
        """Kill a node and all its processes with SIGKILL."""
        self._cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def find_actors(self) -> dict[int, int]:
        """Return by the process id of each reading actor the index of its node."""
        raylets = {
            raylet.process.pid: index
            for index, node in enumerate(self.nodes)
            for raylet in node.all_processes.get("raylet", [])
        }
        actors = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    command = (folder / "cmdline").read_bytes()
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    continue
                if command.startswith(ACTOR.encode()) and parent in raylets:
                    actors[int(folder.name)] = raylets[parent]
        return actors

    def wait_for_actors(self, count: int) -> dict[int, int]:
        deadline = time.monotonic() + 60
        while len(actors := self.find_actors()) < count:
            assert time.monotonic() < deadline, f"there are {len(actors)} actors"
            time.sleep(0.05)
        return actors

    def kill_actor(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._cluster.shutdown()
