"""A server that answers after a fixed time, at almost no cost: `python -m benchmarks.slow_server MILLISECONDS TOKENS`.

The process prints its port, then serves until its standard input closes. TOKENS is the number of token ids and
log-probs of a reply; with 0, it has none. All replies have the same bytes, so that only the client is measured.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec


def run_slow_server(milliseconds: float, tokens: int = 0) -> AbstractContextManager[str]:
    """Run this module's server; the result yields its base URL.

    Args:
        milliseconds: the time until the server answers a request.
        tokens: the number of token ids and log-probs of a reply.
    """
    return run_module("slow_server", str(milliseconds), str(tokens))


@contextmanager
def run_module(name: str, *arguments: str) -> Iterator[str]:
    """Run a server of this folder, which prints its port, and yield its base URL."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"  # the server ends when its input closes


def make_reply(tokens: int) -> bytes:
    """Return a chat completion in vLLM's format, with the HTTP header.

    The body also has the fields of a list of models, so that the same bytes answer both requests.
    """
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "what was kept of the document " * 16},
        "finish_reason": "stop",
    }
    body: dict[str, Any] = {
        "object": "chat.completion",
        "model": "slow",
        "choices": [choice],
        "usage": {"prompt_tokens": 1500, "completion_tokens": 100, "total_tokens": 1600},
        "data": [{"id": "slow", "object": "model", "max_model_len": 8192}],
    }
    if tokens:
        # The numbers are random, so that a log cannot compress them better than real ones.
        rng = random.Random(1)
        token_entry = {"token": " kept", "bytes": [32, 107, 101, 112, 116], "top_logprobs": []}
        content = [{**token_entry, "logprob": -rng.expovariate(2.0)} for _ in range(tokens)]
        choice |= {"logprobs": {"content": content}, "token_ids": rng.choices(range(150_000), k=tokens)}
        body["prompt_token_ids"] = rng.choices(range(150_000), k=1500)
    body_bytes = msgspec.json.encode(body)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body_bytes),
        body_bytes,
    )


async def serve(delay: float, tokens: int) -> None:
    """Answer every request after `delay` seconds, until standard input closes."""
    reply = make_reply(tokens)

    async def answer_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(header.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                if not header.startswith(b"get "):  # a request for the list of models is answered at once
                    await asyncio.sleep(delay)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(answer_requests, "127.0.0.1", 0, backlog=1024, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]) / 1000, int(sys.argv[2])))
