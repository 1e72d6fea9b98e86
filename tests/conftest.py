"""Tests at two sizes: small in `make test`, full in `make soak`, which resumes where it was stopped.

A test that takes `size` runs the same code at both. With `--soak FILE` it runs at full size, and what it measured goes
into the file with the commit and the time it took; a test that passed at this commit is not run again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; programs that are run inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


MEMORY = Path("/dev/shm")
"""A file system in memory: what tests write need not wait for a disk."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the folders of tests in memory where it has room; not at full size."""
    if config.getoption("--soak") is not None or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free > 4 * 2**30 and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=Path, metavar="FILE", help="run at full size, and add the results to FILE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that have two sizes; at full size run those alone that have not passed at this commit."""
    for item in items:
        if "size" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.soak)
    path: Path | None = config.getoption("--soak")
    if path is None:
        return
    passed = {result["test"] for result in _results(path) if result["commit"] == _commit()}
    chosen = [item for item in items if item.get_closest_marker("soak") and item.nodeid not in passed]
    for item in chosen:
        item.add_marker(pytest.mark.timeout(0))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Take what was imported out of later searches for garbage; accelerate begins one with each training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own folders, keys or servers."""
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PGPASSWORD", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def nobody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy does not wait before it asks a server again."""
    sleep = asyncio.sleep
    monkeypatch.setattr("memagent_graph.policies.sending.asyncio.sleep", lambda seconds: sleep(0))


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int], int]]:
    """`size(small, full)` is the size to run at. The figures are what the test gives to `record_property`."""
    path: Path | None = request.config.getoption("--soak")
    sizes: list[int] = []

    def choose(small: int, full: int) -> int:
        sizes.append(small if path is None else full)
        return sizes[-1]

    begin = time.monotonic()
    yield choose
    if path is not None and request.node.stash[_HAS_PASSED]:
        figures = {name: value for name, value in request.node.user_properties if not name.startswith("timeout")}
        entry = {
            "test": request.node.nodeid,
            "commit": _commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "sizes": sizes,
            "seconds": round(time.monotonic() - begin),
            "figures": figures,
        }
        others = [result for result in _results(path) if result["test"] != entry["test"]]
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps([*others, entry], indent=1) + "\n", encoding="utf-8")
        whole.replace(path)


_HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    return report


def _results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def _commit() -> str:
    """The commit, and whether files differ from it: such results are not those of a commit, and are run again."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
