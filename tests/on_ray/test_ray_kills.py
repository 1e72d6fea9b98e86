"""Whatever of a cluster is killed while a corpus is read: every row is in the table once, hardly a chunk is read twice.

Actors, nodes and the driver, which is also the writer of the table, are killed with SIGKILL at random moments, on a
server with faults.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpus_world import (
    CountingServer,
    make_corpus_command,
    read_rows,
    run_corpus_command,
    wait_for_chunks,
    write_corpus,
)
from support.postgres_server import PostgresServer
from support.programs import KillableProcess
from support.ray_world import RayWorld
from unit.corpus.test_corpus_kills import count_chunks, require_each_row_once

IN_FLIGHT, ACTORS = 4, 2
KINDS = {"sqlite": ("actor", "driver", "node"), "postgres": ("node", "actor", "driver")}
"""In turn, by where the checkpoints are."""


class Driver(KillableProcess):
    """The command, which is started again when it was killed."""

    def __init__(self, command: list[str], output: Path) -> None:
        self._command, self._output = command, output

    def start(self) -> None:
        with self._output.open("ab") as file:
            self.process = subprocess.Popen(self._command, stdout=file, stderr=file)

    @property
    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")


@pytest.mark.parametrize("checkpoints", KINDS)
def test_a_corpus_survives_the_death_of_actors_nodes_and_driver(
    checkpoints: str,
    cluster: RayWorld,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    size: Callable[[int, int], int],
    record_property: Callable[[str, Any], None],
) -> None:
    documents, kills = size(20, 2000), size({"sqlite": 2, "postgres": 1}[checkpoints], 30)
    moments = random.Random(11)
    made = write_corpus(tmp_path / "in", documents, max_words=size(2500, 8000))
    options = ["--ray", cluster.address, "--ray-actors", str(ACTORS), "--documents", str(IN_FLIGHT),
               "--rows-per-part", "40", "--quiet"]  # fmt: skip
    if checkpoints == "postgres":
        server_of_states: PostgresServer = request.getfixturevalue("postgres")
        options += ["--checkpoints", server_of_states.url]
    out, victims = tmp_path / "out", Counter[str]()
    with (
        CountingServer(faults=0.1, delay=0.05) as server,
        Driver(make_corpus_command(tmp_path / "in", out, server, *options), tmp_path / "output.txt") as driver,
    ):
        for number in range(kills):
            wait_for_chunks(driver.process, server)
            time.sleep(moments.uniform(0.0, size(700, 20_000) / 1000))
            assert driver.process.poll() is None, "it ended before it could be killed"
            kind = KINDS[checkpoints][number % 3]
            if kind == "driver":
                driver.kill()
                driver.start()
            elif kind == "node":
                cluster.kill_node(moments.randrange(len(cluster.nodes)))
                cluster.add_node()
            else:
                cluster.kill_actor(moments.choice(sorted(cluster.wait_for_actors(1))))
            victims[kind] += 1
        assert driver.process.wait() == 0, driver.output
        calls = sum(server.answer_counts.values())
        again = run_corpus_command(tmp_path / "in", out, server, *options)
        assert again.returncode == 0 and sum(server.answer_counts.values()) == calls, "something is read again"
    rows = read_rows(out)
    require_each_row_once(rows, made)
    chunks, repeated = count_chunks(server)
    assert repeated <= kills * IN_FLIGHT * ACTORS
    record_property("rows", len(rows))
    record_property("chunks", chunks)
    record_property("kills", dict(victims))
    record_property("chunks read again per kill", round(repeated / kills, 2))
    record_property("documents in flight", IN_FLIGHT * ACTORS)
