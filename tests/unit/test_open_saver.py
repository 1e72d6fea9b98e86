"""Checkpoint files that nobody closes."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from memagent_graph.storage.checkpoints import open_saver


@pytest.mark.filterwarnings("ignore:.*was deleted before being closed:ResourceWarning")
def test_a_file_that_was_not_closed_ends_its_thread_without_a_traceback_though_the_loop_is_closed(
    tmp_path, monkeypatch
) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    threads: list[threading.Thread] = []

    async def leave_open() -> None:
        for number in range(20):
            saver = await open_saver(tmp_path / f"{number}.sqlite")
            threads.append(saver.conn._thread)
            await saver.conn.commit()  # its thread refers to the last call's frame, and so would keep the saver
            del saver
        gc.collect()

    asyncio.run(leave_open())
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
