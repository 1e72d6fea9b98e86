"""Long-lived processes: descriptors, threads and memory do not grow with reads, requests, uploads or pages."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from support.fake_server import FakeServer
from support.scripts import make_document
from support.serving import build_reader, serve
from unit.serving.test_live_page import Browser, wait_until_finished

SHORT_TEXT = make_document({0.5: "The key of harbor is 4711."}, words=60)
LONG_TEXT = make_document({0.5: "The key of harbor is 4711."}, words=900)
QUESTION = "What is the key of harbor?"
READS_PER_LOOP = 10
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Footprint:
    """The resources of a process; its memory is in bytes."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def clear_and_measure(cls, *servers: FakeServer) -> Footprint:
        for server in servers:
            for record in (server.requests, server.bodies, server.headers):
                record.clear()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return cls(
            len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")
        )

    def assert_no_growth(self, final: Footprint, record: Callable[[str, Any], None]) -> None:
        record("before", str(self))
        record("after", str(final))
        assert final.descriptors <= self.descriptors + 4
        assert final.threads <= self.threads + 4
        assert final.memory <= self.memory + 32 * MEBIBYTE


def test_reads_in_many_event_loops_do_not_grow_the_process(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    loops, warmup_loops = size(8, 1000), size(2, 50)
    with FakeServer(window=1000) as upstream:
        agent = build_reader(upstream.base_url, tmp_path)

        async def read_many(loop: int) -> None:
            ids = [f"{loop}-{index}" for index in range(READS_PER_LOOP)]
            results = await asyncio.gather(*(agent.aread(SHORT_TEXT, QUESTION, run_id=run_id) for run_id in ids))
            assert {result.answer for result in results} == {"4711"}

        for loop in range(loops):
            if loop == warmup_loops:
                initial = Footprint.clear_and_measure(upstream)
            asyncio.run(read_many(loop))
            Footprint.clear_and_measure(upstream)
        initial.assert_no_growth(Footprint.clear_and_measure(upstream), record_property)


def test_requests_reads_uploads_and_pages_do_not_grow_a_server(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    requests, runs, warmup_requests = size(16, 2000), size(4, 200), size(2, 40)
    with FakeServer(window=1000) as upstream, serve(upstream.base_url, tmp_path, page=True) as server:
        browser = Browser.sign_in(server)

        def ask(number: int) -> None:
            content = f"{LONG_TEXT} {number}" if number % 10 == 0 else f"<problem>{number}</problem>"
            messages = [{"role": "user", "content": content}, {"role": "user", "content": QUESTION}]
            reply = httpx2.post(f"{server.api}/chat/completions", json={"model": "fake", "messages": messages})
            assert reply.status_code == 200, reply.text

        def read_on_page(number: int) -> None:
            (run_id,) = browser.start_reads(document=f"{SHORT_TEXT} {number}")
            assert wait_until_finished(browser, run_id)["answer"] == "4711"
            assert browser.client.get(f"/page/reads/{run_id}/page").status_code == 200

        for number in range(max(requests, runs)):
            if number == warmup_requests:
                initial = Footprint.clear_and_measure(upstream)
            if number < requests:
                ask(number)
            if number < runs:
                read_on_page(number)
            if number % 20 == 0:
                Footprint.clear_and_measure(upstream)
        browser.client.close()
        initial.assert_no_growth(Footprint.clear_and_measure(upstream), record_property)
