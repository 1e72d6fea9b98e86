"""The command line's part for the MCP server: `memagent mcp`."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memagent_graph.cli_options import (
    AnswerTokens,
    Checkpoints,
    ChunkBoundary,
    ChunkTokens,
    Concurrency,
    ContextWindow,
    MemoryTokens,
    Model,
    ProfileSpec,
    QuestionTokens,
    ReplaceUndecodable,
    Retries,
    Timeout,
    TokenizerSpec,
)
from memagent_graph.exit_codes import ExitCode, failures_told

if TYPE_CHECKING:
    from memagent_graph.reader import MemAgent

_PORT: Final = 8765
_MAX_BYTES: Final = 256 * 2**20


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("mcp")(mcp)


def mcp(
    root: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Files below this folder may be read. Repeatable.", show_default="none"),
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="Serve over HTTP instead of standard input and output.")] = False,
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http; 0 takes any that is free.")] = _PORT,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="With --http: listen to other machines. Nobody has to log in.")
    ] = False,
    server_name: Annotated[
        list[str] | None,
        typer.Option(help="With --allow-remote: a name that clients call this host. Repeatable.", show_default="none"),
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="The largest document.")] = _MAX_BYTES,
    max_chunks: Annotated[int | None, typer.Option(min=1, help="Chunks that one question may cost.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that one question may cost.")] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0.001, help="Seconds that one question may take.")] = None,
    model: Model = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="The policy server's API; its key is OPENAI_API_KEY.", show_default="$OPENAI_BASE_URL"),
    ] = None,
    tokenizer: TokenizerSpec = None,
    profile: ProfileSpec = None,
    context_window: ContextWindow = None,
    question_tokens: QuestionTokens = None,
    memory_tokens: MemoryTokens = None,
    chunk_tokens: ChunkTokens = None,
    answer_tokens: AnswerTokens = None,
    boundary: ChunkBoundary = None,
    replace_undecodable: ReplaceUndecodable = False,
    concurrency: Concurrency = 128,
    timeout: Timeout = 300.0,
    retries: Retries = 4,
    checkpoints: Checkpoints = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file for the run log. Clients see every run in it.", show_default="user's data folder"
        ),
    ] = None,
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Keep no log; clients then cannot ask again, nor list and show runs.")
    ] = False,
) -> None:
    """Serve MemAgent to agents that speak the Model Context Protocol.

    Files can be read below --root; where the client names roots of its own, below both. Without --root, those
    below the roots that a client over standard input and output names; one that names none, and any over HTTP, can only
    pass text.
    """
    given = locals()
    with failures_told():
        if http:
            _check_address(host, allow_remote=allow_remote, names=server_name or [])
            _serve_http(given)
        else:
            if (host, port, allow_remote, server_name) != ("127.0.0.1", _PORT, False, None):
                raise typer.BadParameter(
                    "--host, --port, --allow-remote and --server-name need it too", param_hint="'--http'"
                )
            _serve_stdio(given)


def _serve_stdio(given: dict[str, Any]) -> None:
    from memagent_mcp import make_server  # noqa: PLC0415
    from memagent_mcp.transports import reserve_standard_output, serve_stdio  # noqa: PLC0415

    output = reserve_standard_output()

    async def serve() -> None:
        async with _reader(given) as reader:
            await serve_stdio(make_server(reader, **_bounds(given)), output)

    asyncio.run(serve())


def _serve_http(given: dict[str, Any]) -> None:
    from memagent_mcp import make_server  # noqa: PLC0415
    from memagent_mcp.transports import listen, serve_http, url_of  # noqa: PLC0415

    async def serve() -> None:
        listener = listen(given["host"], given["port"])
        with listener:
            async with _reader(given) as reader:
                server = make_server(reader, trust_client_roots=False, **_bounds(given))
                typer.echo(f"serving at {url_of(listener)}; end with Ctrl-C", err=True)
                if given["allow_remote"]:
                    typer.echo(
                        "warning: nobody has to log in; whoever reaches this address can read below the roots, see the "
                        "runs in the log, and use the policy",
                        err=True,
                    )
                await serve_http(server, listener, [*(given["server_name"] or []), *_as_name(given["host"])])

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _check_address(host: str, *, allow_remote: bool, names: list[str]) -> None:
    from memagent_mcp.transports import is_local  # noqa: PLC0415

    if is_local(host):
        return
    if not allow_remote:
        raise typer.BadParameter(
            f"{host} lets other machines in, and nobody has to log in; add --allow-remote if that is meant",
            param_hint="'--host'",
        )
    if not names and not _as_name(host):
        raise typer.BadParameter(
            f"{host} is every address of this machine; say with --server-name what clients call it, and none is "
            "answered that calls it otherwise",
            param_hint="'--server-name'",
        )


def _as_name(host: str) -> list[str]:
    """The address as clients may call it: none for 0.0.0.0 and ::, which stand for all addresses."""
    try:
        return [] if ipaddress.ip_address(host).is_unspecified else [host]
    except ValueError:
        return [host]


def _reader(given: dict[str, Any]) -> MemAgent:
    from memagent_graph.settings import ReaderSettings  # noqa: PLC0415
    from memagent_graph.storage.paths import default_checkpoints  # noqa: PLC0415

    names = {each.name for each in fields(ReaderSettings)}
    settings = ReaderSettings(**{name: value for name, value in given.items() if name in names})
    return settings.with_server_of_environment().make_reader(
        checkpoints=given["checkpoints"] or default_checkpoints(),
        run_log=False if given["no_log"] else given["log"] or True,
    )


def _bounds(given: dict[str, Any]) -> dict[str, Any]:
    from memagent_graph.reading.state import Limits  # noqa: PLC0415

    return {
        "roots": given["root"] or (),
        "max_bytes": given["max_bytes"],
        "limits": Limits(given["max_chunks"], given["max_tokens"], given["max_seconds"]),
    }
