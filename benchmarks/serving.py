"""Measure the cost of `memagent serve` in front of a policy server, and its behaviour with many and large requests.

    python -m benchmarks.serving            # about ten minutes
    python -m benchmarks.serving --small    # a tenth of the requests, as a test

The policy server is `benchmarks.slow_server`, so that only `memagent serve` is measured. Direct and relayed requests
alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.figures import Figure, print_table
from benchmarks.slow_server import run_module, run_slow_server

SHORT_REQUEST = {"model": "slow", "messages": [{"role": "user", "content": "What is the key of harbor? " * 10}]}


@dataclass(frozen=True)
class Server:
    """A `memagent serve` process."""

    api: str
    pid: int

    def read_memory(self) -> float:
        """Return the private memory in MiB; mapped files do not count."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    def read_cpu_seconds(self) -> float:
        """Return the processor time of the process so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def run_serve(upstream: str, *options: str) -> Iterator[Server]:
    """Start `memagent serve` in front of another server."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "memagent_graph", "serve", "--port", "0", "--base-url", upstream]
        command += ["--model", "slow", "--profile", "embedded", "--read-above", "1000", *options]
        environment = {**os.environ, "MEMAGENT_HOME": home}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr
            line = process.stderr.readline()
            while "serving at " not in line:
                assert line, "memagent serve did not start"
                line = process.stderr.readline()
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block the server
            try:
                yield Server(line.partition("serving at ")[2].split()[0], process.pid)
            finally:
                process.terminate()


def make_long_request(document_index: int, characters: int, **options: Any) -> dict[str, Any]:
    """Return a request with its own document of about `characters` characters."""
    text = f"Document {document_index}. " + "The river rose a little in the night. " * (characters // 38)
    question = {"role": "user", "content": "What is the key of harbor?"}
    return {"model": "slow", "messages": [{"role": "user", "content": text}, question], **options}


async def time_requests(
    session: aiohttp.ClientSession, api: str, request_count: int, in_flight: int
) -> tuple[float, float]:
    """Return the seconds for a number of short requests, and the median seconds of one."""
    slots, durations = asyncio.Semaphore(in_flight), []

    async def send_request() -> None:
        async with slots:
            request_start = time.perf_counter()
            async with session.post(f"{api}/chat/completions", json=SHORT_REQUEST) as reply:
                await reply.read()
                assert reply.status == 200, reply.status
            durations.append(time.perf_counter() - request_start)

    start_time = time.perf_counter()
    await asyncio.gather(*(send_request() for _ in range(request_count)))
    return time.perf_counter() - start_time, median(durations)


async def measure_overhead(rounds: int, request_count: int) -> list[Figure]:
    """Return the cost of relaying a short request, alone and with 64 in flight.

    A model server that writes 64 replies at once takes a quarter of a second for a short one, or longer.
    """
    delays, server_ratios, relay_ratios, cpu_ms = [], [], [], []
    with (
        run_slow_server(250) as upstream,
        run_serve(upstream) as server,
        run_module("bare_relay", str(urlsplit(upstream).port)) as relay,
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
            await time_requests(session, server.api, 64, 64)
            for _ in range(rounds):
                direct_times = await time_requests(session, upstream, request_count, 64)
                relay_ratios.append(direct_times[0] / (await time_requests(session, relay, request_count, 64))[0])
                cpu_before = server.read_cpu_seconds()
                server_times = await time_requests(session, server.api, request_count, 64)
                cpu_ms.append((server.read_cpu_seconds() - cpu_before) * 1000 / request_count)
                server_ratios.append(direct_times[0] / server_times[0])
    with run_slow_server(20) as upstream, run_serve(upstream) as server:
        async with aiohttp.ClientSession() as session:
            await time_requests(session, server.api, 20, 1)
            for _ in range(rounds):
                direct_times = await time_requests(session, upstream, request_count // 8, 1)
                server_times = await time_requests(session, server.api, request_count // 8, 1)
                delays.append((server_times[1] - direct_times[1]) * 1000)
    added_ms, throughput_ratio = median(delays), median(server_ratios)
    return [
        Figure.at_most("added to a short request, one in flight", added_ms, "ms", 3),
        Figure.at_least("throughput with 64 in flight, of direct", throughput_ratio, "", 0.95),
        Figure("the same where bytes are only copied", median(relay_ratios)),
        Figure("processor time of a request that is passed on", median(cpu_ms), "ms"),
    ]


async def stream_lines(
    session: aiohttp.ClientSession, api: str, body: bytes | AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a streamed reply."""
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{api}/chat/completions", data=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            yield line


async def time_first_event(session: aiohttp.ClientSession, api: str, document_index: int, characters: int) -> float:
    """Return the seconds from the last byte of a long request to the first event of its streamed reply."""
    body = json.dumps(make_long_request(document_index, characters, stream=True)).encode()
    send_time = time.perf_counter()

    async def send_parts() -> AsyncGenerator[bytes, None]:
        nonlocal send_time
        for start in range(0, len(body), 2**18):
            yield body[start : start + 2**18]
        send_time = time.perf_counter()

    async with contextlib.aclosing(stream_lines(session, api, send_parts())) as lines:
        async for line in lines:
            if line.startswith(b"data:"):
                break
    return time.perf_counter() - send_time


async def measure_large_requests(count: int, characters: int) -> list[Figure]:
    """Return the memory while large requests arrive at once, and the time to the first event of a single one."""
    options = ("--cancel-on-close", "--max-waiting", "1000", "--max-reads-per-key", "1000")
    timeout = aiohttp.ClientTimeout(total=None)
    with run_slow_server(50) as upstream, run_serve(upstream, *options) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await time_first_event(session, server.api, -1, characters)
            single_seconds = median(
                [await time_first_event(session, server.api, -2 - index, characters) for index in range(5)]
            )
            memory_before = server.read_memory()
            peak_memory = memory_before
            arrivals = asyncio.gather(
                *(time_first_event(session, server.api, document_index, characters) for document_index in range(count))
            )
            while not arrivals.done():
                peak_memory = max(peak_memory, server.read_memory())
                await asyncio.wait([arrivals], timeout=0.05)
            await arrivals
    megabytes = characters / 2**20
    return [
        Figure.at_most(f"first progress after the last byte of {megabytes:.0f} MB", single_seconds, "s", 1),
        Figure(f"memory before {count} such requests", memory_before, "MiB"),
        Figure.at_most(f"added while {count} arrive at once", peak_memory - memory_before, "MiB", 512),
    ]


async def measure_idle_streams(count: int, seconds: float) -> list[Figure]:
    """Return how many streams of waiting reads stay open, and the memory of one stream."""
    options = ("--max-waiting", "5000", "--max-reads-per-key", "5000", "--cancel-on-close")
    timeout = aiohttp.ClientTimeout(total=None)
    with run_slow_server(600_000) as upstream, run_serve(upstream, *options) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await time_first_event(session, server.api, -1, 8000)  # after this request the server knows its policy
            memory_before = server.read_memory()

            async def count_heartbeats(document_index: int) -> int:
                heartbeats = 0
                body = json.dumps(make_long_request(document_index, 8000, stream=True)).encode()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        async for line in stream_lines(session, server.api, body):
                            heartbeats += line.startswith(b":")
                return heartbeats

            streams = asyncio.gather(*(count_heartbeats(document_index) for document_index in range(count)))
            await asyncio.sleep(seconds * 0.8)
            kib_per_stream = (server.read_memory() - memory_before) * 1024 / count
            alive_count = sum(heartbeats > 0 for heartbeats in await streams)
    return [
        Figure.exactly(f"idle streams alive, of {count}", alive_count, count),
        Figure("memory of one", kib_per_stream, "KiB"),
    ]


async def measure_many_requests(count: int, seconds: float) -> list[Figure]:
    """Send reads faster than the limits allow; count the answers, the reads, and the refusals of requests."""
    refusals = 0
    with run_slow_server(5) as upstream, run_serve(upstream, "--max-reads", "16") as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send_until_answered(document_index: int) -> str:
                nonlocal refusals
                await asyncio.sleep(document_index * seconds / count)
                while True:
                    request = make_long_request(document_index, 6000)
                    async with session.post(f"{server.api}/chat/completions", json=request) as reply:
                        if reply.status == 200:
                            return str((await reply.json())["memagent"]["run_id"])
                        assert reply.status == 429, await reply.text()
                        refusals += 1
                        await asyncio.sleep(float(reply.headers["Retry-After"]))

            start_time = time.perf_counter()
            run_ids = await asyncio.gather(*(send_until_answered(document_index) for document_index in range(count)))
            elapsed_seconds = time.perf_counter() - start_time
            async with session.get(server.api.replace("/v1", "/metrics")) as reply:
                metrics_page = await reply.text()
    read_count = next(
        float(line.split()[-1]) for line in metrics_page.splitlines() if 'asked_total{kind="started"}' in line
    )
    return [
        Figure.exactly(f"answered, of {count} reads", len(set(run_ids)), count),
        Figure.exactly("reads done for them", read_count, count),
        Figure("seconds for all", elapsed_seconds, "s"),
        Figure("times a client was told to wait", refusals),
    ]


async def measure_all(is_small: bool) -> list[Figure]:
    """Return all figures; with `is_small`, of a tenth of the requests."""
    if is_small:
        return [
            *await measure_overhead(2, 320),
            *await measure_large_requests(5, 2 * 2**20),
            *await measure_idle_streams(50, 20),  # longer than the 15 s between heartbeats
            *await measure_many_requests(100, 6),
        ]
    return [
        *await measure_overhead(5, 1280),
        *await measure_large_requests(15, 15 * 2**20),
        *await measure_idle_streams(500, 30),
        *await measure_many_requests(1000, 60),
    ]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="send a tenth of the requests, as a test")
    print_table(asyncio.run(measure_all(parser.parse_args().small)))


if __name__ == "__main__":
    main()
