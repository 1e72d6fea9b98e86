"""A policy server as a process that can be killed: `policy_process PORT MILLISECONDS FILE`.

It reads perfectly, replies after MILLISECONDS, and appends each request to FILE as a line of JSON, where the requests
survive a kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.fake_server import FakeServer
from support.programs import KillableProcess, Program
from support.scripts import extract, read_perfectly

TESTS = Path(__file__).parents[1]


class PolicyProcess(KillableProcess):
    """The server; it keeps its port when it starts again.

    Args:
        file: where it writes its requests.
        delay_ms: its delay before a reply.
    """

    def __init__(self, file: Path, delay_ms: int) -> None:
        self._file = file
        self._delay_ms = delay_ms
        self._port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        command = [sys.executable, "-m", "support.policy_process", str(self._port), str(self._delay_ms)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        self.process = Program([*command, str(self._file)], stdout=subprocess.PIPE, env=environment, cwd=TESTS.parent)
        port = self.process.stdout.readline()
        assert port, "the policy server did not start"
        self._port = int(port)

    def read_requests(self) -> list[dict[str, Any]]:
        """Return the cache salt, the problem and the section of each request; an answer has no section."""
        return [json.loads(line) for line in self._file.read_text("utf-8").splitlines()]


def main(port: int, delay_ms: int, file: str) -> None:
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def respond(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        request = {
            "salt": body.get("cache_salt"),
            "problem": extract(prompt, "problem"),
            "section": extract(prompt, "section"),
        }
        os.write(log, json.dumps(request).encode() + b"\n")
        return read_perfectly(prompt)

    server = FakeServer(respond, delay=delay_ms / 1000, window=1000, vllm=True, port=port)
    with server:
        print(server.base_url.rpartition(":")[2].partition("/")[0], flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
