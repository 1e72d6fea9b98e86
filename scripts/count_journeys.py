"""Count the files on four journeys through the code: `python scripts/count_journeys.py [FOLDER]`.

    document -> request body    from `MemAgent.aread` to the first request to the policy's server
    reply -> log row            from the reply to that request until its row is in the log
    a chunk                     from the second request to the third
    logged run -> loss          from the first line of `memagent_training` to the first loss of `memagent train`

A profile hook counts the files of the project whose functions were called, and how often each file was entered from
another one. A coroutine that continues is not an entry, and code that runs during an import does not count. FOLDER is
the checkout to count; the default is this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

PROJECT_FOLDERS: Final = ("memagent_graph", "integrations", "training")
_RESUMABLE_FLAGS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MAX_ENTRIES: Final = 2


class Journey:
    """The files of the project that are used while `is_on`, and the entries of each file from another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_on = False
        self.files: set[str] = set()
        self.entries: Counter[str] = Counter()
        self._suspended: set[FrameType] = set()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call, as `sys.setprofile` reports it."""
        if event != "call" or not self.is_on or (file := self._find_file(frame)) is None or not _is_function(frame):
            return
        if frame.f_code.co_flags & _RESUMABLE_FLAGS:
            if frame in self._suspended:
                return
            self._suspended.add(frame)
        caller = frame.f_back
        while caller is not None and self._find_file(caller) is None:
            caller = caller.f_back
        if caller is not None and not _is_function(caller):
            return
        self.files.add(file)
        if caller is not None and self._find_file(caller) != file:
            self.entries[file] += 1

    def _find_file(self, frame: FrameType) -> str | None:
        """Return the path of a frame's file within the checkout, or None if it is not of the project."""
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(self.root) and (relative := path.relative_to(self.root)).parts[0] in PROJECT_FOLDERS:
            return str(relative)
        return None

    def __str__(self) -> str:
        frequent_entries = [f"{file} {count}" for file, count in self.entries.most_common() if count > _MAX_ENTRIES]
        return f"{len(self.files)} files; entered more than twice from another: {', '.join(frequent_entries) or 'none'}"


def _is_function(frame: FrameType) -> bool:
    """Return whether a frame belongs to a function, not to the body of a module or class."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def count_read(root: Path) -> tuple[Journey, Journey, Journey]:
    """Count the first three journeys, with the tests' server, a log and checkpoints in memory."""
    import aiohttp  # noqa: PLC0415
    from langgraph.checkpoint.memory import InMemorySaver  # noqa: PLC0415
    from support.fake_server import FakeServer  # noqa: PLC0415

    from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, SamplingParams  # noqa: PLC0415

    request_journey, row_journey, chunk_journey = Journey(root), Journey(root), Journey(root)
    completion_count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        for journey in (request_journey, row_journey, chunk_journey):
            journey.profile(frame, event, argument)

    send = aiohttp.ClientSession._request

    async def track_and_send(session: aiohttp.ClientSession, *arguments: Any, **options: Any) -> Any:
        nonlocal completion_count
        completion_count += "chat/completions" in str(arguments)
        request_journey.is_on, chunk_journey.is_on = completion_count < 1, completion_count == 2
        reply = await send(session, *arguments, **options)
        row_journey.is_on = completion_count == 1
        return reply

    class TrackingConnection(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if sql.startswith("INSERT INTO conversations"):
                row_journey.is_on = False
            return super().execute(sql, *parameters)

    connect = sqlite3.connect
    threading.setprofile(profile)
    sys.setprofile(profile)
    with tempfile.TemporaryDirectory() as folder, FakeServer(vllm=True) as fake, contextlib.ExitStack() as stack:
        aiohttp.ClientSession._request = track_and_send  # type: ignore[method-assign]
        stack.callback(setattr, aiohttp.ClientSession, "_request", send)
        sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=TrackingConnection, **options)  # type: ignore[assignment]
        stack.callback(setattr, sqlite3, "connect", connect)
        agent = MemAgent(
            OpenAICompatiblePolicy("fake", base_url=fake.base_url),
            tokenizer="embedded",
            budget=Budget(512, 64, 64, 100, 64),
            sampling=SamplingParams(logprobs=True),
            store=Path(folder) / "documents",
            checkpoints=InMemorySaver(),
            run_log=Path(folder) / "runs.sqlite",
        )
        text = " and then ".join(f"word{index}" for index in range(600))

        async def read_text() -> None:
            request_journey.is_on = True
            await agent.aread(text, "What is said?")
            await agent.aclose()

        asyncio.run(read_text())
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return request_journey, row_journey, chunk_journey


def count_training(root: Path) -> Journey:
    """Count the journey from logged runs (of the recorded promises) to the first loss."""
    from promises.scenarios import SGD_STEP, TRAINING, isolate_home, run_memagent, write_log_lines  # noqa: PLC0415

    journey = Journey(root)
    has_begun = has_ended = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal has_begun, has_ended
        path = frame.f_code.co_filename
        if not has_begun and event == "call" and "memagent_training" in path and "command" not in Path(path).name:
            journey.is_on = has_begun = frame.f_code.co_name != "<module>" and "cli" not in path
        if event == "return" and path.endswith("algorithm/loss.py") and frame.f_code.co_name == "__call__":
            journey.is_on, has_ended = False, True
        if not has_ended:
            journey.profile(frame, event, argument)

    setting_options = [argument for name, value in SGD_STEP.items() for argument in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder, isolate_home(Path(folder)):
        runs = write_log_lines(TRAINING / "runs.jsonl", Path(folder) / "runs.sqlite")
        sys.setprofile(profile)
        _, _, errors = run_memagent(
            *("train", runs, "--model", TRAINING / "model", "--out", Path(folder) / "out"),
            *("--preset", "memagent-paper", *setting_options),
        )
        sys.setprofile(None)
    if not has_ended:
        raise SystemExit(f"the training did not compute a loss: {errors}")
    return journey


def main() -> None:
    """Print the counts of a checkout, in a new process if PYTHONPATH is not right for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1], metavar="FOLDER")
    root = parser.parse_args().folder.resolve()
    paths = [str(root / folder) for folder in (".", "integrations", "training", "tests")]
    if os.environ.get("PYTHONPATH", "").split(os.pathsep) != paths:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        raise SystemExit(subprocess.call([sys.executable, __file__, str(root)], env=environment, cwd=root))
    names = ("document to request body", "reply to log row", "a chunk")
    journeys = dict(zip(names, count_read(root), strict=True))
    for name, journey in {**journeys, "logged run to loss": count_training(root)}.items():
        print(f"{name}: {journey}")
        print(f"  {', '.join(sorted(journey.files))}")


if __name__ == "__main__":
    main()
