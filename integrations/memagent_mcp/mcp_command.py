"""Serve the reader to agents as an MCP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer

from memagent_graph.cli.options import (
    CheckpointsOption,
    MaxSecondsOption,
    MaxTokensTotalOption,
    ReaderOptions,
    StoreOption,
    open_reader,
)

if TYPE_CHECKING:
    from memagent_graph.reader import MemAgent

_HOST: Final = "127.0.0.1"
_PORT: Final = 8765
_MAX_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Mcp(ReaderOptions):
    """Serve MemAgent to agents over the Model Context Protocol (MCP).

    Clients can read files below --root. If a client declares its own roots, it can only read files below both. Without
    --root, a client over standard input and output can read files below its own roots, and other clients can only
    send text.
    """

    examples: ClassVar = (
        "memagent mcp --root reports",
        "memagent mcp --root reports --http --port 8765",
    )
    root: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="A folder below which files may be read. Repeatable.", show_default="none"),
    ] = None
    http: Annotated[bool, typer.Option("--http", help="Serve over HTTP instead of standard input and output.")] = False
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = _HOST
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: the port; 0 uses any free one.")] = _PORT
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="With --http: accept clients on other machines. There is no login.")
    ] = False
    server_name: Annotated[
        list[str] | None,
        typer.Option(
            help="With --allow-remote: a name of this host that clients use. Repeatable.", show_default="none"
        ),
    ] = None
    max_bytes: Annotated[
        int,
        typer.Option(min=1, help="The maximum size of a document, in bytes. A request over HTTP has 4 MiB at most."),
    ] = _MAX_BYTES
    max_chunks: Annotated[int | None, typer.Option(min=1, help="Stop each read after this many chunks.")] = None
    max_tokens_total: MaxTokensTotalOption = None
    max_seconds: MaxSecondsOption = None
    checkpoints: CheckpointsOption = None
    store: StoreOption = None
    log: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file for the run log. Clients see every run in it.", show_default="user's data folder"
        ),
    ] = None
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep no log. Clients then cannot ask again, list runs or show runs.")
    ] = False

    def make_reader(self) -> MemAgent:
        """Build the reader of the server."""
        from memagent_graph.storage.private_files import get_default_checkpoints_path  # noqa: PLC0415

        options = replace(self, checkpoints=self.checkpoints or str(get_default_checkpoints_path()))
        return open_reader(options, self.make_settings(), is_logged=not self.no_log)

    def make_server(self, reader: MemAgent) -> Any:  # a `MemAgentServer`, of a layer above
        """Build the server. It trusts a client's roots only over standard input and output."""
        from memagent_graph.reading.state import Limits  # noqa: PLC0415
        from memagent_mcp import make_server  # noqa: PLC0415

        return make_server(
            reader,
            roots=self.root or (),
            trust_client_roots=not self.http,
            max_bytes=self.max_bytes,
            limits=Limits(self.max_chunks, self.max_tokens_total, self.max_seconds),
        )

    def run(self) -> None:
        """Run the command."""
        http_options = (self.host, self.port, self.allow_remote, self.server_name)
        if not self.http and http_options != (_HOST, _PORT, False, None):
            raise typer.BadParameter(
                "--host, --port, --allow-remote and --server-name need this option", param_hint="'--http'"
            )
        asyncio.run(_serve_http(self) if self.http else _serve_stdio(self))


@asynccontextmanager
async def _open_server(command: Mcp) -> AsyncIterator[Any]:
    async with command.make_reader() as reader, aclosing(command.make_server(reader)) as server:
        yield server


async def _serve_stdio(command: Mcp) -> None:
    from memagent_mcp.server import reserve_standard_output, serve_stdio  # noqa: PLC0415

    output = reserve_standard_output()
    async with _open_server(command) as server:
        await serve_stdio(server, output)


async def _serve_http(command: Mcp) -> None:
    from memagent_graph.addresses import list_host_names, listen  # noqa: PLC0415
    from memagent_mcp.server import get_url, serve_http  # noqa: PLC0415

    host_names = list_host_names(
        command.host,
        command.server_name or (),
        danger=None if command.allow_remote else "there is no login",
        remedy="Add --allow-remote if you want this.",
    )
    with listen(command.host, command.port) as listener:
        async with _open_server(command) as server:
            typer.echo(f"serving at {get_url(listener)}; press Ctrl-C to stop", err=True)
            if command.allow_remote:
                typer.echo(
                    "warning: there is no login; everyone who can reach this address can read files below the roots, "
                    "see the runs in the log, and use the policy",
                    err=True,
                )
            await serve_http(server, listener, host_names)
