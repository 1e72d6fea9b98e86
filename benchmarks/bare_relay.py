"""A process that only copies bytes between clients and a server: `benchmarks.bare_relay PORT`, the server's.

It prints its own port, then works until its standard input closes. What it costs is the least that any server between
the two can cost on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(port: int) -> None:
    """Relay connections to a port, until standard input closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(asyncio.CancelledError):  # it ends while connections are open
            await asyncio.gather(copied(reader, upstream_writer), copied(upstream_reader, writer))

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
