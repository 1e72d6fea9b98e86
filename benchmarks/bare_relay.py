"""Relay bytes between clients and a server, without reading them: `python -m benchmarks.bare_relay PORT`.

PORT is the server's port. The process prints its own port, then relays until its standard input closes. Its cost is
the minimum for any server between the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from `reader` to `writer` until one of the two connections ends."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(port: int) -> None:
    """Relay connections to a port of this machine until standard input closes."""

    async def relay_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(asyncio.CancelledError):  # at the end, when connections are still open
            await asyncio.gather(copy_bytes(reader, upstream_writer), copy_bytes(upstream_reader, writer))

    server = await asyncio.start_server(relay_connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
