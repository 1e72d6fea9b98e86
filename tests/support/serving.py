"""A real `memagent serve` over a real socket: in a thread of the test's process, or as a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from memagent_graph import MemAgent, OpenAICompatiblePolicy, load_prompts
from memagent_graph.addresses import listen
from memagent_graph.bounded_http import BOUNDED_HTTP
from memagent_serve.app import ServerResources, make_app
from memagent_serve.keys import Keys, Owner
from memagent_serve.live import LivePage
from memagent_serve.page_sessions import PageSessions
from memagent_serve.serve_settings import ServeSettings
from support.programs import KillableProcess, Program
from support.scripts import SMALL

ALICE, BOB = "alice-has-a-secret-key", "bob-has-another-secret"
KEYS = Keys([(Owner("alice"), ALICE), (Owner("bob"), BOB)])


def build_reader(
    upstream: str | None, folder: Path, *, policy: Any = None, retries: int = 0, **options: Any
) -> MemAgent:
    """A reader with small budgets in front of a server, or with a policy of its own."""
    return MemAgent(
        policy
        or OpenAICompatiblePolicy("fake", base_url=upstream, api_key="the-server's-own-key", max_retries=retries),
        **{
            "tokenizer": "embedded",
            "budget": SMALL,
            "prompts": load_prompts(),
            "store": folder / "documents",
            "checkpoints": folder / "checkpoints.sqlite",
            "run_log": folder / "runs.sqlite",
            **options,
        },
    )


class Served:
    """The value of `served`: the server's address, and the objects that it uses."""

    def __init__(self, url: str, serving: ServerResources, sessions: PageSessions | None = None) -> None:
        self.url = url
        self.serving = serving
        self.sessions = sessions

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def served(
    upstream: str | None,
    folder: Path,
    *,
    policy: Any = None,
    reader: dict[str, Any] | None = None,
    page: bool = False,
    **settings: Any,
) -> Iterator[Served]:
    """A server in a thread, with the settings of `ServeSettings`, and with its live page if asked for."""
    ready, stop, failure = threading.Event(), threading.Event(), []
    made: list[Served] = []
    listener = listen("127.0.0.1", 0)

    async def serve() -> None:
        async with build_reader(upstream, folder, policy=policy, **(reader or {})) as agent:
            serving = ServerResources(agent, ServeSettings(**{"folder": folder / "serve", **settings}))
            sessions = PageSessions(serving.settings.keys) if page else None
            routes = LivePage(serving, sessions).make_routes() if sessions else []
            app = make_app(serving, routes, sessions)
            options = {**BOUNDED_HTTP, "limit_concurrency": serving.settings.max_connections}
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **options))
            server.config.timeout_graceful_shutdown = 1
            running = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not running.done():  # noqa: ASYNC110  uvicorn tells no other way
                await asyncio.sleep(0.01)
            made.append(Served(f"http://127.0.0.1:{listener.getsockname()[1]}", serving, sessions))
            ready.set()
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await running

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failure.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30), "the server did not start"
    if failure:
        raise failure[0]
    try:
        yield made[0]
    finally:
        stop.set()
        thread.join(30)
        listener.close()
        assert not failure, failure
        assert not thread.is_alive(), "the server did not stop"


class ServingProcess(KillableProcess):
    """`memagent serve` as a process, which can be killed; its port stays the same when it starts again.

    Args:
        upstream: the policy server's API.
        home: its data folder.
        options: further options.
        model: the model that the policy server serves.
        environment: further variables.
    """

    def __init__(
        self,
        upstream: str,
        home: Path,
        *options: str,
        model: str = "fake",
        environment: dict[str, str] | None = None,
    ) -> None:
        self._options = ["--base-url", upstream, "--model", model, "--tokenizer", "embedded", *options]
        self._environment = {**os.environ, "MEMAGENT_HOME": str(home), **(environment or {})}
        self._port = 0
        self.page = ""
        """The link to its live page."""

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        command = [sys.executable, "-m", "memagent_graph", "serve", "--port", str(self._port), *self._options]
        self.process = Program(command, stderr=subprocess.PIPE, env=self._environment)
        output = ""
        while "the live page is at " not in output:
            line = self.process.stderr.readline()
            assert line, f"the server did not start: {output}"
            output += line
        self._port = int(output.partition("serving at http://127.0.0.1:")[2].partition("/")[0])
        self.page = output.partition("the live page is at ")[2].split()[0]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
