"""After kills in a cluster that reads a corpus, every row is in the table once, and few chunks are read twice.

Actors, nodes and the driver, which also writes the table, are killed with SIGKILL at random moments; the policy server
has faults.
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

DOCUMENTS_IN_FLIGHT, ACTORS = 4, 2
PROCESS_KINDS = {"sqlite": ("actor", "driver", "node"), "postgres": ("node", "actor", "driver")}
"""By checkpoint database, the kinds of processes to kill, in turn."""


class Driver(KillableProcess):
    """The corpus command, which can be killed and started again."""

    def __init__(self, command: list[str], output: Path) -> None:
        self._command, self._output = command, output

    def start(self) -> None:
        with self._output.open("ab") as file:
            self.process = subprocess.Popen(self._command, stdout=file, stderr=file)

    @property
    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")


@pytest.mark.parametrize("checkpoints", PROCESS_KINDS)
def test_a_corpus_run_survives_kills_of_actors_nodes_and_driver(
    checkpoints: str,
    cluster: RayWorld,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    size: Callable[[int, int], int],
    record_property: Callable[[str, Any], None],
) -> None:
    documents, kill_count = size(20, 2000), size({"sqlite": 2, "postgres": 1}[checkpoints], 30)
    rng = random.Random(11)
    numbers = write_corpus(tmp_path / "in", documents, max_words=size(2500, 8000))
    options = ["--ray", cluster.address, "--ray-actors", str(ACTORS), "--documents", str(DOCUMENTS_IN_FLIGHT),
               "--rows-per-part", "40", "--quiet"]  # fmt: skip
    if checkpoints == "postgres":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        options += ["--checkpoints", postgres.url]
    out, kills = tmp_path / "out", Counter[str]()
    with (
        CountingServer(faults=0.1, delay=0.05) as server,
        Driver(make_corpus_command(tmp_path / "in", out, server, *options), tmp_path / "output.txt") as driver,
    ):
        for number in range(kill_count):
            wait_for_chunks(driver.process, server)
            time.sleep(rng.uniform(0.0, size(700, 20_000) / 1000))
            assert driver.process.poll() is None, "the run ended before it could be killed"
            kind = PROCESS_KINDS[checkpoints][number % 3]
            if kind == "driver":
                driver.kill()
                driver.start()
            elif kind == "node":
                cluster.kill_node(rng.randrange(len(cluster.nodes)))
                cluster.add_node()
            else:
                cluster.kill_actor(rng.choice(sorted(cluster.wait_for_actors(1))))
            kills[kind] += 1
        assert driver.process.wait() == 0, driver.output
        calls = sum(server.answer_counts.values())
        repeated_run = run_corpus_command(tmp_path / "in", out, server, *options)
        assert repeated_run.returncode == 0 and sum(server.answer_counts.values()) == calls, "nothing is read again"
    rows = read_rows(out)
    require_each_row_once(rows, numbers)
    chunks, repeated_chunks = count_chunks(server)
    assert repeated_chunks <= kill_count * DOCUMENTS_IN_FLIGHT * ACTORS
    record_property("rows", len(rows))
    record_property("chunks", chunks)
    record_property("kills", dict(kills))
    record_property("chunks read again per kill", round(repeated_chunks / kill_count, 2))
    record_property("documents in flight", DOCUMENTS_IN_FLIGHT * ACTORS)
