"""Serve the OpenAI API in front of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import ExitCode, failures_told
from memagent_graph.cli.options import (
    ApiKey,
    Checkpoints,
    Log,
    MaxSeconds,
    MaxTokensTotal,
    ReaderOptions,
    ReplaceUndecodable,
    Store,
)

if TYPE_CHECKING:
    from memagent_graph.reader import MemAgent
    from memagent_serve.serve_settings import ServeSettings

_MEGABYTE = 2**20


def _take_file(context: typer.Context, path: Path | None) -> Path | None:
    """Use the settings of a file as defaults; flags and the environment override them."""
    if path is not None:
        from memagent_serve.serve_settings import file_settings  # noqa: PLC0415

        with failures_told():
            known = {str(each.name) for each in context.command.params}
            context.default_map = {**(context.default_map or {}), **file_settings(path, known)}
    return path


@dataclass(frozen=True, kw_only=True)
class Serve(ReaderOptions):
    """Serve the OpenAI API in front of a policy: requests that fit its window are passed on, longer ones are read.

    Every option can also be set in the environment, as MEMAGENT_SERVE_MAX_READS for --max-reads, or in a TOML file
    named by --config, as max_reads. A flag overrides the environment, and the environment overrides the file.
    """

    environment: ClassVar[str] = "MEMAGENT_SERVE"
    examples: ClassVar = (
        "memagent serve",
        "memagent serve --base-url http://localhost:8000/v1 --port 8080",
        "memagent serve --host 0.0.0.0 --keys keys.toml --server-name reader.example.org",
    )

    config: Annotated[
        Path | None,
        typer.Option(is_eager=True, callback=_take_file, help="A TOML file with settings.", show_default="none"),
    ] = None
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
    max_tokens_total: MaxTokensTotal = None
    max_seconds: MaxSeconds = None
    max_body: Annotated[int, typer.Option(min=1, help="The maximum size of a request, in MiB.")] = 512
    spool: Annotated[int, typer.Option(min=1, help="Disk space for large requests, in MiB.")] = 4096
    uploads: Annotated[int, typer.Option(min=1, help="Disk space for the files of one key, in MiB.")] = 1024
    heartbeat: Annotated[float, typer.Option(min=1.0, help="Seconds between keep-alive comments in a stream.")] = 15.0
    max_connections: Annotated[int, typer.Option(min=1, help="How many clients may be connected at the same time.")] = (
        2000
    )
    api_key: ApiKey = None
    replace_undecodable: ReplaceUndecodable = False
    checkpoints: Checkpoints = None
    store: Store = None
    log: Log = None

    def make_reader(self) -> MemAgent:
        """The server's reader."""
        from memagent_graph.documents import open_store  # noqa: PLC0415
        from memagent_graph.storage.paths import default_checkpoints  # noqa: PLC0415

        return self.settings().make_reader(
            api_key=self.api_key,
            store=open_store(self.store),
            checkpoints=self.checkpoints or default_checkpoints(),
            run_log=self.log or True,
        )

    def serve_settings(self) -> ServeSettings:
        """The server's settings.

        Raises:
            MemAgentError: the keys cannot be read, or the address is open to everyone.
        """
        import os  # noqa: PLC0415

        from memagent_graph.addresses import as_name  # noqa: PLC0415
        from memagent_graph.reading.state import Limits  # noqa: PLC0415
        from memagent_graph.storage.paths import data_folder  # noqa: PLC0415
        from memagent_serve.keys import Keys  # noqa: PLC0415
        from memagent_serve.reads import Bounds  # noqa: PLC0415
        from memagent_serve.serve_settings import ServeSettings, require_safe  # noqa: PLC0415

        keys = Keys.load(self.keys, os.environ.get("MEMAGENT_KEYS", ""))
        names = tuple(self.server_name or ())
        require_safe(self.host, keys, names, forced=self.without_keys)
        return ServeSettings(
            folder=data_folder() / "serve",
            keys=keys,
            names=(*names, *as_name(self.host)),
            origins=tuple(self.allow_origin or ()),
            bounds=Bounds(
                reads=self.max_reads,
                waiting=self.max_waiting,
                per_key=self.max_reads_per_key,
                keep_seconds=self.keep_minutes * 60,
                cancel_on_close=self.cancel_on_close,
                limits=Limits(max_tokens_total=self.max_tokens_total, max_seconds=self.max_seconds),
            ),
            read_above=self.read_above,
            max_body=self.max_body * _MEGABYTE,
            spool=self.spool * _MEGABYTE,
            uploads=self.uploads * _MEGABYTE,
            heartbeat=self.heartbeat,
            max_connections=self.max_connections,
        )

    def run(self) -> None:
        """Run the command."""
        import asyncio  # noqa: PLC0415

        with failures_told():
            try:
                asyncio.run(_serve(self))
            except KeyboardInterrupt:
                raise typer.Exit(ExitCode.INTERRUPTED) from None


async def _serve(request: Serve) -> None:
    settings = request.serve_settings()
    _require_extra()
    from memagent_graph.addresses import in_url, listen  # noqa: PLC0415
    from memagent_serve.app import Serving  # noqa: PLC0415
    from memagent_serve.http_server import run_server  # noqa: PLC0415
    from memagent_serve.page_sessions import PageSessions  # noqa: PLC0415

    with listen(request.host, request.port) as listener:
        async with request.make_reader() as reader:
            serving = Serving(reader, settings)
            host, port = listener.getsockname()[:2]
            typer.echo(
                f"serving at http://{in_url(host)}:{port}/v1 with {request.settings().policy_told}; "
                "press Ctrl-C to stop",
                err=True,
            )
            sessions = PageSessions(settings.keys)
            token = f"#token={sessions.token}" if sessions.token else " (sign in with a key)"
            typer.echo(f"the live page is at http://{in_url(host)}:{port}/{token}", err=True)
            if not settings.keys:
                typer.echo("there are no keys: everyone who can reach this address may use it", err=True)
            await run_server(serving, listener, sessions)


def _require_extra() -> None:
    from importlib.util import find_spec  # noqa: PLC0415

    from memagent_graph.errors import MissingExtraError  # noqa: PLC0415

    needed = ("starlette", "uvicorn", "sse_starlette", "prometheus_client", "python_multipart")
    if any(find_spec(each) is None for each in needed):
        raise MissingExtraError("serve", "memagent serve")


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    add_command(app, "serve", Serve)
