"""A completion server that costs almost nothing and answers after a fixed time: `benchmarks.slow_server MS N`.

It prints its port, then serves until its standard input closes. N is the number of token ids and log-probs per reply;
0 leaves them out. The reply is the same bytes every time, so that only the client is measured.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import msgspec


def reply(tokens: int) -> bytes:
    """A chat completion in vLLM's format, including the HTTP header."""
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
        "data": [{"id": "slow", "object": "model", "max_model_len": 8192}],  # the list of models, in the same bytes
    }
    if tokens:
        # Random numbers, so that a log that keeps them cannot compress them better than real ones.
        numbers = random.Random(1)
        token_entry = {"token": " kept", "bytes": [32, 107, 101, 112, 116], "top_logprobs": []}
        content = [{**token_entry, "logprob": -numbers.expovariate(2.0)} for _ in range(tokens)]
        choice |= {"logprobs": {"content": content}, "token_ids": numbers.choices(range(150_000), k=tokens)}
        body["prompt_token_ids"] = numbers.choices(range(150_000), k=1500)
    content_bytes = msgspec.json.encode(body)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(content_bytes),
        content_bytes,
    )


async def serve(delay: float, tokens: int) -> None:
    """Answer every request after `delay` seconds, until standard input closes."""
    answer = reply(tokens)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                if not head.startswith(b"get "):  # the model list is returned at once
                    await asyncio.sleep(delay)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]) / 1000, int(sys.argv[2])))
