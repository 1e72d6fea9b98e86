"""Serve the OpenAI API in front of a policy."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from memagent_graph.cli.options import (
    CheckpointsOption,
    LogOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    ReaderOptions,
    StoreOption,
    open_reader,
)
from memagent_graph.errors import PolicyError
from memagent_graph.plain_text import make_one_line

if TYPE_CHECKING:
    from memagent_graph.reader import MemAgent
    from memagent_serve.serve_settings import ServeSettings

_MEBIBYTE: Final = 2**20
_SETTING_NAMES: Final = (
    "max_reads", "max_waiting", "max_reads_per_key", "cancel_on_close", "read_above", "max_connections"
)  # fmt: skip
"""Options whose values are settings of the server."""
_MEBIBYTE_OPTIONS: Final = ("max_body", "request_memory", "storage", "total_storage")
"""Options in MiB; the settings with these names are in bytes."""
_SHUTDOWN_TIMEOUT_SECONDS: Final = 5
_DESCRIPTION_TIMEOUT_SECONDS: Final = 5
"""How long to wait for the policy server's description of its model before requests are accepted without it."""


@dataclass(frozen=True, kw_only=True)
class Serve(ReaderOptions):
    """Serve the OpenAI API in front of a policy: requests that fit its window are passed on, longer ones are read.

    Every option can also be set in the environment, as MEMAGENT_SERVE_MAX_READS for --max-reads. A flag overrides the
    environment.
    """

    context_settings: ClassVar = {"auto_envvar_prefix": "MEMAGENT_SERVE"}
    examples: ClassVar = (
        "memagent serve",
        "memagent serve --base-url http://localhost:8000/v1 --port 8080",
        "memagent serve --host 0.0.0.0 --keys keys.toml --server-name reader.example.org",
    )

    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 8080
    keys: Annotated[
        Path | None,
        typer.Option(help='A TOML file with one line for each key: alice = "KEY".', show_default="$MEMAGENT_KEYS"),
    ] = None
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Allow other machines to connect without keys.")
    ] = False
    server_name: Annotated[
        list[str] | None, typer.Option(help="A host name that clients use. Repeatable.", show_default="--host")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="The origin of web pages that may send requests. Repeatable.", show_default="none"),
    ] = None
    read_above: Annotated[
        int | None,
        typer.Option(min=1, help="Read prompts of more tokens than this.", show_default="the policy's window"),
    ] = None
    max_reads: Annotated[int, typer.Option(min=1, help="How many reads run at the same time.")] = 4
    max_waiting: Annotated[int, typer.Option(min=0, help="How many more reads may wait.")] = 64
    max_reads_per_key: Annotated[
        int, typer.Option(min=1, help="How many reads one key may have, including waiting ones.")
    ] = 16
    keep_minutes: Annotated[
        float, typer.Option(min=0.0, help="For how many minutes a finished read answers the same request.")
    ] = 60.0
    cancel_on_close: Annotated[
        bool, typer.Option("--cancel-on-close", help="Cancel a read when its last client disconnects.")
    ] = False
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    max_body: Annotated[
        int, typer.Option(min=1, help="The maximum size of a request, in MiB; larger documents are uploaded as files.")
    ] = 64
    request_memory: Annotated[
        int, typer.Option(min=1, help="The maximum size of all large requests together, in MiB.")
    ] = 256
    storage: Annotated[int, typer.Option(min=1, help="Disk space for the files and texts of one key, in MiB.")] = 1024
    total_storage: Annotated[
        int, typer.Option(min=1, help="Disk space for the files and texts of all keys, in MiB.")
    ] = 16384
    max_connections: Annotated[int, typer.Option(min=1, help="How many clients may be connected at the same time.")] = (
        2000
    )
    checkpoints: CheckpointsOption = None
    store: StoreOption = None
    log: LogOption = None

    def make_reader(self) -> MemAgent:
        """Return the server's reader."""
        return open_reader(self, self.make_settings())

    def make_serve_settings(self) -> ServeSettings:
        """Return the server's settings.

        Raises:
            MemAgentError: the keys cannot be read, or the address is open to everyone.
        """
        from memagent_graph.addresses import list_host_names  # noqa: PLC0415
        from memagent_graph.reading.state import Limits  # noqa: PLC0415
        from memagent_graph.storage.private_files import get_data_folder  # noqa: PLC0415
        from memagent_serve.keys import Keys  # noqa: PLC0415
        from memagent_serve.serve_settings import ServeSettings  # noqa: PLC0415

        keys = Keys.load(self.keys, os.environ.get("MEMAGENT_KEYS", ""))
        names = list_host_names(
            self.host,
            self.server_name or (),
            danger=None if keys or self.without_keys else "there are no keys",
            remedy="Set --keys to a file of keys, or add --without-keys if everyone may use this server.",
        )
        return ServeSettings(
            folder=get_data_folder() / "serve",
            keys=keys,
            names=names,
            origins=tuple(self.allow_origin or ()),
            keep_seconds=self.keep_minutes * 60,
            limits=Limits(max_tokens_total=self.max_tokens_total, max_seconds=self.max_seconds),
            **{name: getattr(self, name) for name in _SETTING_NAMES},
            **{name: getattr(self, name) * _MEBIBYTE for name in _MEBIBYTE_OPTIONS},
        )

    def run(self) -> None:
        """Run the command."""
        asyncio.run(_serve(self))


async def _serve(command: Serve) -> None:
    settings = command.make_serve_settings()
    import uvicorn  # noqa: PLC0415

    from memagent_graph.addresses import format_host, listen  # noqa: PLC0415
    from memagent_graph.bounded_http import BOUNDED_HTTP  # noqa: PLC0415
    from memagent_serve.app import ServerResources, make_app  # noqa: PLC0415
    from memagent_serve.live import LivePage  # noqa: PLC0415
    from memagent_serve.page_sessions import PageSessions  # noqa: PLC0415

    with listen(command.host, command.port) as listener:
        async with command.make_reader() as reader:
            try:
                await asyncio.wait_for(asyncio.shield(reader.aprepare()), _DESCRIPTION_TIMEOUT_SECONDS)
            except (PolicyError, TimeoutError) as error:  # its server may start later; other errors stop this command
                typer.echo(f"the policy does not answer yet. {make_one_line(str(error))}", err=True)
            resources = ServerResources(reader, settings)
            host, port = listener.getsockname()[:2]
            typer.echo(
                f"serving at http://{format_host(host)}:{port}/v1 with {command.make_settings().policy_reason}; "
                "press Ctrl-C to stop",
                err=True,
            )
            sessions = PageSessions(settings.keys)
            token = f"#token={sessions.token}" if sessions.token else " (sign in with a key)"
            typer.echo(f"the live page is at http://{format_host(host)}:{port}/{token}", err=True)
            if not settings.keys:
                typer.echo("there are no keys: everyone who can reach this address may use it", err=True)
            config = uvicorn.Config(
                make_app(resources, LivePage(resources, sessions).make_routes(), sessions),
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=settings.max_connections,
                # Without this, a stream that never ends would keep the server from stopping.
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_SECONDS,
                **BOUNDED_HTTP,
            )
            await uvicorn.Server(config).serve(sockets=[listener])
