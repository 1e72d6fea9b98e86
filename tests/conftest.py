"""Tests at two sizes: small in `make test`, full in `make soak`, which continues where it was stopped.

A test with the fixture `size` runs the same code at both. With `--soak FILE` it runs at full size, and its figures go
into the file with the commit and the run time; a test that has passed at this commit is not run again.
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

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a shell; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


MEMORY = Path("/dev/shm")
"""A file system in memory, where writes do not wait for a disk."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the folders of tests in memory if it has room; not at full size."""
    if config.getoption("--soak") is not None or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free > 4 * 2**30 and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=Path, metavar="FILE", help="run at full size, and add the results to FILE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests with two sizes; at full size run only those that have not passed at this commit."""
    for item in items:
        if "size" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.soak)
    path: Path | None = config.getoption("--soak")
    if path is None:
        return
    passed = {result["test"] for result in _load_results(path) if result["commit"] == _describe_commit()}
    selected = [item for item in items if item.get_closest_marker("soak") and item.nodeid not in passed]
    for item in selected:
        item.add_marker(pytest.mark.timeout(0))
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected


def pytest_collection_finish() -> None:
    """Exclude imported modules from later garbage collections; accelerate starts one with each training run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tests away from the user's folders, keys and servers."""
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PGPASSWORD", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def nobody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make retries of a policy immediate."""
    sleep = asyncio.sleep
    monkeypatch.setattr("memagent_graph.policies.sending.asyncio.sleep", lambda seconds: sleep(0))


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int], int]]:
    """Returns the size to run at: `size(small, full)`. The figures of a test come from its `record_property`."""
    path: Path | None = request.config.getoption("--soak")
    sizes: list[int] = []

    def choose(small: int, full: int) -> int:
        sizes.append(small if path is None else full)
        return sizes[-1]

    start = time.monotonic()
    yield choose
    if path is not None and request.node.stash[_HAS_PASSED]:
        figures = {name: value for name, value in request.node.user_properties if not name.startswith("timeout")}
        entry = {
            "test": request.node.nodeid,
            "commit": _describe_commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "sizes": sizes,
            "seconds": round(time.monotonic() - start),
            "figures": figures,
        }
        other_results = [result for result in _load_results(path) if result["test"] != entry["test"]]
        temporary_path = path.with_suffix(".partial")
        temporary_path.write_text(json.dumps([*other_results, entry], indent=1) + "\n", encoding="utf-8")
        temporary_path.replace(path)


_HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    return report


def _load_results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def _describe_commit() -> str:
    """Return the commit, marked as dirty if files differ from it: such results count for no commit."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
