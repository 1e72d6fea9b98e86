from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from blockbuster import blockbuster_ctx
from hypothesis import settings
from support.scripts import SMALL_BUDGET, read_perfectly

from memagent_graph import DocumentStore, MemAgent, RunLog, ScriptedPolicy, load_prompts
from memagent_graph.documents import conversion
from memagent_graph.policies.profile import EMBEDDED_FOLDER

# Speed is measured by benchmarks. Examples differ between runs, except in CI.
settings.register_profile("untimed", deadline=None, max_examples=25)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def cached_ssl_context() -> Iterator[None]:
    """Load the certificates once: each HTTP client would load them again, which is slower than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a model in the local hub cache without a network: a copy of the embedded one."""
    from huggingface_hub import constants

    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc123").symlink_to(EMBEDDED_FOLDER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "some/model"


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    return DocumentStore(tmp_path / "documents")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    with closing(RunLog(tmp_path / "runs.sqlite")) as log:
        yield log


@pytest.fixture
def in_process_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert files in this process; a separate one starts slowly, and only tests of its limits need it."""

    def convert_in_process(task: Any, source: Any, result: Any, cancellation: Any) -> int:
        with os.fdopen(os.dup(source.fileno()), "rb") as file:
            conversion.conversion_program.convert(task, file, result)
        return 0

    monkeypatch.setattr(conversion, "_run_conversion", convert_in_process)


@pytest.fixture
def langgraph_dev() -> Iterator[None]:
    """Raises for calls that block the event loop, like `langgraph dev`, which allows some. Request it last."""
    with blockbuster_ctx(["langchain_memagent", "memagent_graph"]) as detector:
        for name, function in detector.functions.items():
            if name.startswith(("os.path.", "os.stat", "os.listdir", "os.remove", "io.", "threading.")):
                function.deactivate()
        yield


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[..., MemAgent]]:
    """Makes readers with small budgets and a scripted policy, which are closed when the test ends."""
    readers: list[MemAgent] = []

    def make(policy: Any = None, **options: Any) -> MemAgent:
        reader = MemAgent(
            policy or ScriptedPolicy(read_perfectly),
            **{
                "tokenizer": "embedded",
                "budget": SMALL_BUDGET,
                "prompts": load_prompts(),
                "store": DocumentStore(tmp_path / "documents"),
                **options,
            },
        )
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.close()
