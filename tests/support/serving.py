"""`memagent serve` on a real socket: in a thread of the test's process, or in its own process."""

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
from support.scripts import SMALL_BUDGET

ALICE, BOB = "alice-has-a-secret-key", "bob-has-another-secret"
KEYS = Keys([(Owner("alice"), ALICE), (Owner("bob"), BOB)])


def build_reader(
    upstream: str | None, folder: Path, *, policy: Any = None, retries: int = 0, **options: Any
) -> MemAgent:
    """Return a reader with small budgets, on a policy server or with another policy."""
    return MemAgent(
        policy
        or OpenAICompatiblePolicy("fake", base_url=upstream, api_key="the-server's-own-key", max_retries=retries),
        **{
            "tokenizer": "embedded",
            "budget": SMALL_BUDGET,
            "prompts": load_prompts(),
            "store": folder / "documents",
            "checkpoints": folder / "checkpoints.sqlite",
            "run_log": folder / "runs.sqlite",
            **options,
        },
    )


class Server:
    """A running server: its address, and the objects that it uses."""

    def __init__(self, url: str, resources: ServerResources, sessions: PageSessions | None = None) -> None:
        self.url = url
        self.resources = resources
        self.sessions = sessions

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serve(
    upstream: str | None,
    folder: Path,
    *,
    policy: Any = None,
    reader: dict[str, Any] | None = None,
    page: bool = False,
    **settings: Any,
) -> Iterator[Server]:
    """Run a server in a thread, with settings of `ServeSettings` and, with `page`, the live page."""
    ready, stop, failure = threading.Event(), threading.Event(), []
    servers: list[Server] = []
    listener = listen("127.0.0.1", 0)

    async def run_until_stopped() -> None:
        async with build_reader(upstream, folder, policy=policy, **(reader or {})) as agent:
            resources = ServerResources(agent, ServeSettings(**{"folder": folder / "serve", **settings}))
            sessions = PageSessions(resources.settings.keys) if page else None
            routes = LivePage(resources, sessions).make_routes() if sessions else []
            app = make_app(resources, routes, sessions)
            options = {**BOUNDED_HTTP, "limit_concurrency": resources.settings.max_connections}
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **options))
            server.config.timeout_graceful_shutdown = 1
            server_task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not server_task.done():  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.01)
            servers.append(Server(f"http://127.0.0.1:{listener.getsockname()[1]}", resources, sessions))
            ready.set()
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await server_task

    def run() -> None:
        try:
            asyncio.run(run_until_stopped())
        except BaseException as error:
            failure.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30), "the server did not start"
    if failure:
        raise failure[0]
    try:
        yield servers[0]
    finally:
        stop.set()
        thread.join(30)
        listener.close()
        assert not failure, failure
        assert not thread.is_alive(), "the server did not stop"


class ServingProcess(KillableProcess):
    """`memagent serve` as a process that can be killed; it keeps its port when it starts again.

    Args:
        upstream: the base URL of the policy server.
        home: its data folder.
        options: further command-line options.
        model: the policy server's model.
        environment: further environment variables.
    """

    def __init__(
        self, upstream: str, home: Path, *options: str, model: str = "fake", environment: dict[str, str] | None = None
    ) -> None:
        self._options = ["--base-url", upstream, "--model", model, "--tokenizer", "embedded", *options]
        self._environment = {**os.environ, "MEMAGENT_HOME": str(home), **(environment or {})}
        self._port = 0
        self.page = ""
        """The URL of its live page."""

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
