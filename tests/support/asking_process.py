"""A client as a process, which can be killed: `asking_process API KEY FILE STOP`, with its requests as standard input.

It sends the requests in turn, each until it is answered, and appends the answers to FILE, a JSON value a line. Started
again, it continues with the first request that has no answer there. It ends when it has all, or, at an answer, once the
file STOP exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from support.programs import KillableProcess, Program

_BETWEEN_TRIES = 0.1


class AskingProcess(KillableProcess):
    """The client.

    Args:
        api: the server's API.
        key: its key.
        requests: what it asks.
        folder: where its files are.
    """

    def __init__(self, api: str, key: str, requests: Sequence[dict[str, Any]], folder: Path) -> None:
        self._api, self._key = api, key
        self._requests = folder / f"{key}.requests"
        self._requests.write_text(json.dumps(list(requests)), encoding="utf-8")
        self._answers = folder / f"{key}.answers"
        self._answers.touch()
        self._stop = folder / "stop"

    def start(self) -> None:
        command = [sys.executable, __file__, self._api, self._key, str(self._answers), str(self._stop)]
        with self._requests.open("rb") as requests:
            self.process = Program(command, stdin=requests)

    def finish(self) -> int:
        """Let it have the answer that it waits for; returns its exit status."""
        self._stop.touch()
        return self.process.wait(120)

    def answers(self) -> list[dict[str, Any]]:
        """What it was answered, in the order of its requests: status, content, run id, and how the read was met."""
        return [json.loads(line) for line in self._answers.read_text("utf-8").splitlines()]


def main(api: str, key: str, answers: str, stop: str) -> None:
    requests = json.load(sys.stdin)
    file = os.open(answers, os.O_RDWR | os.O_APPEND)
    done = Path(answers).read_bytes().count(b"\n")
    with httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        for request in requests[done:]:
            reply = answered(client, f"{api}/chat/completions", request)
            answer = {
                "status": reply.status_code,
                "run_id": reply.headers.get("X-Memagent-Run-Id"),
                "kind": reply.headers.get("X-Memagent-Read"),
                "content": reply.json()["choices"][0]["message"]["content"] if reply.is_success else reply.text,
            }
            os.write(file, json.dumps(answer).encode() + b"\n")
            if Path(stop).exists():
                return


def answered(client: httpx2.Client, url: str, request: dict[str, Any]) -> httpx2.Response:
    """The reply, however often the server is away, or has no policy to ask."""
    while True:
        try:
            reply = client.post(url, json=request)
            if reply.status_code not in {429, 503}:
                return reply
        except httpx2.TransportError:
            pass
        time.sleep(_BETWEEN_TRIES)


if __name__ == "__main__":
    main(*sys.argv[1:])
